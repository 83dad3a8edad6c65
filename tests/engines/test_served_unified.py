"""Images of unified models by vLLM-Omni, from our words, initial latents and noise, on random weights."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served_engines import SERVED
from unified_folders import save_bagel, save_hunyuan_image3

from unirl.models.bagel.bundle import BagelBundle
from unirl.models.bagel.pipeline import BagelPipeline
from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.pipeline import HunyuanImage3Pipeline
from unirl.models.hunyuan_image3.transformer import expert_stacks
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.adapters import FACTOR_A, FACTOR_B, merged_weight
from unirl.types.errors import WeightSyncError
from unirl.types.media import Images, Texts
from unirl.types.noise import noise_keys
from unirl.types.rollout import RolloutReq, RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment
from unirl.types.weights import (
    AdapterConfig,
    WeightBucket,
    WeightSpec,
    in_published_parts,
    weight_buckets,
    weight_specs,
)

pytestmark = [pytest.mark.vllm_omni, pytest.mark.slow]

PROMPTS = ["a cat", "two red squares above a circle"]
THOUGHTS = ["<think>small</think><recaption>a grey cat</recaption>", "<think>flat</think><recaption>two</recaption>"]


@dataclasses.dataclass(frozen=True)
class Unified:
    """A model, its pipeline over it, and the engine of both."""

    bundle: Any
    pipeline: Any
    engine: Any
    guidance: tuple[dict[str, Any], ...]
    """Every kind of guidance among sampling parameters."""
    height: int
    width: int


def _bagel(folder: Path, **options: Any) -> Unified:
    bundle = BagelBundle(str(save_bagel(folder)), trains="both")
    pipeline = BagelPipeline(bundle, FlowSDEStrategy(), system_prompt="Plan, then draw.")
    images = {"guidance_scale_image": 1.5}
    guidance = (
        {"guidance_scale": 1.0},
        {"guidance_scale": 4.0, "sampler_kwargs": {"guidance_interval": [0.4, 1.0]}},
        {"guidance_scale": 4.0, "sampler_kwargs": {**images, "guidance_renorm": "channel"}},
        {"guidance_scale": 3.0, "sampler_kwargs": images, "negative_prompt": "blurred"},
    )
    return Unified(bundle, pipeline, _engine(pipeline, folder, **options), guidance, 32, 64)


def _hunyuan(folder: Path, **options: Any) -> Unified:
    bundle = HunyuanImage3Bundle(str(save_hunyuan_image3(folder)), trains="all")
    pipeline = HunyuanImage3Pipeline(bundle, FlowSDEStrategy(), system_prompt="Draw what is asked.")
    guidance = (
        {"guidance_scale": 1.0},
        {"guidance_scale": 5.0},
        {"guidance_scale": 2.5, "sampler_kwargs": {"guidance_interval": [0.5, 1.0]}},
    )
    return Unified(bundle, pipeline, _engine(pipeline, folder, **options), guidance, 32, 96)


def _engine(pipeline: Any, folder: Path, **options: Any) -> Any:
    return SERVED["vllm_omni"].start(pipeline, folder, forward_batch_size=2, **options)


MODELS: dict[str, Callable[..., Unified]] = {"bagel": _bagel, "hunyuan_image3": _hunyuan}
"""(folder, options of the engine) -> one that runs."""


@pytest.fixture(scope="module", params=MODELS)
def unified(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unified]:
    made = MODELS[request.param](tmp_path_factory.mktemp("served") / request.param)
    yield made
    made.engine.shutdown()


def params_of(unified: Unified, **changed: Any) -> DiffusionSamplingParams:
    settings: dict[str, Any] = {
        "height": unified.height,
        "width": unified.width,
        "num_inference_steps": 4,
        "guidance_scale": 1.0,
        "eta": 0.7,
        "sde_indices": [0, 2],
        "keep_latents": "all",
        "autocast_precision": "fp32",
        **changed,
    }
    if settings["guidance_scale"] > 1:
        settings.setdefault("negative_prompt", "")
    return DiffusionSamplingParams(**settings)


def request(unified: Unified, params: DiffusionSamplingParams, **more: Any) -> RolloutReq:
    names = [f"s{number}" for number in range(len(PROMPTS))]
    pipeline = unified.pipeline
    return RolloutReq(
        sample_ids=names,
        group_ids=names,
        primitives={"text": Texts(texts=PROMPTS), **more},
        sampling_params=params,
        sigmas=pipeline.sigmas(params),
        init_noise_group_ids=noise_keys(3, names, names, same_noise=False),
        init_noise_latent_shape=list(pipeline.latent_shape(params)),
        rollout_id=3,
    )


def replayed(unified: Unified, track: RolloutTrack, params: DiffusionSamplingParams) -> tuple[torch.Tensor, Any]:
    """Log-probs [B, S] of the trainer's model, and the segment."""
    segment, rows = track.segment, torch.arange(track.batch_size)
    assert isinstance(segment, LatentSegment)
    with unified.pipeline.evaluating():
        columns = [
            unified.pipeline.replay(track.conditions, segment, rows, torch.full_like(rows, step), params).logp_R
            for step in segment.sde_indices
        ]
    return torch.stack(columns, dim=1), segment


@pytest.mark.parametrize("kind", range(4))
def test_trajectories_are_those_of_the_trainers_own_model(kind: int, unified: Unified) -> None:
    if kind >= len(unified.guidance):
        pytest.skip("the model has fewer kinds of guidance")
    check_trajectories(unified, kind)


def check_trajectories(unified: Unified, kind: int) -> None:
    """Assert that images of thoughts are those of the trainer's model, with one kind of guidance."""
    params = params_of(unified, **unified.guidance[kind])
    req = request(unified, params, thought=Texts(texts=THOUGHTS))
    track = unified.engine.generate(req).root_track()
    logp_BS, segment = replayed(unified, track, params)
    with unified.pipeline.evaluating():
        conditions = unified.pipeline.encode(req.primitives, params)
        ours = unified.pipeline.diffuse(
            conditions,
            segment.latents[:, 0],
            req.sigmas,
            params,
            noise_keys=noise_keys(3, req.sample_ids, req.sample_ids, same_noise=False),
        )
    # float32 over four steps in another order of sums, where guidance makes differences larger.
    torch.testing.assert_close(segment.latents, ours.latents, rtol=0, atol=2e-5)
    assert segment.sde_logp is not None
    assert float((logp_BS - segment.sde_logp).abs().max()) < unified.engine.logp_gap_float32
    assert isinstance(track.decoded, Images) and track.decoded.pixels.shape[-2:] == (unified.height, unified.width)


def test_a_thought_and_guidance_change_what_is_drawn(unified: Unified) -> None:
    """So that none of the comparisons above is of the same numbers."""
    plain = params_of(unified)
    ends = [
        unified.engine.generate(request(unified, params, **more)).root_track().segment.latents[:, -1]
        for params, more in (
            (plain, {}),
            (plain, {"thought": Texts(texts=THOUGHTS)}),
            *((params_of(unified, **each), {}) for each in unified.guidance[1:]),
        )
    ]
    for place, end in enumerate(ends):
        assert all(float((end - other).abs().max()) > 1e-3 for other in ends[:place])


def test_what_it_cannot_draw_is_refused(unified: Unified) -> None:
    picture = Images(pixels=torch.rand(2, 3, 64, 64))
    with pytest.raises(Exception, match="vLLM-Omni is given text alone"):
        unified.engine.generate(request(unified, params_of(unified), image=picture))


def push(engine: Any, module: torch.nn.Module, version: int, *, without: str = "") -> Any:
    weights = {name: tensor for name, tensor in plain(module).items() if name != without}
    engine.begin_weights(
        version, [WeightSpec(name, tuple(t.shape), "torch.float32", "") for name, t in weights.items()]
    )
    for bucket in weight_buckets(iter(weights.items()), policy_version=version, max_bytes=1 << 20):
        engine.receive_weights(bucket)
    return engine.finish_weights(version)


def plain(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    return in_published_parts(state, expert_stacks(module))


def test_a_push_reaches_every_weight_that_draws(unified: Unified) -> None:
    """Last: it leaves the engine with other weights."""
    check_pushes(unified)


def check_pushes(unified: Unified) -> None:
    """Assert that half a push is refused and a whole one draws; the engine has other weights afterwards."""
    (module,) = unified.bundle.trainable_modules().values()
    params = params_of(unified, guidance_scale=2.0)
    req = request(unified, params)
    before = unified.engine.generate(req).root_track().segment.latents[:, -1]
    with pytest.raises(WeightSyncError):
        push(unified.engine, module, 1, without=next(iter(plain(module))))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    receipt = push(unified.engine, module, 1)
    assert receipt.num_tensors == len(plain(module)) and receipt.num_bound is not None
    track = unified.engine.generate(req).root_track()
    logp_BS, segment = replayed(unified, track, params)
    assert float((segment.latents[:, -1] - before).abs().max()) > 1e-2
    assert float((logp_BS - segment.sde_logp).abs().max()) < unified.engine.logp_gap_float32
    assert track.policy_versions.tolist() == [1, 1]


RANK = 4


def adapter(unified: Unified, seed: int, *, version: int) -> tuple[WeightBucket, AdapterConfig]:
    """Random factors of every layer that LoRA trains."""
    (module,) = unified.bundle.trainable_modules().values()
    targets = unified.bundle.lora_target_modules
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and any(name == end or name.endswith(f".{end}") for end in targets):
            out, width = layer.weight.shape
            tensors[name + FACTOR_A] = torch.randn(RANK, width, generator=generator) * 0.2
            tensors[name + FACTOR_B] = torch.randn(out, RANK, generator=generator) * 0.2
    config = AdapterConfig(rank=RANK, alpha=2 * RANK, target_modules=tuple(targets))
    return WeightBucket(version, tensors, tuple(weight_specs(tensors))), config


@pytest.mark.parametrize("model", [pytest.param("bagel", marks=pytest.mark.nightly), "hunyuan_image3"])
def test_an_adapter_is_merged_by_the_workers_in_the_place_of_the_last(model: str, tmp_path: Path) -> None:
    unified = MODELS[model](tmp_path / model, max_lora_rank=RANK)
    try:
        (module,) = unified.bundle.trainable_modules().values()
        base = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        params = params_of(unified, guidance_scale=2.0)
        req = request(unified, params)
        drawn = [unified.engine.generate(req).root_track().segment.latents[:, -1]]
        for version in (1, 2):
            bucket, config = adapter(unified, seed=version, version=version)
            receipt = unified.engine.load_adapter(bucket, config)
            assert receipt.num_tensors == 2 * receipt.num_bound == len(bucket.tensors) > 0
            module.load_state_dict(base)
            state = module.state_dict()
            for layer in {name.removesuffix(FACTOR_A) for name in bucket.tensors if name.endswith(FACTOR_A)}:
                a, b = (bucket.tensors[layer + end] for end in (FACTOR_A, FACTOR_B))
                own = state[f"{layer}.weight"]
                own.copy_(merged_weight(own, a, b, rank=RANK, alpha=config.alpha))
            track = unified.engine.generate(req).root_track()
            logp_BS, segment = replayed(unified, track, params)
            assert float((logp_BS - segment.sde_logp).abs().max()) < unified.engine.logp_gap_float32
            drawn.append(segment.latents[:, -1])
            assert track.policy_versions.tolist() == [version, version]
        assert all(float((one - other).abs().max()) > 1e-2 for one, other in itertools.pairwise(drawn))

        bucket, config = adapter(unified, seed=3, version=3)
        layer = next(iter(bucket.tensors)).removesuffix(FACTOR_A)
        fewer = {name: tensor for name, tensor in bucket.tensors.items() if not name.startswith(f"{layer}.")}
        with pytest.raises(WeightSyncError, match="has other layers than the last one"):
            unified.engine.load_adapter(WeightBucket(3, fewer, tuple(weight_specs(fewer))), config)
    finally:
        unified.engine.shutdown()
