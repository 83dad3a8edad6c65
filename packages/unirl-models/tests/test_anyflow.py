"""What only AnyFlow FAR has: chunks, the history of each, and average velocities."""

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from unirl.models.anyflow.chunks import Resolution, cut, ranges
from unirl.models.anyflow.pipeline import AnyFlowFARPipeline
from unirl.models.tiny.anyflow import PARTITION
from unirl.sde.kernels import ConsistencySDEStrategy, FlowSDEStrategy, SDEStrategy
from unirl.sde.noise import initial_noise, step_noise
from unirl.types.conditions import ImageLatentCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

from .families.kit import KEYS, TEXTS, Loaded, load

RELEASED = (1, 3, 3, 3, 3, 3, 3, 2)
CHUNKS = ranges(PARTITION)


@pytest.fixture(scope="module")
def anyflow(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load("anyflow_far", tmp_path_factory.mktemp("anyflow") / "anyflow")


def by(anyflow: Loaded, strategy: SDEStrategy) -> AnyFlowFARPipeline:
    bundle: Any = anyflow.ours.bundle
    return AnyFlowFARPipeline(bundle, strategy)


def cm_params(anyflow: Loaded, **changes: Any) -> DiffusionSamplingParams:
    """Consistency sampling: four steps, all but the last stochastic."""
    fields = {"num_inference_steps": 4, "eta": 1.0, "sde_indices": [0, 1, 2], "guidance_scale": 1.0}
    return anyflow.family.sampling(**fields, **changes)


def sampled(
    pipeline: AnyFlowFARPipeline, params: DiffusionSamplingParams, noise: Tensor
) -> tuple[dict[str, Any], LatentSegment]:
    with pipeline.evaluating():
        conditions: Any = pipeline.encode({"text": Texts(texts=list(TEXTS))}, params)
        segment = pipeline.diffuse(conditions, noise, pipeline.sigmas(params), params, noise_keys=KEYS)
    return conditions, segment


def noise_of(pipeline: AnyFlowFARPipeline, params: DiffusionSamplingParams) -> Tensor:
    return initial_noise(KEYS, params.seed, pipeline.latent_shape(params))


# How a video is cut ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_frames", "sizes"),
    [
        (21, list(RELEASED)),
        (1, [1]),
        (4, [1, 3]),
        (9, [1, 3, 3, 2]),
        (24, [1, 3, 3, 3, 3, 3, 3, 3, 2]),
    ],
)
def test_a_video_is_cut_as_released_or_into_the_largest_chunks(num_frames: int, sizes: list[int]) -> None:
    assert cut(RELEASED, num_frames) == sizes
    assert ranges([1, 3, 2]) == [slice(0, 1), slice(1, 4), slice(4, 6)]


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_tokens_see_what_the_librarys_mask_lets_them_see(anyflow: Loaded, num_chunks: int) -> None:
    """But for the keys of zeros, which only the stock pipeline's chunk in the making sees."""
    transformer: Any = anyflow.stock.transformer
    sizes = list(PARTITION[:num_chunks])
    mask = transformer.build_attention_mask(chunk_partition=sizes, height=4, width=6, device=torch.device("cpu"))
    spans = Resolution(whole=6, compressed=1, num_whole=2).spans(sizes)
    length = spans[-1][1]
    assert length == sum(size * (1 if num_chunks - at > 2 else 6) for at, size in enumerate(sizes))
    assert [zeros for *_, zeros in spans] == [0] * (num_chunks - 1) + [128 - 6 * sizes[-1]]
    query, key = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    expected = mask.mask_mod(0, 0, query, key)
    found = torch.zeros(length, length, dtype=torch.bool)
    for start, end, _ in spans:
        found[start:end, :end] = True
    assert torch.equal(found, expected)


# Which chunk depends on which -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", range(len(CHUNKS)))
def test_the_noise_of_a_chunk_moves_it_and_later_ones_alone(anyflow: Loaded, changed: int) -> None:
    pipeline, params = by(anyflow, ConsistencySDEStrategy()), cm_params(anyflow)
    noise = noise_of(pipeline, params)
    _, before = sampled(pipeline, params, noise)
    other = noise.clone()
    other[:, :, CHUNKS[changed]] += 0.5
    # The last stochastic step of consistency sampling forgets a little of it each time, and not all.
    _, after = sampled(pipeline, params, other)
    for index, frames in enumerate(CHUNKS):
        same = torch.equal(before.latents[:, :, :, frames], after.latents[:, :, :, frames])
        assert same == (index < changed), index


def test_a_prediction_sees_the_ends_of_earlier_chunks_and_nothing_else_of_them(anyflow: Loaded) -> None:
    pipeline, params = by(anyflow, FlowSDEStrategy()), anyflow.family.sampling()
    noise = noise_of(pipeline, params)
    conditions, segment = sampled(pipeline, params, noise)
    x, sigma, step = segment.latents_at(2), segment.sigmas[2].expand(3), torch.full((3,), 2)

    def velocity(x: Tensor, history: Tensor) -> Tensor:
        given = {**conditions, "history": ImageLatentCondition(latents=history)}
        with pipeline.evaluating():
            return pipeline.velocity(given, x, sigma, step, params)

    expected = velocity(x, segment.clean_latents)
    for changed, frames in enumerate(CHUNKS):
        moved = x.clone()
        moved[:, :, frames] += 0.5
        of_noisy = velocity(moved, segment.clean_latents)
        moved = segment.clean_latents.clone()
        moved[:, :, frames] += 0.5
        of_clean = velocity(x, moved)
        for index, own in enumerate(CHUNKS):
            assert torch.equal(of_noisy[:, :, own], expected[:, :, own]) == (index != changed)
            assert torch.equal(of_clean[:, :, own], expected[:, :, own]) == (index <= changed)


# The policy of CM-GRPO ------------------------------------------------------------------------------------------------


def stock_chunks(anyflow: Loaded, segment: LatentSegment, params: DiffusionSamplingParams) -> Iterator[tuple[int, Any]]:
    """Each chunk with the clean latents that the stock model's prediction ends on, as a function of its latents and
    level: by the library's own forward over its cache of keys and values."""
    stock: Any = anyflow.stock
    text = stock.encode_prompt(
        list(TEXTS), do_classifier_free_guidance=False, max_sequence_length=params.max_sequence_length
    )[0]
    stock._guidance_scale, stock._attention_kwargs = 1.0, None
    clean = segment.clean_latents.transpose(1, 2)
    config = stock.transformer.config
    cache: Any = {
        layer: {
            name: torch.zeros(2, len(clean), config.num_attention_heads, 64, config.attention_head_dim)
            for name in ("full_cache", "compressed_cache")
        }
        for layer in range(config.num_layers)
    }
    flag = {"num_cached_chunks": 0, "is_cache_step": False}
    for index in range(len(PARTITION)):

        def end(x: Tensor, sigma: float, index: int = index, cache: Any = cache) -> Tensor:
            frames = x.transpose(1, 2)
            average, _ = stock.transformer(
                hidden_states=frames,
                timestep=torch.full(frames.shape[:2], 1000.0 * sigma),
                r_timestep=torch.zeros(frames.shape[:2]),
                encoder_hidden_states=text,
                chunk_partition=list(PARTITION[: index + 1]),
                kv_cache=cache,
                kv_cache_flag=copy.deepcopy(flag),
                return_dict=False,
            )
            return x - sigma * average.transpose(1, 2)

        yield index, end
        cache = stock.encode_kv_cache(cache, flag, list(PARTITION[: index + 1]), index, clean, text, None)


def test_the_log_prob_of_a_consistency_step_is_that_of_its_gaussian_over_all_chunks(anyflow: Loaded) -> None:
    """By hand, in float64 after the stock model's predictions: N((1 - sigma') x0, sigma'^2), x0 given the history."""
    pipeline, params = by(anyflow, ConsistencySDEStrategy()), cm_params(anyflow)
    conditions, segment = sampled(pipeline, params, noise_of(pipeline, params))
    assert segment.sde_logp is not None and segment.sde_logp.shape == (3, 3)
    sigmas = segment.sigmas.tolist()
    summed = torch.zeros(3, 3, dtype=torch.float64)
    with torch.no_grad():
        for index, end in stock_chunks(anyflow, segment, params):
            frames = CHUNKS[index]
            for step in segment.sde_indices:
                x, following = (segment.latents_at(at)[:, :, frames] for at in (step, step + 1))
                mean = (1 - sigmas[step + 1]) * end(x, sigmas[step]).double()
                logp = Normal(mean, sigmas[step + 1]).log_prob(following.double())
                summed[:, step] += logp.flatten(1).sum(1)
                # And the sample is drawn from it, by the noise of its keys.
                noise = step_noise(KEYS, step, params.seed, tuple(segment.clean_latents.shape[1:]))[:, :, frames]
                drawn = mean + sigmas[step + 1] * noise
                torch.testing.assert_close(following.double(), drawn, rtol=1e-4, atol=1e-4)
    expected = summed / segment.clean_latents[0].numel()
    torch.testing.assert_close(segment.sde_logp.double(), expected, rtol=1e-4, atol=1e-4)
    total = by(anyflow, ConsistencySDEStrategy(reduction="sum"))
    for step in segment.sde_indices:
        rows = torch.arange(3), torch.full((3,), step)
        replayed = pipeline.replay(conditions, segment, *rows, params)
        assert torch.equal(replayed.logp_R.detach(), segment.sde_logp[:, step])
        in_nats = total.replay(conditions, segment, *rows, params).logp_R.detach()
        torch.testing.assert_close(in_nats.double(), summed[:, step], rtol=1e-4, atol=1e-2)


def test_a_later_chunk_trains_how_earlier_ones_are_read(anyflow: Loaded) -> None:
    """The layer that reads compressed chunks, which makes nothing itself, gets a gradient."""
    pipeline, params = by(anyflow, ConsistencySDEStrategy()), cm_params(anyflow)
    conditions, segment = sampled(pipeline, params, noise_of(pipeline, params))
    transformer: Any = pipeline.bundle.trainable_modules()["transformer"]
    pipeline.replay(conditions, segment, torch.arange(3), torch.zeros(3).long(), params).logp_R.sum().backward()
    assert float(transformer.far_patch_embedding.weight.grad.abs().sum()) > 0
    transformer.zero_grad()


@pytest.mark.parametrize(("strategy", "shares"), [(ConsistencySDEStrategy(), 0.0), (FlowSDEStrategy(), 1.0)])
def test_a_step_asks_for_the_average_velocity_that_its_kernel_needs(
    anyflow: Loaded, strategy: SDEStrategy, shares: float
) -> None:
    """Down to 0 or at the level where the step is stochastic, else down to the next level; the history is clean."""
    pipeline, params = by(anyflow, strategy), dataclasses.replace(cm_params(anyflow), sde_indices=[1])
    asked: list[tuple[Tensor, Tensor]] = []
    transformer: Any = anyflow.ours.bundle.trainable_modules()["transformer"]
    hook = transformer.register_forward_pre_hook(
        lambda module, args, kwargs: asked.append((kwargs["timestep"], kwargs["r_timestep"])), with_kwargs=True
    )
    try:
        conditions, segment = sampled(pipeline, params, noise_of(pipeline, params))
        walked, asked[:] = list(asked), []
        pipeline.replay(conditions, segment, torch.arange(3), torch.ones(3).long(), params)
    finally:
        hook.remove()
    levels = (1000 * segment.sigmas).tolist()
    ends = [levels[1], shares * levels[1], levels[3], levels[4]]
    pairs = list(zip(levels[:-1], ends, strict=True))
    expected = [(index, pair) for index in range(len(PARTITION)) for pair in pairs]
    assert len(walked) == len(expected)
    replayed = [(index, pairs[1]) for index in range(len(PARTITION))]
    for (times, targets), (index, (level, end)) in zip([*walked, *asked], [*expected, *replayed], strict=True):
        before = CHUNKS[index].start
        assert times.shape == (3, CHUNKS[index].stop)
        assert not times[:, :before].any() and not targets[:, :before].any()
        torch.testing.assert_close(times[:, before:], torch.full_like(times[:, before:], level))
        torch.testing.assert_close(targets[:, before:], torch.full_like(targets[:, before:], end))


def test_trajectories_in_half_precision_are_replayed_with_the_history_that_was_stored(anyflow: Loaded) -> None:
    pipeline = by(anyflow, ConsistencySDEStrategy())
    params = cm_params(anyflow, trajectory_precision="bf16")
    conditions, segment = sampled(pipeline, params, noise_of(pipeline, params))
    assert segment.latents.dtype == torch.bfloat16 and segment.sde_logp is not None
    for step in segment.sde_indices:
        replayed = pipeline.replay(conditions, segment, torch.arange(3), torch.full((3,), step), params)
        assert torch.equal(replayed.logp_R.detach(), segment.sde_logp[:, step])


def test_what_is_stored_has_no_influence_on_the_walk(anyflow: Loaded) -> None:
    pipeline = by(anyflow, ConsistencySDEStrategy())
    found = [
        sampled(pipeline, params, noise_of(pipeline, params))[1]
        for params in (cm_params(anyflow, keep_latents=kept) for kept in ("transitions", "all", "last"))
    ]
    for segment in found:
        assert torch.equal(segment.clean_latents, found[0].clean_latents)
        assert segment.sde_logp is not None and found[0].sde_logp is not None
        assert torch.equal(segment.sde_logp, found[0].sde_logp)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"post_solver": "unipc", "sde_indices": [0]}, {}, "post_solver = unipc: a solver combines velocities at"),
        ({}, {"own_steps": [0, 1, 0]}, r"makes each video alone, .*set sampling.one_step: null"),
        (
            {
                "sde_indices": [1, 2],
                "branch_steps": [1],
                "branch_factors": [2],
                "samples_per_prompt": 2,
                "init_same_noise": True,
            },
            {},
            r"makes each video alone, .*Remove sampling.branch_steps",
        ),
    ],
)
def test_walks_that_chunks_cannot_take_are_refused(
    anyflow: Loaded, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    pipeline = by(anyflow, ConsistencySDEStrategy())
    params = dataclasses.replace(cm_params(anyflow), **changes)
    noise = noise_of(pipeline, params)
    with pipeline.evaluating(), pytest.raises(ConfigError, match=message):
        conditions = pipeline.encode({"text": Texts(texts=list(TEXTS))}, params)
        pipeline.diffuse(conditions, noise, pipeline.sigmas(params), params, noise_keys=KEYS, **options)


def test_a_velocity_without_history_is_refused(anyflow: Loaded) -> None:
    pipeline, params = by(anyflow, FlowSDEStrategy()), anyflow.family.sampling()
    x = noise_of(pipeline, params)
    with pipeline.evaluating():
        conditions = pipeline.encode({"text": Texts(texts=list(TEXTS))}, params)
        with pytest.raises(ContractError, match='needs the clean latents of earlier chunks, in the slot "history"'):
            pipeline.velocity(conditions, x, torch.ones(3), torch.zeros(3).long(), params)


def test_frames_too_small_to_be_compressed_are_refused_where_chunks_come_to_be(anyflow: Loaded) -> None:
    sampling = anyflow.family.sampling
    with pytest.raises(ConfigError, match=r"16 x 32: chunks further back .*Use sides of at least 32, or fewer frames"):
        anyflow.ours.latent_shape(sampling(height=16))
    assert anyflow.ours.latent_shape(sampling(height=16, num_frames=9)) == (4, 3, 2, 4)


def test_the_pipeline_that_makes_a_whole_video_is_another(anyflow: Loaded, tmp_path: Path) -> None:
    index = (anyflow.folder / "model_index.json").read_text()
    (tmp_path / "model_index.json").write_text(index.replace("AnyFlowFARPipeline", "AnyFlowPipeline"))
    with pytest.raises(ConfigError, match="holds a AnyFlowPipeline; this model needs a AnyFlowFARPipeline"):
        anyflow.family.bundle(str(tmp_path))
