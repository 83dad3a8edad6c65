"""Samples with one stochastic step each: how steps are dealt, and that samples train at theirs alone.

Legend: B samples, S stochastic steps.
"""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from diffusion_fakes import AffineField, FieldPipeline, StepField, rollout, sampling, setup, some_advantages
from transition_cases import close, micro_of, run, segment_of

from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.credit import VelocityCredit
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, FlashSDEStrategy, FlowSDEStrategy, SDEStrategy
from unirl.sde.schedule import dpm_sigmas
from unirl.trainer.own_steps import deal_steps
from unirl.trainer.request import build_request
from unirl.types.errors import ConfigError
from unirl.types.sampling import DiffusionSamplingParams

PUBLISHED = [7.4770, 7.0414, 6.6112, 6.1867, 5.7682, 5.3559, 4.9502, 4.5513, 4.1596, 3.7754]
"""The table of Flash-GRPO's code for Wan 2.1: the first ten of 20 steps, shift 3, to four decimals."""


def groups(num_prompts: int, size: int) -> list[str]:
    return [f"prompt:{prompt}" for prompt in range(num_prompts) for _ in range(size)]


def one_step(**changes: Any) -> DiffusionSamplingParams:
    return sampling(**{"one_step": "prompt", **changes})


# Dealing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_prompts", "num_steps"), [(12, 4), (7, 3), (4, 4)])
def test_each_step_serves_its_share_of_the_prompts(num_prompts: int, num_steps: int):
    params = one_step(num_inference_steps=6, sde_indices=list(range(1, num_steps + 1)))
    orders = set()
    for rollout_id in range(20):
        dealt = deal_steps(groups(num_prompts, 3), params, rollout_id)
        by_prompt = [dealt[at : at + 3] for at in range(0, len(dealt), 3)]
        assert all(len(set(own)) == 1 for own in by_prompt)
        counts = Counter(own[0] for own in by_prompt)
        share = num_prompts / num_steps
        assert set(counts) == set(range(1, num_steps + 1))
        assert set(counts.values()) <= {math.floor(share), math.ceil(share)}
        orders.add(tuple(dealt))
    assert len(orders) > 10


def test_fewer_prompts_than_steps_serve_all_alike_over_rollouts():
    """Two prompts, five steps: 400 rollouts deal 800 steps, 160 each; the deviation of one count is below 12."""
    params = one_step(num_inference_steps=6, sde_indices=[0, 1, 2, 3, 4])
    counts = Counter(step for number in range(400) for step in deal_steps(groups(2, 1), params, number))
    assert all(abs(counts[step] - 160) < 48 for step in range(5))


def test_branches_take_the_steps_in_order_equally_many_each():
    params = one_step(one_step="branch", samples_per_prompt=6)
    assert deal_steps(groups(2, 6), params, 0) == [0, 0, 1, 1, 2, 2] * 2
    with pytest.raises(ConfigError, match="samples_per_prompt = 4 does not divide over the 3 stochastic steps"):
        one_step(one_step="branch", samples_per_prompt=4)


@pytest.mark.parametrize("changes", [{"one_step": None}, {"eta": 0.0, "one_step": None, "sde_indices": []}])
def test_where_samples_have_all_steps_none_is_dealt(changes: dict[str, Any]):
    assert deal_steps(groups(2, 3), sampling(**changes), 0) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"one_step": "sample"}, "must be one of prompt, branch"),
        ({"eta": 0.0}, "needs stochastic steps"),
        ({"keep_latents": "all"}, "keep_latents: transitions"),
        ({"branch_steps": [0], "branch_factors": [3], "init_same_noise": True}, "exclude each other"),
    ],
)
def test_what_one_step_cannot_be_combined_with_is_said(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        one_step(**changes)


def test_the_driver_writes_the_steps_into_the_request_and_workers_share_them():
    pipeline, params = FieldPipeline(AffineField()), one_step()
    track = rollout(pipeline, params, num_prompts=3).tracks["image"]
    segment = segment_of(track)
    assert segment.own_steps is not None
    assert segment.own_steps.tolist() == deal_steps(track.group_ids, params, 0)
    joined = type(segment).concat([segment.select([0, 1, 2]), segment.select(slice(3, 9))])
    assert joined.own_steps is not None and torch.equal(joined.own_steps, segment.own_steps)
    assert build_request([], sampling(), sigmas=segment.sigmas, latent_shape=(1,), rollout_id=0).own_steps == []


# Training -----------------------------------------------------------------------------------------------------------


def test_a_sample_trains_at_its_own_step_alone():
    """The gradient of each step's shift comes from the samples that had noise there."""
    made = setup(DiffusionGRPO, model=StepField(4))
    track = rollout(made.pipeline, one_step(), num_prompts=3).tracks["image"]
    segment = segment_of(track)
    assert segment.own_steps is not None and made.algorithm.num_terms(track) == 9
    for step in range(3):
        advantages = (segment.own_steps == step).float()
        _, gradients, metrics = run(made, micro_of(track, advantages))
        assert gradients["transformer.shift"].nonzero().flatten().tolist() == [step]
        assert metrics["policy/ratio_mean"] == 1.0


def test_each_sample_is_that_of_a_rollout_with_its_step_alone():
    """Same losses and gradients as three rollouts of one stochastic step, each prompt taken from its own."""
    made = setup(DiffusionGRPO, clip_range=0.2)
    track = rollout(made.pipeline, one_step(), num_prompts=3).tracks["image"]
    segment, advantages = segment_of(track), some_advantages(9)
    assert segment.own_steps is not None
    _, found, _ = run(made, micro_of(track, advantages))
    total = {name: torch.zeros_like(value) for name, value in found.items()}
    for step in range(3):
        apart = rollout(made.pipeline, sampling(sde_indices=[step]), num_prompts=3).tracks["image"]
        assert apart.sample_ids == track.sample_ids
        own = advantages * (segment.own_steps == step)
        for name, gradient in run(made, micro_of(apart, own))[1].items():
            total[name] += gradient
    close(found, total, rtol=1e-4, atol=1e-6)


# Weights ------------------------------------------------------------------------------------------------------------


def published_weight(q: float, sigma: float, sigma_next: float) -> float:
    root = math.sqrt(sigma - sigma_next)
    return 1 / (root / q + q * root * (1 - sigma) / (2 * sigma))


def test_weights_on_the_grid_of_wan_are_the_published_table():
    sigmas = dpm_sigmas(20, 3.0)  # that of the library at the time
    kernel = FlashSDEStrategy()
    raw = kernel.step_std(sigmas, range(10), eta=1.0) / kernel.step_gain(sigmas, range(10), eta=1.0).abs()
    torch.testing.assert_close(raw, torch.tensor(PUBLISHED), rtol=0, atol=6e-5)


@pytest.mark.parametrize("strategy", [FlashSDEStrategy(), FlowSDEStrategy(), DanceSDEStrategy()])
def test_velocity_credit_is_the_published_formula_with_mean_one(strategy: SDEStrategy):
    pipeline = FieldPipeline(AffineField(), strategy)
    segment = segment_of(rollout(pipeline, sampling(sde_indices=[0, 2, 3])).tracks["image"])
    levels = segment.sigmas.double().tolist()
    raw = []
    for step in (0, 2, 3):
        sigma = levels[step]
        below = levels[1] if step == 0 else sigma
        q = 0.7 * {"flash": levels[1] * sigma, "flow": math.sqrt(sigma / (1 - below)), "dance": 1.0}[strategy.name]
        raw.append(published_weight(q, sigma, levels[step + 1]))
    found = VelocityCredit().weights(segment, pipeline)
    assert float(found[1]) == 0
    assert found[[0, 2, 3]].tolist() == pytest.approx([3 * value / sum(raw) for value in raw], rel=1e-5)


def test_velocity_credit_gives_the_score_by_the_velocity_one_size_at_all_steps():
    """The score is gain noise / (N std), so its size is gain / std, up to what all steps share."""
    pipeline = FieldPipeline(AffineField())
    segment = segment_of(rollout(pipeline).tracks["image"])
    score_S = pipeline.step_gain(segment).abs() / pipeline.step_std(segment)
    scaled_S = score_S * VelocityCredit().weights(segment, pipeline)[:3]
    torch.testing.assert_close(scaled_S, scaled_S[:1].expand(3), rtol=1e-5, atol=0)
    assert float(score_S.max() / score_S.min()) > 1.1


def test_velocity_credit_without_noise_is_refused():
    pipeline = FieldPipeline(AffineField(), CPSSDEStrategy())
    segment = segment_of(rollout(pipeline, sampling(sde_indices=[3], eta=0.5)).tracks["image"])
    with pytest.raises(ConfigError, match=r"stochastic steps \[3\] of the cps kernel have none"):
        VelocityCredit().weights(segment, pipeline)


def test_only_policy_gradients_on_single_steps_train_on_own_steps():
    assert DiffusionGRPO.trains_own_steps and not StageAlgorithm.trains_own_steps
