"""The reward-gradient methods: their closed forms and limits, what gets no gradient, memory, draws and bad input.

Legend: B samples, T steps, K gradient steps per sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import (
    KEPT,
    SHAPE,
    AffineField,
    FieldEngine,
    FieldPipeline,
    PixelReward,
    Setup,
    StepField,
    TinyField,
    displace,
    pixel_reward,
    prompt_rows,
    rollout,
    sampling,
    setup,
)
from test_known_optimum import BEST_MEAN, GaussianField
from torch import Tensor, nn

from unirl.algorithms.alignprop import AlignProp
from unirl.algorithms.base import MicroBatch
from unirl.algorithms.draft import DRaFT
from unirl.algorithms.drtune import DRTune
from unirl.algorithms.flowbp import FlowBPSparse
from unirl.algorithms.leap_align import LeapAlign
from unirl.algorithms.refl import ReFL
from unirl.algorithms.reward_gradient import Denoising, RewardGradient
from unirl.algorithms.srpo import SRPO, direct_align
from unirl.sde.forward import interpolate
from unirl.sde.noise import keyed_normal
from unirl.trainer.request import build_request
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Images
from unirl.types.reward import RewardRequest
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.segments import LatentSegment, TextSegment

NUM_STEPS = 4
ODE = sampling(num_inference_steps=NUM_STEPS, **KEPT)
FULL_REFL: dict[str, Any] = {"scale": 1.0, "margin": float("inf")}
START = (0.7, 0.1)
"""Scale and shift of the fresh affine field."""
WAYS: dict[str, tuple[type[RewardGradient], dict[str, Any]]] = {
    "drtune": (DRTune, {"num_gradient_steps": 2}),
    "drtune_early": (DRTune, {"num_gradient_steps": 2, "early_stop": 3}),
    "refl": (ReFL, {"num_last_steps": 2, **FULL_REFL}),
    "refl_pretrain": (ReFL, {"num_last_steps": 3, "scale": 0.5, "margin": 0.3, "pretrain_coef": 0.2}),
    "flowbp": (FlowBPSparse, {"num_gradient_steps": 2, "rescale": 0.5}),
    "leap_align": (LeapAlign, {}),
    "draft": (DRaFT, {"num_last_steps": 2}),
    "draft_lv": (DRaFT, {"num_noisings": 3, "scale": 2.0, "margin": 5.0}),
    "srpo": (SRPO, {}),
    "alignprop": (AlignProp, {}),
    "alignprop_full": (AlignProp, {"truncation": "full"}),
}


def made_with(
    kind: type[RewardGradient], *, params: Any = ODE, num_prompts: int = 2, **options: Any
) -> tuple[Setup, RolloutResp]:
    made_of: dict[str, Any] = {"model": AffineField(*START), **options}
    made = setup(kind, **made_of)
    made.algorithm.use_reward(PixelReward())
    return made, rollout(made.pipeline, params, num_prompts=num_prompts)


def trained_gradient(kind: type[RewardGradient], **options: Any) -> dict[str, Tensor]:
    made, resp = made_with(kind, **options)
    made.stack.train(with_advantages(resp, torch.zeros(resp.batch_size)), progress=0.0)
    return made.backend.gradients[0]


def tiny() -> TinyField:
    torch.manual_seed(0)
    return TinyField()


def field_of(made: Setup) -> AffineField:
    assert isinstance(made.pipeline.model, AffineField)
    return made.pipeline.model


def track_of(resp: RolloutResp) -> RolloutTrack:
    return resp.tracks["image"]


def segment_of(resp: RolloutResp) -> LatentSegment:
    segment = track_of(resp).segment
    assert isinstance(segment, LatentSegment)
    return segment


def keys_of(resp: RolloutResp) -> list[str]:
    return [f"r0:{name}" for name in track_of(resp).sample_ids]


def denoising(made: Setup, resp: RolloutResp) -> Denoising:
    return Denoising(made.pipeline, track_of(resp), ODE)


def differences(value: Callable[[Tensor], Tensor], at: Tensor | None = None) -> Tensor:
    """Central differences of a float64 function of (scale, shift), at START unless told."""
    theta = torch.tensor(START, dtype=torch.float64) if at is None else at.double()
    steps = 1e-5 * torch.eye(2, dtype=torch.float64)
    return torch.stack([(value(theta + step) - value(theta - step)) / 2e-5 for step in steps])


def affine(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient["transformer.scale"], gradient["transformer.shift"]]).double()


def objective(latents: Tensor) -> Tensor:
    """The mean loss of clean latents under the fake decoder and reward."""
    return -pixel_reward(latents.sigmoid()).mean()


def sampled(theta: Tensor, start: Tensor, sigmas: Tensor) -> Tensor:
    """Euler from `start` at sigmas[0] with v = theta[0] x + theta[1]."""
    x = start
    for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
        x = x + (following - sigma) * (theta[0] * x + theta[1])
    return x


# Closed forms -------------------------------------------------------------------------------------------------------


def test_drtune_adds_up_the_velocities_at_frozen_latents():
    """d x_T / d theta = sum over S of dt_n (x_n, 1), by finite differences of exactly that sum."""
    made, resp = made_with(DRTune, num_gradient_steps=2)
    steps = denoising(made, resp)
    step_BK = made.algorithm.gradient_steps(steps, keys_of(resp))
    made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0)
    latents, sigmas = segment_of(resp).latents.double(), segment_of(resp).sigmas.double()

    def value(theta: Tensor) -> Tensor:
        x = latents[:, -1].clone()
        for k in range(2):
            step = step_BK[:, k]
            at = latents[torch.arange(6), step]
            dt = (sigmas[step + 1] - sigmas[step]).view(-1, 1, 1, 1)
            x = x + dt * ((theta[0] - START[0]) * at + (theta[1] - START[1]))
        return objective(x)

    torch.testing.assert_close(affine(made.backend.gradients[0]), differences(value), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rescale", [0.0, 0.4])
def test_flowbp_is_the_gradient_of_its_steps_at_the_sampled_latent(rescale: float):
    """By finite differences of x_T + f sum over S of dt_n (v - v_old)(x_n), with f of the steps of each sample."""
    made, resp = made_with(FlowBPSparse, num_gradient_steps=2, rescale=rescale)
    steps = denoising(made, resp)
    step_BK = made.algorithm.gradient_steps(steps, keys_of(resp))
    latents = made.algorithm.clean_latents(steps, keys_of(resp))
    assert torch.equal(latents.detach(), segment_of(resp).clean_latents)
    made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0)
    stored, sigmas = segment_of(resp).latents.double(), segment_of(resp).sigmas.double()
    share = 1 / (sigmas[step_BK] - sigmas[step_BK + 1]).sum(dim=1)
    factor = (1 + rescale * (share - 1)).view(-1, 1, 1, 1)

    def value(theta: Tensor) -> Tensor:
        x = stored[:, -1].clone()
        for step in step_BK.unbind(dim=1):
            dt = (sigmas[step + 1] - sigmas[step]).view(-1, 1, 1, 1)
            at = stored[torch.arange(6), step]
            x = x + factor * dt * ((theta[0] - START[0]) * at + (theta[1] - START[1]))
        return objective(x)

    torch.testing.assert_close(affine(made.backend.gradients[0]), differences(value), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bias", [0.0, 2.0])
def test_flowbp_draws_steps_as_draws_without_repetition_do(bias: float):
    """Over 4,000 samples; a share of one half has a standard error of .008."""
    made, resp = made_with(FlowBPSparse, num_gradient_steps=2, late_bias=bias)
    steps = denoising(made, resp)
    step_BK = made.algorithm.gradient_steps(steps, [f"key{number}" for number in range(4000)])
    assert bool((step_BK[:, 0] < step_BK[:, 1]).all())
    weight = [(step + 1) ** bias for step in range(NUM_STEPS)]
    for step in range(NUM_STEPS):
        first = weight[step] / sum(weight)
        second = sum(
            weight[other] / sum(weight) * weight[step] / (sum(weight) - weight[other])
            for other in range(NUM_STEPS)
            if other != step
        )
        assert float((step_BK == step).any(dim=1).double().mean()) == pytest.approx(first + second, abs=0.03)


@pytest.mark.parametrize("nested", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("min_distance", [None, 0.05])
def test_leap_align_is_the_gradient_of_two_leaps_pinned_to_the_sampler(nested: float, min_distance: float | None):
    """By finite differences of the two leaps, with what has no gradient computed at the old weights."""
    made, resp = made_with(LeapAlign, nested=nested, min_distance=min_distance)
    steps = denoising(made, resp)
    first, second = made.algorithm.gradient_steps(steps, keys_of(resp)).unbind(dim=1)
    assert bool((first < second).all())
    latents = made.algorithm.clean_latents(steps, keys_of(resp))
    assert torch.equal(latents.detach(), segment_of(resp).clean_latents)
    made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0)
    stored, sigmas = segment_of(resp).latents.double(), segment_of(resp).sigmas.double()
    rows = torch.arange(6)
    sigma, following = (sigmas[step].view(-1, 1, 1, 1) for step in (first, second))
    start, middle, end = stored[rows, first], stored[rows, second], stored[:, -1]
    old = torch.tensor(START, dtype=torch.float64)

    def leaps(theta: Tensor) -> tuple[Tensor, Tensor]:
        leapt = start + (following - sigma) * (theta[0] * start + theta[1])
        moved = leapt - (start + (following - sigma) * (old[0] * start + old[1]))
        at = middle + nested * moved
        return leapt, middle + moved - following * (theta[0] * at + theta[1])

    leapt, clean = leaps(old)
    weight = torch.ones(6).double()
    if min_distance is not None:
        far = [(x - y).abs().flatten(1).mean(dim=1).clamp(min=min_distance) for x, y in ((leapt, middle), (clean, end))]
        weight = 1 / (far[0] + far[1])

    def value(theta: Tensor) -> Tensor:
        return objective(end + weight.view(-1, 1, 1, 1) * (leaps(theta)[1] - clean))

    torch.testing.assert_close(affine(made.backend.gradients[0]), differences(value), rtol=1e-4, atol=1e-6)


def test_of_a_linear_field_drtune_sums_the_steps_and_draft_follows_the_product_rule():
    """v = a x + b: d x_T / d a is sum dt_n x_n at frozen latents, in full sum dt_n x_n prod_{m > n} (1 + a dt_m)."""
    found = {}
    for kind, options in ((DRTune, {"num_gradient_steps": NUM_STEPS}), (DRaFT, {"num_last_steps": NUM_STEPS})):
        made, resp = made_with(kind, **options)
        steps = denoising(made, resp)
        latents = made.algorithm.clean_latents(steps, keys_of(resp))
        (found[kind],) = torch.autograd.grad(latents.sum(), field_of(made).scale)
    dt = steps.sigmas.diff()
    carried = torch.stack([(1 + START[0] * dt[n + 1 :]).prod() for n in range(NUM_STEPS)])
    sums = steps.latents[:, :-1].sum(dim=(0, 2, 3, 4))
    torch.testing.assert_close(found[DRTune][0], (dt * sums).sum(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[DRaFT][0], (dt * sums * carried).sum(), rtol=1e-5, atol=1e-6)
    assert abs(float(found[DRTune] - found[DRaFT])) > 0.1


@pytest.mark.parametrize("num_last_steps", [1, 2, NUM_STEPS])
def test_draft_is_the_gradient_of_the_sampler_from_its_start(num_last_steps: int):
    made, resp = made_with(DRaFT, num_last_steps=num_last_steps)
    made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0)
    first = NUM_STEPS - num_last_steps
    start = segment_of(resp).latents_at(first).double()
    sigmas = segment_of(resp).sigmas[first:].double()
    expected = differences(lambda theta: objective(sampled(theta, start, sigmas)))
    torch.testing.assert_close(affine(made.backend.gradients[0]), expected, rtol=1e-4, atol=1e-6)


def test_alignprop_cuts_each_rollout_at_its_own_depth():
    made, resp = made_with(AlignProp)
    steps, segment, depths = denoising(made, resp), segment_of(resp), set()
    for rollout_id in range(8):
        first = made.algorithm.first_step(steps)
        depths.add(first)
        theta = affine({name: value.clone() for name, value in made.parameters.items()})
        made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0)
        start, sigmas = segment.latents_at(first).double(), segment.sigmas[first:].double()
        expected = differences(lambda theta: objective(sampled(theta, start, sigmas)), theta)  # noqa: B023
        torch.testing.assert_close(affine(made.backend.gradients[rollout_id]), expected, rtol=1e-3, atol=1e-5)
    assert len(depths) > 2


def test_refl_is_the_gradient_of_one_prediction():
    made, resp = made_with(ReFL, num_last_steps=3, scale=0.5, margin=0.3)
    step_B = made.algorithm.gradient_steps(denoising(made, resp), keys_of(resp))[:, 0]
    made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0)
    segment = segment_of(resp)
    x = segment.latents[torch.arange(6), step_B].double()
    sigma = segment.sigmas[step_B].double().view(-1, 1, 1, 1)

    def value(theta: Tensor) -> Tensor:
        predicted = x - sigma * (theta[0] * x + theta[1])
        return (0.5 * (0.3 - pixel_reward(predicted.sigmoid())).relu()).mean()

    expected = differences(value)
    assert expected.abs().min() > 1e-4
    torch.testing.assert_close(affine(made.backend.gradients[0]), expected, rtol=1e-4, atol=1e-6)


def test_the_pretraining_loss_is_flow_matching_on_the_samples_own_latents():
    alone, resp = made_with(ReFL, num_last_steps=1, scale=1e-30, margin=-1e3, pretrain_coef=2.0)
    alone.pipeline.seen_x.clear()
    metrics = alone.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0).metrics
    x_t = alone.pipeline.seen_x[-1].double()
    x0 = segment_of(resp).clean_latents.double()
    noise = keyed_normal([f"{key}::noise" for key in keys_of(resp)], 0, SHAPE).double()
    # x_t = x0 + sigma (noise - x0) says which level was drawn.
    sigma = ((x_t - x0) / (noise - x0)).flatten(1).median(dim=1).values
    assert all(min(abs(float(s) - float(level)) for level in segment_of(resp).sigmas[:-1]) < 1e-4 for s in sigma)
    residual = START[0] * x_t + START[1] - (noise - x0)
    assert metrics["reward_gradient/pretrain_loss"] == pytest.approx(float(residual.square().mean()), rel=1e-5)
    expected = torch.stack([2 * 2.0 * (residual * x_t).mean(), 2 * 2.0 * residual.mean()])
    torch.testing.assert_close(affine(alone.backend.gradients[0]), expected, rtol=1e-4, atol=1e-6)


def test_draft_lv_is_the_mean_over_fresh_noisings():
    made, resp = made_with(DRaFT, num_noisings=3)
    metrics = made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0).metrics
    segment = segment_of(resp)
    x0 = segment.clean_latents.double().repeat_interleave(3, dim=0)
    noise = keyed_normal([f"{key}::noise" for key in keys_of(resp)], 0, (3, *SHAPE)).double().flatten(0, 1)
    sigma = float(segment.sigmas[-2])
    x = (1 - sigma) * x0 + sigma * noise

    def value(theta: Tensor) -> Tensor:
        return objective(x - sigma * (theta[0] * x + theta[1]))

    torch.testing.assert_close(affine(made.backend.gradients[0]), differences(value), rtol=1e-4, atol=1e-6)
    assert metrics["policy/loss"] == pytest.approx(float(value(torch.tensor(START, dtype=torch.float64))), rel=1e-5)
    request = made.algorithm._reward.requests[0]
    assert request.sample_ids == [name for name in track_of(resp).sample_ids for _ in range(3)]
    assert len(request.prompts) == 18


def test_direct_align_takes_one_step_and_the_known_noise_out():
    generator = torch.Generator().manual_seed(0)
    x0, noise, v = (torch.randn(3, 2, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    sigma, following = torch.tensor([1.0, 0.6, 0.2]).double(), torch.tensor([0.9, 0.5, 0.0]).double()
    by_hand = []
    for row in range(3):
        x = (1 - sigma[row]) * x0[row] + sigma[row] * noise[row]
        stepped = x + (following[row] - sigma[row]) * v[row]
        by_hand.append((stepped - following[row] * noise[row]) / (1 - following[row]))
    torch.testing.assert_close(direct_align(x0, v, noise - x0, sigma, following), torch.stack(by_hand))
    # The velocity that matching wants leaves the sample as it is, at any level.
    assert torch.equal(direct_align(x0, noise - x0, noise - x0, sigma, following), x0)


def test_srpo_is_the_gradient_of_one_step_from_a_noised_sample():
    made, resp = made_with(SRPO, num_first_steps=3)
    step_B = made.algorithm.gradient_steps(denoising(made, resp), keys_of(resp))[:, 0]
    assert set(step_B.tolist()) <= {0, 1, 2} and len(set(step_B.tolist())) > 1
    made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0)
    segment = segment_of(resp)
    x0 = segment.clean_latents.double()
    noise = keyed_normal([f"{key}::noise" for key in keys_of(resp)], 0, SHAPE).double()
    sigma, following = segment.sigmas[step_B].double(), segment.sigmas[step_B + 1].double()
    x = interpolate(x0, noise, sigma)

    def value(theta: Tensor) -> Tensor:
        return objective(direct_align(x0, theta[0] * x + theta[1], noise - x0, sigma, following))

    torch.testing.assert_close(affine(made.backend.gradients[0]), differences(value), rtol=1e-4, atol=1e-6)


class WordReward:
    """Likes light where the prompt begins with "bright", and dark elsewhere."""

    def score_with_gradient(self, request: RewardRequest) -> Tensor:
        sign = torch.tensor([1.0 if prompt.startswith("bright. ") else -0.5 for prompt in request.prompts])
        return sign * request.pixels.flatten(1).mean(dim=1)


def test_a_relative_reward_is_the_difference_that_the_words_make():
    made, resp = made_with(SRPO, positive_words="bright", negative_words="dim")
    made.algorithm.use_reward(WordReward())
    plain, _ = made_with(SRPO, scale=1.5)

    class Light:
        def score_with_gradient(self, request: RewardRequest) -> Tensor:
            return request.pixels.flatten(1).mean(dim=1)

    plain.algorithm.use_reward(Light())
    for each in (made, plain):
        each.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0)
    torch.testing.assert_close(affine(made.backend.gradients[0]), affine(plain.backend.gradients[0]))


# Limits -------------------------------------------------------------------------------------------------------------


def test_draft_over_all_steps_is_alignprop_is_autograd_through_the_sampler():
    draft = trained_gradient(DRaFT, model=tiny(), num_last_steps=NUM_STEPS)
    made, resp = made_with(AlignProp, model=tiny(), truncation="full")
    made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0)
    full = made.backend.gradients[0]
    reference, segment = tiny().double(), segment_of(resp)
    condition = track_of(resp).conditions["text"]
    assert isinstance(condition, TextEmbedCondition)
    text = condition.embeds[:, 0, 0].double()
    x, sigmas = segment.latents_at(0).double(), segment.sigmas.double()
    for step in range(NUM_STEPS):
        x = x + (sigmas[step + 1] - sigmas[step]) * reference(x, sigmas[step].expand(6), torch.tensor([step] * 6), text)
    objective(x).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(draft[f"transformer.{name}"], full[f"transformer.{name}"], rtol=1e-5, atol=1e-8)
        assert parameter.grad is not None
        torch.testing.assert_close(full[f"transformer.{name}"], parameter.grad.float(), rtol=1e-3, atol=1e-6)


def test_of_one_step_all_methods_are_one(monkeypatch: pytest.MonkeyPatch):
    """The last step alone: a prediction of the clean latent, a chain of one, a straight-through sum of one."""
    draft = trained_gradient(DRaFT, model=tiny(), num_last_steps=1)
    refl = trained_gradient(ReFL, model=tiny(), num_last_steps=1, **FULL_REFL)
    last = torch.full((6, 1), NUM_STEPS - 1)
    monkeypatch.setattr(DRTune, "gradient_steps", lambda self, steps, keys: last)
    monkeypatch.setattr(AlignProp, "first_step", lambda self, steps: NUM_STEPS - 1)
    drtune = trained_gradient(DRTune, model=tiny(), num_gradient_steps=1)
    alignprop = trained_gradient(AlignProp, model=tiny())
    for name, expected in draft.items():
        assert expected.abs().max() > 0
        for other in (refl, drtune, alignprop):
            torch.testing.assert_close(other[name], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("way", ["drtune", "draft", "alignprop_full"])
def test_the_value_is_the_stored_final_latent(way: str):
    kind, options = WAYS[way]
    made, resp = made_with(kind, model=tiny(), **options)
    found = made.algorithm.clean_latents(denoising(made, resp), keys_of(resp))
    assert found.requires_grad
    torch.testing.assert_close(found.detach(), segment_of(resp).clean_latents, rtol=0, atol=1e-6)


def test_early_stop_predicts_from_where_it_stops():
    made, resp = made_with(DRTune, num_gradient_steps=1, early_stop=NUM_STEPS, num_prompts=8)
    steps = denoising(made, resp)
    last_B = made.algorithm._last_steps(steps, keys_of(resp))
    assert set(last_B.tolist()) == set(range(NUM_STEPS))
    x = steps.at(last_B)
    expected = x - steps.sigmas[last_B].view(-1, 1, 1, 1) * (START[0] * x + START[1])
    found = made.algorithm.clean_latents(steps, keys_of(resp))
    torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=1e-5)
    # A gradient step p counts with -sigma_p where the prediction is made, with dt_p before.
    step_B = made.algorithm.gradient_steps(steps, keys_of(resp))[:, 0]
    change = torch.where(step_B == last_B, -steps.sigmas[step_B], steps.sigmas.diff()[step_B])
    (gradient,) = torch.autograd.grad(found.sum(), field_of(made).shift)
    assert float(gradient) == pytest.approx(float(change.sum()) * found[0].numel(), rel=1e-5)


# Which steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_steps", "count"), [(4, 1), (4, 3), (6, 3), (10, 5), (7, 7)])
def test_drtune_steps_are_equally_spaced_with_a_random_offset(num_steps: int, count: int):
    params = sampling(num_inference_steps=num_steps, samples_per_prompt=64, **KEPT)
    made, resp = made_with(DRTune, num_gradient_steps=count, params=params)
    step_BK = made.algorithm.gradient_steps(Denoising(made.pipeline, track_of(resp), params), keys_of(resp))
    gaps = step_BK.diff(dim=1)
    assert gaps.numel() == 0 or (int(gaps.min()), int(gaps.max())) in {
        (num_steps // count, num_steps // count),
        (num_steps // count, num_steps // count + 1),
    }
    used = torch.bincount(step_BK.flatten(), minlength=num_steps) / step_BK.shape[0]
    assert used.numel() == num_steps
    # Every step is trained as often as any other: K / T of the samples, within four standard errors of 128 draws.
    assert (used - count / num_steps).abs().max() < 4 * 0.5 / 128**0.5


@pytest.mark.parametrize("way", ["drtune", "refl", "draft", "alignprop"])
def test_steps_that_are_not_chosen_get_no_gradient(way: str):
    kind, options = WAYS[way]
    params = sampling(samples_per_prompt=1, **KEPT)
    made, resp = made_with(kind, model=StepField(NUM_STEPS), params=params, num_prompts=1, seed=1, **options)
    steps = Denoising(made.pipeline, track_of(resp), params)
    keys = keys_of(resp)
    if isinstance(made.algorithm, AlignProp):
        chosen = set(range(made.algorithm.first_step(steps), NUM_STEPS))
    else:
        chosen = set(made.algorithm.gradient_steps(steps, keys).flatten().tolist())
    assert chosen < set(range(NUM_STEPS))
    made.stack.train(with_advantages(resp, torch.zeros(1)), progress=0.0)
    gradient = made.backend.gradients[0]["transformer.shift"]
    assert {step for step in range(NUM_STEPS) if gradient[step] != 0} == chosen


def test_the_next_rollout_draws_other_steps_and_a_resumed_one_the_same():
    made, resp = made_with(ReFL, num_last_steps=NUM_STEPS, num_prompts=4)
    algorithm, steps = made.algorithm, denoising(made, resp)
    keys = [[f"r{rollout}:{name}" for name in track_of(resp).sample_ids] for rollout in (0, 1)]
    assert not torch.equal(algorithm.gradient_steps(steps, keys[0]), algorithm.gradient_steps(steps, keys[1]))
    made.stack.train(with_advantages(resp, torch.zeros(12)), progress=0.0)
    state = algorithm.state_dict()
    assert state == {"kl_coef": 0.0, "num_rollouts": 1}
    again, _ = made_with(ReFL, num_last_steps=NUM_STEPS)
    again.algorithm.load_state_dict(state)
    assert again.algorithm.num_rollouts == 1


# What the parts of a loss are ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_chunks_and_checkpoints_change_nothing(way: str):
    kind, options = WAYS[way]
    expected = trained_gradient(kind, model=tiny(), **options)
    rows = max(3, 2 * options.get("num_gradient_steps", 1))
    for change in ({"micro": 4}, {"rows_per_forward": rows}, {"is_checkpointed": True}, {"is_checkpointed": False}):
        found = trained_gradient(kind, model=tiny(), **{**options, **change})
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("way", WAYS)
def test_decoder_and_reward_get_no_gradient(way: str):
    kind, options = WAYS[way]
    made, resp = made_with(kind, **options)
    decoder = nn.Linear(2, 2)
    made.pipeline.decode = lambda latents, params: Images(pixels=decoder(latents).sigmoid())
    metrics = made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0).metrics
    assert float(made.backend.gradients[0]["transformer.scale"].abs()) > 0
    assert metrics["reward_gradient/pixel_grad_norm"] > 0 and metrics["reward_gradient/latent_grad_norm"] > 0
    assert all(parameter.grad is None for parameter in [*decoder.parameters(), *made.algorithm._reward.parameters()])


def test_metrics_say_what_the_reward_and_its_gradient_were():
    made, resp = made_with(DRaFT)
    metrics = made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0).metrics
    pixels = segment_of(resp).clean_latents.sigmoid().requires_grad_()
    reward = pixel_reward(pixels)
    (gradient,) = torch.autograd.grad(reward.sum(), pixels)
    assert metrics["reward_gradient/reward"] == pytest.approx(reward.mean().item(), rel=1e-5)
    assert metrics["policy/loss"] == pytest.approx(-reward.mean().item(), rel=1e-5)
    norms = gradient.flatten(1).norm(dim=1)
    assert metrics["reward_gradient/pixel_grad_norm"] == pytest.approx(float(norms.mean()), rel=1e-5)
    assert "reward_gradient/above_margin_fraction" not in metrics
    middle = reward.median().item()
    hinged, _ = made_with(DRaFT, margin=middle)
    found = hinged.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0).metrics
    assert found["reward_gradient/above_margin_fraction"] == pytest.approx(float((reward >= middle).double().mean()))
    assert found["policy/loss"] == pytest.approx((middle - reward).relu().mean().item(), rel=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_the_penalty_pulls_towards_the_reference(way: str):
    kind, options = WAYS[way]
    made, resp = made_with(kind, kl_coef=10.0, keep_reference=True, **options)
    made.algorithm.use_reward(NoReward())
    if kind is ReFL:
        made.algorithm.pretrain_coef, made.algorithm.margin = 0.0, float("inf")
    displace(made.backend, 0.3)
    moved = affine({name: value.clone() for name, value in made.parameters.items()}) - torch.tensor(START).double()
    metrics = made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0).metrics
    # Without a reward only the penalty is left. It is quadratic in the displacement: displacement times gradient is
    # twice its value.
    along = float((moved * affine(made.backend.gradients[0])).sum())
    assert along == pytest.approx(2 * 10.0 * metrics["policy/reference_kl"], rel=1e-4)
    assert along > 1e-2


class NoReward:
    """0 whatever the image, with a gradient of 0."""

    def score_with_gradient(self, request: RewardRequest) -> Tensor:
        return 0 * request.pixels.sum(dim=(1, 2, 3))


def test_drtune_shares_its_forward_with_the_penalty():
    made, resp = made_with(DRTune, num_gradient_steps=2, kl_coef=1.0, keep_reference=True)
    made.pipeline.seen_x.clear()
    made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0)
    # One of the reference, one of the policy.
    assert [x.shape[0] for x in made.pipeline.seen_x] == [12, 12]


# Memory -------------------------------------------------------------------------------------------------------------


def saved_bytes(kind: type[RewardGradient], num_steps: int, **options: Any) -> int:
    """Bytes that the graph of one micro-batch keeps for its backward, each storage once."""
    params = sampling(num_inference_steps=num_steps, **KEPT)
    made, resp = made_with(kind, model=tiny(), shape=(3, 16, 16), params=params, **options)
    made.algorithm.use_reward(NoReward())
    micro = MicroBatch(track=track_of(resp).replace(advantages=torch.zeros(6)), anchor={}, update=0, progress=0.0)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        parts = list(made.algorithm.losses(micro))
    assert len(parts) == 1
    # The trajectory itself is the rollout's, not the graph's.
    trajectory = segment_of(resp).latents.untyped_storage().data_ptr()
    return sum(size for place, size in kept.items() if place != trajectory)


@pytest.mark.parametrize(
    "way", [(DRTune, {"num_gradient_steps": 2}), (DRaFT, {"num_last_steps": 2}), (ReFL, {"num_last_steps": 2})]
)
def test_memory_does_not_grow_with_the_number_of_sampling_steps(way: tuple[type[RewardGradient], dict[str, Any]]):
    kind, options = way
    few, many = (saved_bytes(kind, num_steps, **options) for num_steps in (4, 24))
    assert 0 < many <= 1.02 * few


def test_memory_of_the_whole_sampler_grows_unless_it_is_checkpointed():
    few, many = (saved_bytes(DRaFT, num_steps, num_last_steps=num_steps) for num_steps in (4, 24))
    assert many > 4 * few
    checkpointed = saved_bytes(AlignProp, 24, truncation="full")
    assert checkpointed < many / 4


# The best policy ----------------------------------------------------------------------------------------------------


class LatentReward:
    """-(x0 - BEST_MEAN)^2 of the latents behind the fake decoder's pixels."""

    def score_with_gradient(self, request: RewardRequest) -> Tensor:
        return -(request.pixels.logit(eps=1e-6) - BEST_MEAN).square().mean(dim=(1, 2, 3))


@pytest.mark.parametrize("way", WAYS)
def test_the_best_policy_is_found(way: str):
    """The world of test_known_optimum within 640 samples, a quarter of what the others are given."""
    kind, options = WAYS[way]
    if kind is ReFL:
        options = {"num_last_steps": 3, **FULL_REFL}
    made_of: dict[str, Any] = {
        "model": GaussianField(),
        "shape": (1, 2, 2),
        "lr": 0.05,
        "max_grad_norm": 1.0,
        **options,
    }
    made = setup(kind, **made_of)
    made.algorithm.use_reward(LatentReward())
    engine, means = FieldEngine(made.pipeline, made.backend), []
    params = sampling(samples_per_prompt=4, **KEPT)
    for rollout_id in range(40):
        req = build_request(
            prompt_rows(4),
            params,
            sigmas=made.pipeline.sigmas(params),
            latent_shape=(1, 2, 2),
            rollout_id=rollout_id,
        )
        made.stack.train(with_advantages(engine.generate(req), torch.zeros(16)), progress=0.0)
        means.append(float(made.parameters["transformer.mean"]))
    assert abs(sum(means[-5:]) / 5 - BEST_MEAN) < 0.15, means[::5]


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DRTune, {"num_gradient_steps": 0}, "num_gradient_steps = 0 must be at least 1"),
        (DRTune, {"early_stop": 0}, "early_stop = 0 must be at least 1"),
        (DRTune, {"num_gradient_steps": 4, "rows_per_forward": 3}, "rows_per_forward = 3 cannot hold the 4 rows"),
        (DRaFT, {"num_last_steps": 0}, "num_last_steps = 0 must be at least 1"),
        (DRaFT, {"num_noisings": -1}, "num_noisings = -1 must be at least 0"),
        (DRaFT, {"num_noisings": 2, "num_last_steps": 3}, "num_noisings = 2 noises to the last step alone"),
        (DRaFT, {"kl_coef": -1.0}, "kl_coef = -1.0 must be at least 0"),
        (DRaFT, {"rows_per_forward": 0}, "rows_per_forward = 0 must be at least 1"),
        (ReFL, {"num_last_steps": 0}, "num_last_steps = 0 must be at least 1"),
        (ReFL, {"scale": 0.0}, "scale = 0.0 must be"),
        (DRaFT, {"scale": float("inf")}, "scale = inf must be"),
        (DRTune, {"margin": float("nan")}, "margin = nan must be"),
        (ReFL, {"pretrain_coef": -1.0}, "pretrain_coef = -1.0 must be"),
        (SRPO, {"num_first_steps": 0}, "num_first_steps = 0 must be at least 1"),
        (SRPO, {"positive_words": "sharp"}, "a relative reward needs both"),
        (AlignProp, {"truncation": "half"}, "truncation = 'half' must be one of random, full"),
    ],
)
def test_settings_that_cannot_work_are_refused(kind: type[RewardGradient], options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        setup(kind, **options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DRTune, {"num_gradient_steps": 4, "early_stop": 2}, "num_gradient_steps = 4 do not fit into the 4 - 2"),
        (DRaFT, {"num_last_steps": 5}, "num_last_steps = 5 exceeds the 4 steps"),
        (ReFL, {"num_last_steps": 5}, "num_last_steps = 5 exceeds the 4 steps"),
        (SRPO, {"num_first_steps": 5}, "num_first_steps = 5 exceeds the 4 steps"),
    ],
)
def test_more_steps_than_the_rollout_has_are_refused(kind: type[RewardGradient], options: dict[str, Any], message: str):
    made, resp = made_with(kind, **options)
    with pytest.raises(ConfigError, match=message):
        made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (sampling(keep_latents="all"), r"stochastic steps \[0, 1, 2\].*Set sampling.eta: 0"),
        (sampling(eta=0.0, sde_indices=None), r"holds positions \[4\] of 0..4. Set sampling.keep_latents: all"),
        (sampling(**KEPT, post_solver="dpmpp_2m"), "post_solver = 'dpmpp_2m'"),
    ],
)
def test_a_trajectory_that_gradients_cannot_follow_is_refused(params: Any, message: str):
    made, resp = made_with(DRaFT, params=params)
    with pytest.raises(ContractError, match=message):
        made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0)


def test_a_reward_without_gradients_is_refused():
    made = setup(DRaFT)
    with pytest.raises(ConfigError, match="DRaFT needs a reward with gradients, object has none"):
        made.algorithm.use_reward(object())
    resp = rollout(made.pipeline, ODE)
    with pytest.raises(ContractError, match="was given no reward; call use_reward first"):
        made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0)


def test_tracks_of_tokens_are_refused():
    made = setup(DRaFT)
    track = RolloutTrack(sample_ids=["a"], segment=TextSegment.pack(tokens=[torch.tensor([1])]))
    with pytest.raises(ContractError, match="the track holds TextSegment"):
        Denoising(made.pipeline, track, ODE)


def test_the_fake_pipeline_is_only_asked_for_rows():
    """DRTune is one forward of B K rows, DRaFT-K is K forwards of B."""
    for kind, options, shapes in ((DRTune, {"num_gradient_steps": 3}, [18]), (DRaFT, {"num_last_steps": 3}, [6, 6, 6])):
        made, resp = made_with(kind, **options)
        pipeline: FieldPipeline = made.pipeline
        pipeline.seen_x.clear()
        made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0)
        assert [x.shape[0] for x in pipeline.seen_x] == shapes
