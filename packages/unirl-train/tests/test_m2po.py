"""M2PO's mask: by the words of the paper, over all that an optimizer step trains on, on any number of ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import displace
from diffusion_fakes import rollout as latents_rollout
from diffusion_fakes import setup as diffusion_setup
from hypothesis import given
from hypothesis import strategies as st
from token_fakes import Setup, TinyLM, advantages_of, response, setup
from token_reference import TrainedTokens, along, derivative, in_float64
from torch import Tensor
from transition_cases import segment_of

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.rollout_correction import RolloutCorrection, second_moment_cut
from unirl.types.errors import ConfigError
from unirl.types.rollout import RolloutResp
from unirl.types.segments import TextSegment

NUM_SAMPLES = 12
THRESHOLD = 2e-2


def kept_by_the_papers_loop(moments: list[float], threshold: float) -> set[int]:
    """Indices that stay where the largest moment goes until the mean of the rest is at most the threshold."""
    kept = set(range(len(moments)))
    while kept and math.fsum(moments[i] for i in kept) / len(kept) > threshold:
        kept.remove(max(kept, key=lambda i: moments[i]))
    return kept


# The cut ------------------------------------------------------------------------------------------------------------


def test_the_cut_by_hand():
    # Means of 0.01, 0.02, 0.09, 0.4 from the smallest on: 0.01, 0.015, 0.04, 0.13.
    moments = torch.tensor([0.4, 0.01, 0.09, 0.02], dtype=torch.float64)
    assert float(second_moment_cut(moments, 0.05)) == 0.4
    assert float(second_moment_cut(moments, 0.03)) == 0.09
    assert float(second_moment_cut(moments, 0.005)) == 0.01  # all go
    assert float(second_moment_cut(moments, 0.2)) == math.inf  # all stay
    assert float(second_moment_cut(moments[:0], 0.2)) == math.inf


def test_equal_moments_stay_or_go_together_and_what_is_no_number_goes():
    moments = torch.tensor([1.0, 0.0, 1.0])
    assert (moments < second_moment_cut(moments, 0.5)).tolist() == [False, True, False]
    moments = torch.tensor([math.nan, 0.1, math.inf])
    assert (moments < second_moment_cut(moments, 0.5)).tolist() == [False, True, False]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40, unique=True), st.floats(1e-3, 12), st.randoms())
def test_the_cut_keeps_what_the_papers_loop_keeps_in_any_order(moments: list[float], threshold: float, rng: Any):
    means = [sum(sorted(moments)[: k + 1]) / (k + 1) for k in range(len(moments))]
    if any(abs(mean - threshold) < 1e-9 for mean in means):
        return  # the loop sums in another order
    given_order = torch.tensor(moments, dtype=torch.float64)
    cut = second_moment_cut(given_order, threshold)
    assert {i for i, moment in enumerate(moments) if moment < float(cut)} == kept_by_the_papers_loop(moments, threshold)
    rng.shuffle(moments)
    assert float(second_moment_cut(torch.tensor(moments, dtype=torch.float64), threshold)) == float(cut)


# Tokens -------------------------------------------------------------------------------------------------------------


def masked_update(made: Setup, resp: RolloutResp) -> dict[str, float]:
    return made.stack.train(with_advantages(resp, advantages_of(NUM_SAMPLES)), progress=0.0).updates[0]


def options(**changes: Any) -> dict[str, Any]:
    return {"rollout_correction": RolloutCorrection(upper=None, m2_threshold=THRESHOLD), "displaced": 0.1, **changes}


@pytest.mark.parametrize("micro", [100, 2])
def test_the_update_is_the_papers_on_tokens(micro: int):
    """L = - mean of M A pi / pi_b, with M over all tokens of the update; value in float64, gradient by differences."""
    made, resp = setup(ARGRPO, micro=micro, clip_range=1.0, **options()), response()
    tokens, model = TrainedTokens.of(resp), in_float64(made.pipeline.model)
    advantage = advantages_of(NUM_SAMPLES).double()[tokens.sample_M]
    moments = (tokens.logp(model) - tokens.engine_logp_M).square().tolist()
    kept = kept_by_the_papers_loop(moments, THRESHOLD)
    is_kept = torch.tensor([float(i in kept) for i in range(len(moments))], dtype=torch.float64)

    def loss(model: TinyLM) -> Tensor:
        return -(is_kept * (tokens.logp(model) - tokens.engine_logp_M).exp() * advantage).mean()

    value, expected, direction = derivative(loss, model)
    metrics = masked_update(made, resp)
    mine = along(made.backend.gradients[0], direction)
    assert 0 < len(kept) < len(moments)
    assert mine == pytest.approx(expected, rel=1e-4)
    assert metrics["policy/loss"] == pytest.approx(value, rel=1e-5)
    assert metrics["mismatch/m2/masked_fraction"] == pytest.approx(1 - len(kept) / len(moments))
    assert metrics["mismatch/m2/before"] == pytest.approx(sum(moments) / len(moments), rel=1e-4)
    assert metrics["mismatch/m2/after"] == pytest.approx(sum(moments[i] for i in kept) / len(kept), rel=1e-4)
    assert metrics["mismatch/m2/after"] <= THRESHOLD < metrics["mismatch/m2/before"]
    assert metrics["mismatch/correction/dropped_fraction"] == metrics["mismatch/m2/masked_fraction"]
    assert metrics["policy/ratio_max_abs_dev"] == 0.0


def test_every_update_is_judged_by_itself_with_one_forward_more():
    made = setup(ARGRPO, updates=2, **options())
    result = made.stack.train(with_advantages(response(masked=False), advantages_of(NUM_SAMPLES)), progress=0.0)
    assert made.pipeline.num_replays == 4
    assert all(0 < update["mismatch/m2/masked_fraction"] < 1 for update in result.updates)
    assert all(update["mismatch/m2/after"] <= THRESHOLD for update in result.updates)
    assert made.algorithm.old_logp == "replay (m2_threshold: before the first update too)"
    assert not made.algorithm.starts_at_ratio_one  # whatever rounds a forward without gradients


def test_a_threshold_that_nothing_exceeds_changes_nothing():
    plain = setup(ARGRPO, **options(rollout_correction=RolloutCorrection()))
    masked = setup(ARGRPO, **options(rollout_correction=RolloutCorrection(m2_threshold=1e3)))
    masked_update(plain, response()), masked_update(masked, response())
    for name, gradient in plain.backend.gradients[0].items():
        assert torch.equal(masked.backend.gradients[0][name], gradient)


def test_samples_that_are_left_out_anyway_are_not_judged():
    """A sample too old has weight 0; whatever its moments, the others are masked as they are without it."""
    made = setup(
        ARGRPO, **options(rollout_correction=RolloutCorrection(upper=None, m2_threshold=THRESHOLD, max_staleness=0))
    )
    resp = response(masked=False)
    track = resp.tracks["text"]
    versions = torch.zeros(NUM_SAMPLES, dtype=torch.long)
    versions[3] = -1
    segment = track.segment
    assert isinstance(segment, TextSegment) and segment.log_probs is not None
    is_old = torch.arange(NUM_SAMPLES).repeat_interleave(segment.lengths) == 3

    def masked(shift: float) -> list[bool]:
        assert isinstance(segment, TextSegment) and segment.log_probs is not None
        moved = segment.replace(log_probs=torch.where(is_old, segment.log_probs + shift, segment.log_probs))
        resp.tracks["text"] = track.replace(segment=moved, policy_versions=versions)
        micro = made.stack._anchored(  # the masks, which no metric shows one by one
            made.stack._parts[0], with_advantages(resp, advantages_of(NUM_SAMPLES)).tracks["text"], [0], 0.0
        )[0][0]
        assert not micro.anchor["m2_masked"][is_old].any() and not micro.anchor["correction"][is_old].any()
        return micro.anchor["m2_masked"].tolist()

    assert masked(0.0) == masked(9.0)
    assert any(masked(0.0))


# Denoising steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 4])
def test_denoising_steps_are_masked_by_the_same_words(chunk: int | None):
    correction = RolloutCorrection(lower=0.0, upper=None, m2_threshold=1e-6)
    made = diffusion_setup(DiffusionGRPO, rollout_correction=correction, rows_per_forward=chunk, micro=4)
    resp = latents_rollout(made.pipeline)
    track = resp.tracks["image"]
    displace(made.backend, 0.02)
    # The gap of every transition, by a replay of single rows.
    segment = segment_of(track)
    assert segment.sde_logp is not None and segment.params is not None
    gaps = []
    for sample, step in itertools.product(range(6), (0, 1, 2)):
        one = torch.tensor([sample]), torch.tensor([step])
        with torch.no_grad():
            stats = made.pipeline.replay(track.conditions, segment, *one, segment.params)
        gaps.append(float(stats.logp_R) - float(segment.sde_logp[sample, step]))
    kept = kept_by_the_papers_loop([gap**2 for gap in gaps], 1e-6)
    assert 2 < len(kept) < 16
    metrics = made.stack.train(with_advantages(resp, advantages_of(6)), progress=0.0).metrics
    assert metrics["mismatch/m2/masked_fraction"] == pytest.approx(1 - len(kept) / 18)
    assert metrics["mismatch/m2/before"] == pytest.approx(sum(gap**2 for gap in gaps) / 18, rel=1e-2)
    assert metrics["mismatch/m2/after"] <= 1e-6
    assert metrics["policy/ratio_max_abs_dev"] == 0.0


def test_a_threshold_must_be_above_zero_and_may_stand_alone():
    with pytest.raises(ConfigError, match="m2_threshold = 0"):
        RolloutCorrection(m2_threshold=0.0)
    assert RolloutCorrection(upper=None, m2_threshold=0.04).lower is None
    with pytest.raises(ConfigError, match="needs at least one bound; got lower = null, upper = null"):
        RolloutCorrection(upper=None)
