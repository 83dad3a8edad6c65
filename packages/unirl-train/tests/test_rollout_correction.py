"""Weights for the gap between an engine's log-probs of denoising steps and a replay's: by hand, and in expectation."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import AffineField, displace, rollout, sampling, setup, some_advantages
from torch import Tensor
from transition_cases import close, flow_transitions, micro_of, run, segment_of

from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.rollout_correction import RolloutCorrection
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.errors import ConfigError, ContractError

GAPS = 0.4 * torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
"""log p_trainer - log p_engine of six samples and three steps."""


def found_by_engine(made: Any, gap_BS: Tensor = GAPS) -> Any:
    """Track of a rollout whose engine's log-probs are the replay's less `gap_BS`."""
    track = rollout(made.pipeline).tracks["image"]
    logp_BS = made.algorithm.anchor(micro_of(track))["logp"]
    return track.replace(segment=replace(segment_of(track), sde_logp=logp_BS - gap_BS))


def weights_by_hand(level: str, mode: str, lower: float, upper: float) -> list[list[float]]:
    found = []
    for gaps in GAPS.double().tolist():
        joint = {"token": gaps, "sequence": [sum(gaps)] * 3, "geometric": [sum(gaps) / 3] * 3}[level]
        ratios = [math.exp(gap) for gap in joint]
        if mode == "truncate":
            found.append([min(max(ratio, lower), upper) for ratio in ratios])
        else:
            kept = [lower <= ratio <= upper for ratio in ratios]
            found.append(
                [(ratio if mode == "mask" else 1.0) if ok else 0.0 for ratio, ok in zip(ratios, kept, strict=True)]
            )
    return found


@pytest.mark.parametrize("mode", ["truncate", "mask", "reject"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_every_row_is_weighted_by_what_its_level_and_mode_say(level: Any, mode: Any):
    correction = RolloutCorrection(level=level, mode=mode, lower=0.8, upper=1.25)
    made = setup(DiffusionGRPO, rollout_correction=correction, clip_range=0.2)
    track = found_by_engine(made)
    expected = torch.tensor(weights_by_hand(level, mode, 0.8, 1.25))
    micro = micro_of(track)
    _, gradients, metrics = run(made, micro)

    # At a ratio of 1 the surrogate's gradient is -A grad log p of each row.
    made.backend.zero_grad()
    sample_R, step_R = made.algorithm.rows(micro)
    segment = segment_of(track)
    stats = made.pipeline.replay(track.conditions, segment, sample_R, step_R, sampling())
    loss = -(expected.flatten() * micro.advantages[sample_R] * stats.logp_R).mean()
    parameters = made.backend.parameters
    close(gradients, dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)))
    assert metrics["mismatch/correction/mean"] == pytest.approx(float(expected.mean()), rel=1e-5)
    assert metrics["mismatch/correction/dropped_fraction"] == pytest.approx(float((expected == 0).float().mean()))
    assert 0.2 < metrics["mismatch/logp_absdiff/mean"] == pytest.approx(float(GAPS.abs().mean()), rel=1e-4)
    if mode != "truncate":
        assert 0 < int((expected == 0).sum()) < 18


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weighted_samples_of_an_engine_give_the_gradient_of_the_policys_own(level: Any):
    """E_q[w A grad log p] = E_p[A grad log p] for advantages of the final latents, within four standard errors."""
    steps = [0] if level == "token" else [0, 1, 2]  # later states are drawn by the engine's own earlier steps
    params = sampling(samples_per_prompt=4000, sde_indices=steps)
    weighted = RolloutCorrection(level=level, mode="mask", lower=0.0, upper=None)

    def gradients_of(correction: RolloutCorrection | None, displacement: float) -> Tensor:
        """Gradients [40, P] of a hundred samples each, drawn by an engine with displaced weights."""
        made = setup(DiffusionGRPO, model=AffineField(), strategy=FlowSDEStrategy("sum"), rollout_correction=correction)
        start = {name: value.clone() for name, value in made.parameters.items()}
        displace(made.backend, displacement)
        track = rollout(made.pipeline, params, num_prompts=1).tracks["image"]
        for name, value in made.parameters.items():
            value.copy_(start[name])
        advantages = segment_of(track).latents[:, -1].flatten(1).mean(dim=1)
        draws = []
        for first in range(0, 4000, 100):
            chosen = list(range(first, first + 100))
            gradients = run(made, micro_of(track.select(chosen), advantages[chosen]))[1]
            draws.append(torch.cat([gradients[name].flatten() for name in sorted(gradients)]))
        return torch.stack(draws).double()

    own, plain, corrected = gradients_of(None, 0.0), gradients_of(None, 0.15), gradients_of(weighted, 0.15)

    def errors_away(draws: Tensor) -> float:
        error = ((draws.var(dim=0) + own.var(dim=0)) / len(own)).sqrt()
        return float(((draws.mean(dim=0) - own.mean(dim=0)).abs() / error).max())

    assert errors_away(corrected) < 4 < errors_away(plain)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_chunks_of_whole_trajectories_change_nothing(level: Any):
    found = []
    for rows in (None, 3, 6):
        correction = RolloutCorrection(level=level, upper=1.25)
        made = setup(DiffusionGRPO, rollout_correction=correction, rows_per_forward=rows)
        found.append(run(made, micro_of(found_by_engine(made)))[1])
    close(found[1], found[0])
    close(found[2], found[0])


def test_a_chunk_that_cuts_a_trajectory_is_refused_where_it_is_judged_whole():
    made = setup(DiffusionGRPO, rows_per_forward=2, rollout_correction=RolloutCorrection(level="sequence"))
    with pytest.raises(ConfigError, match="= 2 is not a multiple of the 3 trained steps of a sample"):
        run(made, micro_of(found_by_engine(made)))
    made = setup(DiffusionGRPO, rows_per_forward=2, rollout_correction=RolloutCorrection(upper=1.25))
    assert run(made, micro_of(found_by_engine(made)))[2]["mismatch/correction/mean"] > 0


def test_weights_are_of_the_policy_before_the_first_update():
    made = setup(DiffusionGRPO, rollout_correction=RolloutCorrection(mode="mask", lower=0.0, upper=None))
    track = found_by_engine(made)
    anchor = made.algorithm.anchor(micro_of(track))
    displace(made.backend, 0.5)
    _, _, metrics = run(made, micro_of(track, anchor=anchor))
    assert metrics["mismatch/correction/mean"] == pytest.approx(float(GAPS.exp().mean()), rel=1e-5)


def test_samples_of_an_older_policy_are_left_out():
    correction = RolloutCorrection(max_staleness=1)
    made = setup(DiffusionGRPO, rollout_correction=correction)
    version = made.backend.policy_version
    versions = torch.tensor([version, version - 1, version - 2, version, version - 3, version])
    track = found_by_engine(made, torch.zeros(6, 3)).replace(policy_versions=versions)
    _, gradients, metrics = run(made, micro_of(track))
    assert metrics["mismatch/correction/dropped_fraction"] == pytest.approx(2 / 6)
    assert metrics["mismatch/staleness/max"] == 3
    plain = setup(DiffusionGRPO)
    advantages = some_advantages(6) * torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    close(gradients, run(plain, micro_of(found_by_engine(plain, torch.zeros(6, 3)), advantages))[1])
    with pytest.raises(ConfigError, match="max_staleness needs the version of the policy"):
        run(made, micro_of(track.replace(policy_versions=None)))


def with_step_versions(track: Any, versions: Any) -> Any:
    """versions: [B, T] numbers."""
    versions = torch.tensor(versions)
    segment = segment_of(track).replace(versions=versions)
    return track.replace(segment=segment, policy_versions=versions[:, 0], last_versions=versions[:, -1])


CUT_AT = [0, 1, 2, 3, 1, 0]
"""Per sample, the step from which on newer weights denoised."""


@pytest.mark.parametrize("source", ["max_staleness", "noise_floor"])
def test_a_step_is_as_old_as_the_weights_that_took_it(source: str):
    """Steps before the cut are of version -2, the others of version 0, the present one."""
    correction = {
        "max_staleness": RolloutCorrection(mode="mask", lower=0.0, upper=None, max_staleness=1),
        "noise_floor": RolloutCorrection(mode="mask", lower=0.0, upper=None, noise_floor=FLOOR),
    }[source]
    made = setup(DiffusionGRPO, rollout_correction=correction)
    versions = [[-2] * cut + [0] * (4 - cut) for cut in CUT_AT]
    micro = micro_of(with_step_versions(found_by_engine(made), versions))
    is_left = torch.tensor(versions)[:, :3] == 0
    if source == "noise_floor":
        is_left = is_left | torch.tensor([True, True, False])  # the noise of the last step alone is below the floor
    expected = torch.where(is_left, GAPS.double().exp(), 0.0).flatten()
    _, gradients, metrics = run(made, micro)
    made.backend.zero_grad()
    sample_R, step_R = made.algorithm.rows(micro)
    stats = made.pipeline.replay(micro.track.conditions, segment_of(micro.track), sample_R, step_R, sampling())
    loss = -(expected * micro.advantages[sample_R] * stats.logp_R).mean()
    parameters = made.backend.parameters
    close(gradients, dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)))
    assert metrics["mismatch/correction/dropped_fraction"] == pytest.approx(float((~is_left).float().mean()))
    assert metrics["mismatch/staleness/max"] == 2, "the age of a sample is that of its first step"


def test_the_updates_of_a_rollout_do_not_make_its_samples_older():
    correction = RolloutCorrection(max_staleness=1)
    made = setup(DiffusionGRPO, rollout_correction=correction, updates=3)
    for staleness in (0, 3):
        resp = rollout(made.pipeline)
        resp.tracks["image"] = resp.tracks["image"].replace(policy_versions=torch.zeros(6, dtype=torch.long))
        result = made.stack.train(with_advantages(resp, some_advantages(6)), progress=0.0)
        assert [update["mismatch/staleness/max"] for update in result.updates] == [staleness] * 3
        dropped = [update["mismatch/correction/dropped_fraction"] for update in result.updates]
        assert dropped == [float(staleness > 1)] * 3


# OP-GRPO ------------------------------------------------------------------------------------------------------------

FLOOR = 0.65
"""Above the noise of the last of the three steps alone."""


def with_versions(track: Any, *versions: int) -> Any:
    return track.replace(policy_versions=torch.tensor(versions))


def test_the_floor_lies_between_two_steps():
    made = setup(DiffusionGRPO)
    std = made.pipeline.step_std(segment_of(rollout(made.pipeline).tracks["image"])).tolist()
    assert std[2] < FLOOR < min(std[:2])


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_late_steps_of_stale_samples_count_neither_in_the_loss_nor_in_the_sequence(level: Any, rows: int | None):
    correction = RolloutCorrection(level=level, mode="mask", lower=0.0, upper=None, noise_floor=FLOOR)
    made = setup(DiffusionGRPO, rollout_correction=correction, rows_per_forward=rows)
    track = with_versions(found_by_engine(made), 0, -1, 0, -4, -1, 0)
    is_stale = [False, True, False, True, True, False]
    expected = []
    for gaps, stale in zip(GAPS.double().tolist(), is_stale, strict=True):
        own = gaps[:2] if stale else gaps
        joint = {"token": own, "sequence": [sum(own)] * 3, "geometric": [sum(own) / len(own)] * 3}[level]
        expected += [math.exp(gap) for gap in joint[: len(own)]] + [0.0] * (3 - len(own))
    micro = micro_of(track)
    _, gradients, metrics = run(made, micro)
    made.backend.zero_grad()
    sample_R, step_R = made.algorithm.rows(micro)
    stats = made.pipeline.replay(track.conditions, segment_of(track), sample_R, step_R, sampling())
    loss = -(torch.tensor(expected) * micro.advantages[sample_R] * stats.logp_R).mean()
    parameters = made.backend.parameters
    close(gradients, dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)))
    assert metrics["mismatch/correction/dropped_fraction"] == pytest.approx(3 / 18)


def test_the_floor_leaves_fresh_samples_alone_bit_by_bit_in_every_update():
    found = []
    for floor in (None, FLOOR):
        made = setup(DiffusionGRPO, updates=3, rollout_correction=RolloutCorrection(upper=1.25, noise_floor=floor))
        resp = rollout(made.pipeline)
        resp.tracks["image"] = with_versions(resp.tracks["image"], *[0] * 6)
        made.stack.train(with_advantages(resp, some_advantages(6)), progress=0.0)
        found.append(made.backend.gradients)
    for mine, theirs in zip(*found, strict=True):
        assert all(torch.equal(mine[name], gradient) for name, gradient in theirs.items())


@pytest.mark.parametrize("rows", [None, 6])
def test_the_weight_of_the_sequence_stands_outside_of_the_clip(rows: int | None):
    """OP-GRPO: L = - mean of W min(r A, clip(r) A) over the steps with noise, W = the ratio of whole trajectories.

    In float64 by the formulas of the kernel; the gradient by central differences.
    """
    correction = RolloutCorrection(level="sequence", lower=0.0, upper=1.4, noise_floor=FLOOR)
    made = setup(
        DiffusionGRPO,
        model=AffineField(),
        strategy=FlowSDEStrategy("sum"),
        rollout_correction=correction,
        clip_range=0.01,
        rows_per_forward=rows,
    )
    track = with_versions(rollout(made.pipeline).tracks["image"], -2, -2, -2, -2, -2, -2)
    elements = 12
    thetas = [torch.tensor([0.7, 0.1], dtype=torch.float64)]

    def now() -> Tensor:
        return torch.cat([made.parameters[f"transformer.{name}"] for name in ("scale", "shift")]).double()

    displace(made.backend, 0.3)
    thetas.append(now())
    anchor = made.algorithm.anchor(micro_of(track))
    displace(made.backend, 0.01, seed=5)
    present = now()
    behave, prox = (flow_transitions(track, theta, eta=0.7)["logp"] * elements for theta in thetas)
    weight_B = (prox - behave)[:, :2].sum(dim=1).exp().clamp(max=1.4)
    advantages = some_advantages(6).double()[:, None]

    def loss(theta: Tensor) -> float:
        ratio = (flow_transitions(track, theta, eta=0.7)["logp"] * elements - prox)[:, :2].exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.99, 1.01) * advantages)
        return -float((weight_B[:, None] * surrogate).sum()) / 18

    value, gradients, metrics = run(made, micro_of(track, anchor=anchor))
    assert value == pytest.approx(loss(present), rel=1e-3)
    for index, name in enumerate(("scale", "shift")):
        along = torch.zeros(2, dtype=torch.float64)
        along[index] = 1e-6
        difference = (loss(present + along) - loss(present - along)) / 2e-6
        assert float(gradients[f"transformer.{name}"]) == pytest.approx(difference, rel=2e-3)
    assert metrics["policy/clipfrac_high"] > 0
    assert 0 < int((weight_B == 1.4).sum()) < 6
    assert metrics["mismatch/correction/mean"] == pytest.approx(float(weight_B.mean()) * 2 / 3, rel=1e-3)


def test_a_rollout_whose_window_is_below_the_floor_trains_on_none_of_its_stale_samples():
    made = setup(DiffusionGRPO, rollout_correction=RolloutCorrection(noise_floor=FLOOR))
    track = rollout(made.pipeline, sampling(sde_indices=[2])).tracks["image"]
    for versions, dropped in ((0, 0.0), (-1, 1.0)):
        _, _, metrics = run(made, micro_of(with_versions(track, *[versions] * 6)))
        assert metrics["mismatch/correction/dropped_fraction"] == dropped


def test_a_floor_needs_versions_and_must_leave_a_step():
    made = setup(DiffusionGRPO, rollout_correction=RolloutCorrection(noise_floor=FLOOR))
    with pytest.raises(ConfigError, match="noise_floor needs the version of the policy on every sample"):
        run(made, micro_of(found_by_engine(made).replace(policy_versions=None)))
    made = setup(DiffusionGRPO, rollout_correction=RolloutCorrection(noise_floor=50.0))
    with pytest.raises(ConfigError, match="noise_floor = 50.0 leaves out every step of a stale sample: the standard"):
        run(made, micro_of(found_by_engine(made)))


def test_it_needs_log_probs_of_both():
    with pytest.raises(ConfigError, match="Set algorithm.old_logp_source: replay"):
        setup(DiffusionGRPO, rollout_correction=RolloutCorrection(), old_logp_source="rollout")
    made = setup(DiffusionGRPO, rollout_correction=RolloutCorrection())
    made.algorithm.trust_rollout()
    assert made.algorithm.replays_old
    track = found_by_engine(made)
    without = track.replace(segment=replace(segment_of(track), sde_logp=None))
    with pytest.raises(ContractError, match="the engine returned none"):
        run(made, micro_of(without))
