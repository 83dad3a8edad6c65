"""LoRA adapters in the real vLLM, fp32 on a CPU: swapped, verified, proved, given again where a process dies."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from letters_model import CONTEXT, TOLERANCE, LetterCodec, ReplayedQwen3, backend_of, gap, request, save_qwen3

from unirl.distributed.weight_sync.lora import LoraWeightSync
from unirl.rollout.engine.vllm_llm.engine import VLLMRolloutEngine
from unirl.train.configs import LoraConfig
from unirl.types.errors import ConfigError, WeightSyncError
from unirl.types.sampling import ARSamplingParams
from unirl.types.weights import AdapterConfig, WeightBucket, weight_spec

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine(vllm_python, tmp_path_factory) -> Iterator[VLLMRolloutEngine]:
    """An engine for adapters."""
    folder = tmp_path_factory.mktemp("base")
    save_qwen3(folder)
    engine = VLLMRolloutEngine(
        LetterCodec(),
        model=str(folder),
        python=vllm_python,
        dtype="fp32",
        context_length=CONTEXT,
        kv_cache_bytes=64 << 20,
        max_lora_rank=8,
    )
    yield engine
    engine.shutdown()


def adapted(tmp_path, seed, **options):
    """The base with an adapter whose factors are both random, and its backend."""
    model = save_qwen3(tmp_path)
    backend = backend_of(model, LoraConfig(rank=4, alpha=8, **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in backend.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model, backend


def lora_sync(engine, model, backend):
    pipeline: Any = ReplayedQwen3(model)
    sampling = ARSamplingParams(temperature=1.0)
    return LoraWeightSync(backend, engine, pipeline, sampling=sampling, dtype="fp32", canary_tolerance=1e-4)


def push(engine, tensors, *, version=0, rank=4):
    specs = tuple(weight_spec(name, tensor) for name, tensor in tensors.items())
    return engine.load_adapter(WeightBucket(version, tensors, specs), AdapterConfig(rank, 8.0, ("q_proj",)))


def test_an_adapter_takes_the_place_of_the_one_before(engine, tmp_path):
    for seed in (1, 2):
        model, backend = adapted(tmp_path / str(seed), seed)
        if seed == 2:
            assert gap(engine, model) > 0.01
        metrics = lora_sync(engine, model, backend).push()
        # q_proj, v_proj and down_proj in each of two layers
        assert (metrics["sync/tensors"], metrics["sync/bound"]) == (12, 6)
        assert metrics["sync/logprob_gap_max"] < TOLERANCE
        assert gap(engine, model) < TOLERANCE


def test_an_adapter_that_does_not_fit_is_listed_and_the_last_one_stays(engine, tmp_path):
    model, backend = adapted(tmp_path, 3)
    lora_sync(engine, model, backend).push()
    wrong = backend.weight_source.adapter_weights()
    layer = "model.layers.0.self_attn.q_proj"
    wrong[f"{layer}.lora_A.weight"] = wrong[f"{layer}.lora_A.weight"][:, :-1]
    del wrong["model.layers.1.mlp.down_proj.lora_B.weight"]
    wrong["model.layers.7.mlp.down_proj.lora_B.weight"] = torch.zeros(64, 4)
    half = "model.layers.0.self_attn.v_proj.lora_B.weight"
    wrong[half] = wrong[half].half()
    with pytest.raises(WeightSyncError) as raised:
        push(engine, wrong)
    for line in (
        "the adapter does not fit the engine's model (4)",
        "missing: model.layers.1.mlp.down_proj.lora_B.weight [64, 4]",
        "unknown: model.layers.7.mlp.down_proj.lora_B.weight [64, 4]",
        f"shape: {layer}.lora_A.weight is [4, 63], expected [4, 64]",
        f"dtype: {half} is torch.float16, expected torch.float32",
    ):
        assert line in str(raised.value)
    assert gap(engine, model) < TOLERANCE


def test_the_canary_catches_an_adapter_of_another_scale(engine, tmp_path):
    model, backend = adapted(tmp_path, 4)
    backend.weight_source.adapter_config = lambda: AdapterConfig(4, 16.0, ("q_proj", "v_proj", "down_proj"))
    with pytest.raises(WeightSyncError, match="differ by up to .* adapter scale"):
        lora_sync(engine, model, backend).push()


def test_full_weights_are_refused_by_an_engine_for_adapters(engine):
    with pytest.raises(ConfigError, match="push the adapter"):
        engine.begin_weights(1, [])


def test_an_engine_that_is_killed_while_it_generates_is_replaced_with_its_adapter(engine, tmp_path):
    model, backend = adapted(tmp_path, 5)
    lora_sync(engine, model, backend).push()
    long = ARSamplingParams(temperature=1.0, max_new_tokens=CONTEXT - 4)
    found = []
    (pid,) = engine.pids
    os.kill(pid, signal.SIGSTOP)  # so that it does not answer before it is killed
    thread = threading.Thread(target=lambda: found.append(engine.generate(request(["abc"] * 64, long))))
    thread.start()
    while engine._running is None and thread.is_alive():
        thread.join(0.01)
    os.kill(pid, signal.SIGKILL)
    thread.join(300)
    assert found[0].tracks["text"].segment.batch_size == 64
    assert engine.pids != [pid] and engine._pool.num_restarts == 1
    assert gap(engine, model) < TOLERANCE
