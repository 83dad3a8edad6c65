"""Maps of attention that LTX-2 notes while it samples, against the attention computed anew in float64."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.models.ltx2.pipeline import LTX2Pipeline
from unirl.types.errors import ConfigError
from unirl.types.media import Texts
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

from .families.kit import KEYS, Loaded, load

WINDOW = [0.5, 0.9]
NOTED = range(2, 5)
"""The steps of WINDOW, of the five that families take."""
SIZE = {"height": 32, "width": 48, "num_frames": 17, "eta": 0.0, "keep_latents": "all"}


@pytest.fixture(scope="module", params=["ltx2_t2v", "ltx23_t2v"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(request.param, tmp_path_factory.mktemp("regions") / request.param)


@pytest.fixture(scope="module")
def ltx2(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load("ltx2_t2v", tmp_path_factory.mktemp("regions") / "ltx2")


def noting(loaded: Loaded, **options: Any) -> LTX2Pipeline:
    """Another pipeline over the same modules, whose samples note regions."""
    bundle: Any = loaded.ours.bundle
    given: dict[str, Any] = {"region_steps": WINDOW, **options}
    return LTX2Pipeline(bundle, loaded.ours.strategy, **given)


def sampled(loaded: Loaded, pipeline: Any, params: DiffusionSamplingParams, **options: Any) -> LatentSegment:
    request = loaded.request(params)
    with pipeline.evaluating():
        conditions = pipeline.encode({"text": Texts(texts=request.texts)}, params)
        sigmas = pipeline.sigmas(params)
        return pipeline.diffuse(conditions, request.noise, sigmas, params, noise_keys=KEYS, **options)


# The attention in float64 ---------------------------------------------------------------------------------------------


def rotated(x: Tensor, rotary: tuple[Tensor, Tensor], heads: int, kind: str) -> Tensor:
    """Pairs of numbers [B, T, C] turned in the complex plane, as [B, H, T, D]."""
    cos, sin = (part.double() for part in rotary)
    if kind == "interleaved":
        turned = torch.view_as_complex(x.unflatten(2, (-1, 2))) * torch.complex(cos[..., ::2], sin[..., ::2])
        return torch.view_as_real(turned).flatten(2).unflatten(2, (heads, -1)).transpose(1, 2)
    first, second = x.unflatten(2, (heads, 2, -1)).permute(3, 0, 2, 1, 4)
    turned = torch.complex(first, second) * torch.complex(cos, sin)
    return torch.cat([turned.real, turned.imag], dim=-1)


def projected(x: Tensor, linear: Any, norm: Any) -> Tensor:
    y = x.double() @ linear.weight.double().T + linear.bias.double()
    y = y / (y.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt()
    return y if norm.weight is None else y * norm.weight.double()


def probabilities(attention: Any, audio: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """[B, H, A, V], from the weights of the module."""
    heads, kind = attention.heads, attention.rope_type
    query = rotated(projected(audio, attention.to_q, attention.norm_q), kwargs["query_rotary_emb"], heads, kind)
    video = projected(kwargs["encoder_hidden_states"], attention.to_k, attention.norm_k)
    key = rotated(video, kwargs["key_rotary_emb"], heads, kind)
    scores = torch.einsum("bhad,bhvd->bhav", query, key) / query.shape[-1] ** 0.5
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    return weights / weights.sum(dim=-1, keepdim=True)


def maps_anew(loaded: Loaded, segment: LatentSegment, steps: Sequence[int], blocks: slice) -> Tensor:
    """[B, f, h, w] of stored latents: the mean over steps and blocks of what forwards without guidance attend to."""
    pipeline: Any = loaded.ours
    params = loaded.family.sampling(**SIZE, guidance_scale=1.0)
    seen: list[Tensor] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(probabilities(module, args[0], kwargs).mean(dim=1).sum(dim=1))

    attentions = [block.video_to_audio_attn for block in pipeline.bundle.transformer.transformer_blocks[blocks]]
    handles = [attention.register_forward_pre_hook(note, with_kwargs=True) for attention in attentions]
    with pipeline.evaluating():
        conditions = pipeline.encode({"text": Texts(texts=loaded.request(params).texts)}, params)
        for step in steps:
            x, sigma = segment.latents_at(step), segment.sigmas[step].repeat(len(KEYS))
            pipeline.velocity(conditions, x, sigma, torch.full((len(KEYS),), step), params)
    for handle in handles:
        handle.remove()
    assert len(seen) == len(steps) * len(attentions)
    return torch.stack(seen).mean(dim=0).unflatten(1, (3, 4, 6))


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_maps_are_the_attention_of_the_sound_computed_anew(loaded: Loaded, guidance_scale: float) -> None:
    params = loaded.family.sampling(**SIZE, guidance_scale=guidance_scale)
    segment = sampled(loaded, noting(loaded), params)
    maps = segment.regions["video"]
    expected = maps_anew(loaded, segment, NOTED, slice(None))
    assert maps.dtype == torch.float32 and maps.shape == (3, 3, 4, 6)
    # float32 against float64: softmax of a few numbers, summed over 18 queries.
    torch.testing.assert_close(maps.double(), expected, rtol=2e-5, atol=0)
    # Each of 18 audio tokens gives 1; places differ, within frames too.
    torch.testing.assert_close(maps.flatten(1).sum(dim=1), torch.full((3,), 18.0), rtol=1e-5, atol=0)
    assert bool((maps.flatten(2).std(dim=2) > 1e-4).all())


def test_maps_are_of_the_blocks_and_steps_that_are_asked_for(ltx2: Loaded) -> None:
    params = ltx2.family.sampling(**SIZE, guidance_scale=1.0)
    segment = sampled(ltx2, noting(ltx2, region_steps=[0.0, 0.3], region_blocks=[1, 1]), params)
    expected = maps_anew(ltx2, segment, range(2), slice(1, 2))
    torch.testing.assert_close(segment.regions["video"].double(), expected, rtol=2e-5, atol=0)
    assert not torch.allclose(expected, maps_anew(ltx2, segment, NOTED, slice(None)), rtol=1e-3)


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_samples_that_note_regions_are_the_same_bit_for_bit(loaded: Loaded, guidance_scale: float) -> None:
    params = loaded.family.sampling(**SIZE, guidance_scale=guidance_scale)
    plain, noted = (sampled(loaded, pipeline, params) for pipeline in (loaded.ours, noting(loaded)))
    assert torch.equal(plain.latents, noted.latents) and not plain.regions


def test_forwards_of_fewer_rows_note_the_same(ltx2: Loaded) -> None:
    params = ltx2.family.sampling(**SIZE)
    whole, cut = (sampled(ltx2, noting(ltx2, forward_batch_size=size), params) for size in (None, 2))
    torch.testing.assert_close(whole.regions["video"], cut.regions["video"], rtol=1e-5, atol=0)


def test_samples_of_one_start_each_have_a_map(ltx2: Loaded) -> None:
    params = ltx2.family.sampling(**{**SIZE, "eta": 0.7, "keep_latents": "transitions"}, sde_indices=[3])
    segment = sampled(ltx2, noting(ltx2), params, start_keys=["one"] * 3)
    assert segment.regions["video"].shape == (3, 3, 4, 6)


@pytest.mark.parametrize("num_steps", [0, 1, 3, 4])
def test_samples_that_are_ended_early_note_the_rest_later(ltx2: Loaded, num_steps: int) -> None:
    params, pipeline = ltx2.family.sampling(**SIZE), noting(ltx2)
    asked = itertools.count()
    begun = sampled(ltx2, pipeline, params, is_ending=lambda: next(asked) >= num_steps)
    assert begun.reached.tolist() == [num_steps] * 3
    whole, both = sampled(ltx2, pipeline, params), sampled(ltx2, pipeline, params, begun=begun)
    assert torch.equal(whole.latents, both.latents)
    torch.testing.assert_close(whole.regions["video"], both.regions["video"], rtol=1e-6, atol=0)


def test_nothing_is_noted_outside_of_sampling(ltx2: Loaded) -> None:
    pipeline: Any = noting(ltx2)
    params = ltx2.family.sampling(**SIZE)
    request = ltx2.request(params)
    conditions = pipeline.encode({"text": Texts(texts=request.texts)}, params)
    sigma, step = torch.full((3,), 0.5), torch.full((3,), 3)
    velocity = pipeline.velocity(conditions, request.noise, sigma, step, params)
    assert torch.equal(velocity, ltx2.ours.velocity(conditions, request.noise, sigma, step, params))
    assert pipeline._regions._received == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"region_steps": [0.9, 0.5]}, r"region_steps = \[0.9, 0.5\] is not the first and the last share of the steps"),
        ({"region_steps": [0.5, 1.5]}, r"region_steps = \[0.5, 1.5\] is not the first and the last share of the steps"),
        ({"region_blocks": [0, 2]}, "region_blocks names block 2 of 2, counted from 0. End at 1"),
        ({"region_blocks": [1]}, r"region_blocks = \[1\] is not the first and the last block"),
        (
            {"region_steps": None, "region_blocks": [0, 1]},
            r"region_blocks = \[0, 1\] does nothing without region_steps. Set region_steps: \[0.5, 0.9\]",
        ),
    ],
)
def test_steps_and_blocks_that_the_model_does_not_have_are_refused(ltx2: Loaded, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        noting(ltx2, **options)


def test_branching_samples_are_refused(ltx2: Loaded) -> None:
    params = dataclasses.replace(
        ltx2.family.sampling(**{**SIZE, "eta": 0.7}),
        **{"init_same_noise": True, "branch_steps": [0], "branch_factors": [3], "samples_per_prompt": 3},
    )
    with pytest.raises(ConfigError, match="region_steps needs samples that share no steps"):
        sampled(ltx2, noting(ltx2), params, start_keys=["one"] * 3)
