"""Engines in their own processes on this machine's accelerator, as recipes start them.

Each test needs the interpreter that has its engine, named as for recipes: VLLM_PYTHON, VLLM_OMNI_PYTHON or
SGLANG_PYTHON. Those of sleep measure the whole device: run nothing else on it.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "engines"), str(ROOT)]

from tests.engines.letters_model import CONTEXT, LetterCodec, ReplayedQwen3, gap, request, save_qwen3  # noqa: E402 - next to this
from tests.engines.recipe_runs import SMALL_SHAPES, finish, records, train  # noqa: E402 - next to this
from tests.engines.shapes_sd3 import CHECKPOINT, direct, pipeline_of  # noqa: E402 - next to this
from tests.engines.shapes_sd3 import request as request_of_images  # noqa: E402 - next to this
from tests.engines.test_vllm_lora import adapted  # noqa: E402 - as above

from unirl.distributed.weight_sync.lora import LoraWeightSync  # noqa: E402
from unirl.rollout.engine.sglang_diffusion.engine import SGLangDiffusionEngine  # noqa: E402
from unirl.rollout.engine.sglang_llm.engine import SGLangRolloutEngine  # noqa: E402
from unirl.rollout.engine.vllm_llm.engine import VLLMRolloutEngine  # noqa: E402
from unirl.rollout.engine.vllm_omni.engine import VLLMOmniEngine  # noqa: E402
from unirl.types.errors import WeightSyncError  # noqa: E402
from unirl.types.sampling import ARSamplingParams  # noqa: E402
from unirl.types.weights import weight_buckets  # noqa: E402

pytestmark = pytest.mark.gpu
TEXT_GAPS = {"fp32": 5e-3, "bf16": 0.15}
"""Nats: engines on an accelerator multiply with less than float32 where they attend (TF32)."""
LATENT_GAP = 2e-3
VARIABLES = {"vllm": "VLLM_PYTHON", "vllm_omni": "VLLM_OMNI_PYTHON", "sglang": "SGLANG_PYTHON"}
SMALL_IMAGES = ("num_rollouts=2", *SMALL_SHAPES)
SGLANG_SHARE = {
    "mem-fraction-static": 0.2,
    "disable-cuda-graph": True,
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "skip-server-warmup": True,
}


def python_of(engine: str) -> str:
    """The interpreter of an engine; skips the test where none is named."""
    python = os.environ.get(VARIABLES[engine])
    if not python:
        pytest.skip(f"needs the interpreter that has {engine} in {VARIABLES[engine]}")
    return python


def pushed(engine: Any, tensors: Any, version: int) -> Any:
    """The receipt of a push of tensors that are on the accelerator."""
    named = list(tensors.items())
    buckets = list(weight_buckets(named, policy_version=version, max_bytes=100_000))
    engine.begin_weights(version, [spec for bucket in buckets for spec in bucket.specs])
    for bucket in buckets:
        engine.receive_weights(bucket)
    return engine.finish_weights(version)


# Texts


def vllm(folder: Path, device: str, dtype: str, **options: Any) -> VLLMRolloutEngine:
    return VLLMRolloutEngine(
        LetterCodec(),
        model=str(folder),
        python=python_of("vllm"),
        device=device,
        dtype=dtype,
        context_length=CONTEXT,
        kv_cache_bytes=64 << 20,
        engine_args={"gpu_memory_utilization": 0.1, "enforce_eager": True},
        **options,
    )


def sglang(folder: Path, device: str, dtype: str, **options: Any) -> SGLangRolloutEngine:
    return SGLangRolloutEngine(
        LetterCodec(),
        model=str(folder),
        python=python_of("sglang"),
        device=device,
        dtype=dtype,
        context_length=CONTEXT,
        kv_cache_tokens=64 * CONTEXT,
        engine_args=SGLANG_SHARE,
        **options,
    )


TEXTS = [
    pytest.param(vllm, "fp32", id="vllm-fp32", marks=pytest.mark.vllm),
    pytest.param(vllm, "bf16", id="vllm-bf16", marks=pytest.mark.vllm),
    # SGLang's kernels for norms have no float32 on a GPU.
    pytest.param(sglang, "bf16", id="sglang-bf16", marks=pytest.mark.sglang),
]


@pytest.mark.parametrize(("start", "dtype"), TEXTS)
def test_a_text_engine_samples_and_takes_pushes(start, dtype, device, tmp_path, record_property):
    bound, own = TEXT_GAPS[dtype], {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    base, other = saved(tmp_path / "base", own), saved(tmp_path / "other", own, seed=1)
    engine = start(tmp_path / "base", device, dtype)
    try:
        first = gap(engine, base)
        record_property("log_prob_gap", first)
        assert first < bound and gap(engine, other) > 2 * bound
        tensors = tensors_of(other, device, own)
        receipt = pushed(engine, tensors, 3)
        assert (receipt.policy_version, receipt.num_tensors) == (3, len(tensors))
        assert gap(engine, other) < bound
        long = ARSamplingParams(temperature=1.0, max_new_tokens=CONTEXT - 8, seed=2)
        track = engine.generate(request([f"word {row}" for row in range(64)], long)).tracks["text"]
        assert track.policy_versions.tolist() == [3] * 64
    finally:
        engine.shutdown()


@pytest.mark.vllm
@pytest.mark.parametrize("level", [1, 2])
def test_vllm_gives_memory_back_while_it_sleeps(level, device, tmp_path):
    bound = TEXT_GAPS["bf16"]
    base, other = saved(tmp_path / "base", torch.bfloat16), saved(tmp_path / "other", torch.bfloat16, seed=1)
    engine = vllm(tmp_path / "base", device, "bf16", sleep_level=level)
    try:
        assert gap(engine, base) < bound
        tensors = tensors_of(other, device, torch.bfloat16)
        pushed(engine, tensors, 1)
        sleeps(engine, device)
        if level == 2:
            with pytest.raises(WeightSyncError):
                gap(engine, other)
            pushed(engine, tensors, 2)
        assert gap(engine, other) < bound
        sleeps(engine, device)
        pushed(engine, tensors_of(base, device, torch.bfloat16), 3)
        assert gap(engine, base) < bound
    finally:
        engine.shutdown()


def saved(folder: Path, dtype: torch.dtype, seed: int = 0) -> Any:
    """A model in float32 whose weights a checkpoint in `dtype` holds."""
    model = save_qwen3(folder, seed=seed).to(dtype)
    model.save_pretrained(folder)
    return model.float()


def tensors_of(model: torch.nn.Module, device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to(device, dtype) for name, tensor in model.named_parameters()}


def sleeps(engine: Any, device: str) -> None:
    """Sleep and wake up; memory of the device is given back in between."""
    awake = torch.accelerator.get_memory_info(device)[0]
    engine.sleep()
    asleep = torch.accelerator.get_memory_info(device)[0]
    print(f"asleep it gives back {(asleep - awake) / 1e6:.0f} MB")
    assert asleep > awake
    engine.wake_up()


@pytest.mark.vllm
def test_adapters_act_in_vllm(device, tmp_path):
    saved(tmp_path / "base", torch.bfloat16)
    engine = vllm(tmp_path / "base", device, "bf16", max_lora_rank=8)
    try:
        for seed in (1, 2):
            model, backend = adapted(tmp_path / str(seed), seed)
            pipeline: Any = ReplayedQwen3(model)
            sampling = ARSamplingParams(temperature=1.0)
            metrics = LoraWeightSync(
                backend, engine, pipeline, sampling=sampling, dtype="bf16", canary_tolerance=2 * TEXT_GAPS["bf16"]
            ).push()
            assert (metrics["sync/tensors"], metrics["sync/bound"]) == (12, 6)
            assert gap(engine, model) < TEXT_GAPS["bf16"]
    finally:
        engine.shutdown()


# Images

IMAGES = [
    pytest.param("vllm_omni", VLLMOmniEngine, 1, {}, id="vllm_omni", marks=pytest.mark.vllm_omni),
    pytest.param(
        "sglang", SGLangDiffusionEngine, 0, {"attention_backend": "torch_sdpa"}, id="sglang", marks=pytest.mark.sglang
    ),
]


@pytest.mark.parametrize(("name", "engine_class", "level", "engine_args"), IMAGES)
def test_an_engine_of_latents_samples_takes_pushes_and_sleeps(
    name, engine_class, level, engine_args, device, record_property
):
    """The trainer's side computes on the host here, so that its latents are those of other tests."""
    pipeline: Any = pipeline_of()
    engine = engine_class(
        pipeline,
        model=str(CHECKPOINT),
        python=python_of(name),
        device=device,
        dtype="fp32",
        forward_batch_size=8,
        sleep_level=level,
        engine_args=engine_args,
    )
    try:
        first = latent_gap(engine, pipeline)
        record_property("latent_gap", first)
        assert first < LATENT_GAP
        transformer = pipeline.bundle.transformer
        with torch.no_grad():
            for parameter in transformer.parameters():
                parameter.mul_(1.1)
        assert latent_gap(engine, pipeline) > 2 * LATENT_GAP
        tensors = {name: tensor.to(device) for name, tensor in transformer.state_dict().items()}
        receipt = pushed(engine, tensors, 1)
        assert (receipt.policy_version, receipt.num_tensors) == (1, len(tensors))
        assert latent_gap(engine, pipeline) < LATENT_GAP
        if level:
            sleeps(engine, device)
            assert latent_gap(engine, pipeline) < LATENT_GAP
    finally:
        engine.shutdown()


def latent_gap(engine: Any, pipeline: Any) -> float:
    req = request_of_images(pipeline)
    found = engine.generate(req).tracks["image"].segment.latents
    return float((found - direct(pipeline, req).latents).abs().max())


# Recipes


RECIPES = [
    pytest.param(
        "vllm",
        "worlds/arithmetic/vllm",
        ("+engine.engine_args={gpu_memory_utilization:0.1,enforce_eager:true}", "num_rollouts=4"),
        TEXT_GAPS["fp32"],
        id="vllm-fp32",
        marks=pytest.mark.vllm,
    ),
    pytest.param(
        "sglang",
        "worlds/arithmetic/sglang",
        (
            "+engine.engine_args={mem-fraction-static:0.2,disable-cuda-graph:true,attention-backend:triton,"
            "sampling-backend:pytorch,grammar-backend:none}",
            "engine.dtype=bf16",
            "num_rollouts=2",
        ),
        TEXT_GAPS["bf16"],
        id="sglang-text",
        marks=pytest.mark.sglang,
    ),
    pytest.param(
        "vllm_omni", "worlds/shapes/vllm_omni", SMALL_IMAGES, LATENT_GAP, id="vllm_omni", marks=pytest.mark.vllm_omni
    ),
    pytest.param(
        "sglang",
        "worlds/shapes/sglang",
        (*SMALL_IMAGES, "+engine.engine_args.attention_backend=torch_sdpa"),
        LATENT_GAP,
        id="sglang-images",
        marks=pytest.mark.sglang,
    ),
]


@pytest.mark.parametrize(("engine", "recipe", "words", "bound"), RECIPES)
def test_a_recipe_trains_on_the_samples_of_an_engine(engine, recipe, words, bound, device, tmp_path, record_property):
    found = trained(
        tmp_path,
        recipe,
        f"device={device}",
        f"engine.python={python_of(engine)}",
        f"sync.canary_tolerance={2 * bound}",
        "guardrails.action=off",
        *words,
    )
    for step, record in sorted(found.items()):
        if step:
            record_property(f"gap_{step}", record["mismatch/logp_absdiff/max"])
            assert record["mismatch/logp_absdiff/mean"] < bound
            assert record["policy/first_ratio_max_abs_dev"] < 1e-2
        if step > 1:
            assert record["sync/tensors"] > 0


def trained(tmp_path: Path, *words: str) -> dict[int, dict[str, float]]:
    """Metrics of the rollouts of a run of the command, by number."""
    run_dir = tmp_path / "run"
    finish(train(run_dir, *words), run_dir)
    return records(run_dir)
