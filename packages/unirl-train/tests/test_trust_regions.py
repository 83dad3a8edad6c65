"""GRPO-Guard, Flow-DPPO and CPPO against float64 references, closed forms and their limits."""

import math
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import AffineField, Setup, Stats, displace, rollout, sampling, setup, some_advantages
from torch import Tensor
from transition_cases import anchored, close, flow_transitions, micro_of, run, segment_of

from unirl.algorithms.base import MicroBatch, RowMetrics
from unirl.algorithms.cppo import CPPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.flow_dppo import FlowDPPO, old_policy_kl
from unirl.algorithms.grpo_guard import GRPOGuard, normalised_log_ratio
from unirl.algorithms.losses import masked_surrogate, prefix_budget
from unirl.algorithms.transitions import TransitionRows
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, SDEStrategy
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutTrack

OLD = torch.tensor([0.7, 0.1], dtype=torch.float64)
"""Weights of the affine field before the first update."""


def moved(kind: type[DiffusionGRPO | FlowDPPO], amount: float = 0.05, **options: Any) -> tuple[Setup, MicroBatch]:
    """A field away from its anchor, and the micro-batch with that anchor."""
    made = setup(kind, model=AffineField(), **options)
    micro = anchored(made, rollout(made.pipeline).tracks["image"])
    displace(made.backend, amount)
    return made, micro


def present(made: Setup) -> Tensor:
    """The two weights as they are now, float64."""
    return torch.cat([value.double() for value in made.parameters.values()])


def differences(value: Any, theta: Tensor) -> Tensor:
    """Central differences of a scalar function of the two weights, float64."""
    steps = 1e-5 * torch.eye(2, dtype=torch.float64)
    return torch.stack([(value(theta + step) - value(theta - step)) / 2e-5 for step in steps])


def gradient_of(made: Setup, micro: MicroBatch) -> Tensor:
    gradients = run(made, micro)[1]
    return torch.cat([gradients["transformer.scale"], gradients["transformer.shift"]]).double()


def change(track: RolloutTrack, theta: Tensor, is_dance: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mean(eps d) [B, S], K [B, S], log r [B, S] and |dt| [S] between the old weights and theta, by the formulas."""
    new, old = flow_transitions(track, theta, 0.7, is_dance), flow_transitions(track, OLD, 0.7, is_dance)
    segment = segment_of(track)
    y = torch.stack([segment.latents_at(step + 1) for step in segment.sde_indices], dim=1).double().flatten(2)
    noise = (y - old["mean"]) / old["std"][:, None]
    delta = new["mean"] - old["mean"]
    kl = delta.square().mean(-1) / (2 * old["std"].square())
    return (noise * delta).mean(-1), kl, new["logp"] - old["logp"], old["dt"]


def rows_of(made: Setup, micro: MicroBatch, keep: slice = slice(None)) -> TransitionRows:
    """The rows that the surrogate of this micro-batch sees."""
    sample_R, step_R = (part[keep] for part in made.algorithm.rows(micro))
    params = segment_of(micro.track).params
    assert params is not None
    policy = made.pipeline.replay(micro.track.conditions, segment_of(micro.track), sample_R, step_R, params)
    return TransitionRows(
        policy=policy,
        anchor_logp_R=micro.anchor["logp"].flatten()[keep],
        anchor_mean=micro.anchor["mean"].flatten(0, 1)[keep],
        advantage_R=micro.advantages[sample_R],
        delta_sigma_R=(-segment_of(micro.track).sigmas.diff())[step_R],
        sample_R=sample_R,
        step_R=step_R,
        progress=0.0,
    )


# GRPO-Guard -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [None, DanceSDEStrategy()])
def test_the_normalised_log_ratio_is_the_mean_of_noise_times_the_change_of_the_mean(strategy: SDEStrategy | None):
    made, micro = moved(GRPOGuard, strategy=strategy)
    expected, kl, log_ratio, _ = change(micro.track, present(made), strategy is not None)
    # log r + K and s multiply out to it exactly; the plain log-ratio is something else.
    assert float((log_ratio - expected).abs().max()) > 5e-3
    found = normalised_log_ratio(rows_of(made, micro)).view(expected.shape).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)  # log-probs of float32
    assert float(kl.max()) > 1e-4


def test_rows_of_different_sigmas_do_not_touch_each_other():
    made, micro = moved(GRPOGuard)
    together = normalised_log_ratio(rows_of(made, micro))
    assert together.shape == (18,)
    alone = torch.cat([normalised_log_ratio(rows_of(made, micro, slice(row, row + 1))) for row in range(18)])
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-6)


def test_the_normalised_ratio_has_mean_one_where_the_plain_one_has_not():
    made = setup(GRPOGuard, model=AffineField(), clip_range=0.9)
    track = rollout(made.pipeline, sampling(samples_per_prompt=1000)).tracks["image"]
    micro = anchored(made, track)
    displace(made.backend, 0.1)
    metrics = run(made, micro)[2]
    deltas, kl, _, _ = change(track, present(made))
    # 6000 rows; the standard error of the mean is that of mean(eps d), the bias of the plain ratio about -K.
    error = float(deltas.std()) / math.sqrt(6000)
    assert abs(metrics["guard/ratio_mean"] - 1) < 4 * error
    assert float(kl.mean()) > 8 * error and metrics["policy/ratio_mean"] < 1 - 0.5 * float(kl.mean())


@pytest.mark.parametrize("reweight", [True, False])
def test_guard_has_the_gradient_of_float64_finite_differences(reweight: bool):
    made, micro = moved(GRPOGuard, clip_range=0.5, reweight_gradient=reweight)

    def value(theta: Tensor) -> Tensor:
        log_ratio, _, _, dt = change(micro.track, theta)
        loss = -micro.advantages.double()[:, None] * log_ratio.exp()
        return (loss / dt if reweight else loss).mean()

    torch.testing.assert_close(gradient_of(made, micro), differences(value, present(made)), rtol=1e-3, atol=1e-5)


def test_guard_clips_the_normalised_ratio():
    made, micro = moved(GRPOGuard, clip_range=1e-3)
    found = run(made, micro)[2]
    normalised = change(micro.track, present(made))[0].exp()
    assert found["policy/clipfrac_high"] == pytest.approx(float((normalised > 1 + 1e-3).double().mean()))
    assert found["policy/clipfrac_low"] == pytest.approx(float((normalised < 1 - 1e-3).double().mean()))
    assert found["guard/ratio_max_abs_dev"] == pytest.approx(float((normalised - 1).abs().max()), rel=1e-3)


def test_guards_reweighting_leaves_the_penalty_alone():
    values = []
    for reweight in (True, False):
        options: dict[str, Any] = {"kl_coef": 0.5, "keep_reference": True, "reweight_gradient": reweight}
        made, micro = moved(GRPOGuard, **options)
        values.append(run(made, micro_of(micro.track, torch.zeros(6), anchor=micro.anchor))[0])
    assert values[0] == values[1] > 0


def test_guard_refuses_a_kernel_without_density():
    made = setup(GRPOGuard, strategy=CPSSDEStrategy())
    micro = anchored(made, rollout(made.pipeline).tracks["image"])
    with pytest.raises(ConfigError, match="GRPOGuard needs the density of a Flow or Dance kernel; CPS has none"):
        run(made, micro)


# The mask -------------------------------------------------------------------------------------------------------------


def test_rows_outside_are_dropped_only_where_they_would_move_on():
    logp = torch.tensor([0.1, 0.1, -0.1, -0.1, 0.0, 0.1], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0, 2.0, 1.0], dtype=torch.float64)
    outside = torch.tensor([True, True, True, True, True, False])
    loss, dropped = masked_surrogate(logp, torch.zeros(6, dtype=torch.float64), advantage, outside)
    loss.sum().backward()
    up, down = math.exp(0.1), math.exp(-0.1)
    expected = torch.tensor([0.0, up, 0.0, -down, -2.0, -up], dtype=torch.float64)
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(logp.grad, expected)  # d(-A r)/d log p = -A r
    assert dropped["dropped_positive"].tolist() == [True] + [False] * 5
    assert dropped["dropped_negative"].tolist() == [False, False, True, False, False, False]


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ContractError, match="is_outside_R"):
        masked_surrogate(torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(3, dtype=torch.bool))


def prefix_loop(divergence: list[float], threshold: float, budget: float, floor: float) -> list[bool]:
    """The published algorithm for one episode, step by step: whether each step is inside."""
    inside, weighted_sum, weight_sum = [], 0.0, 0.0
    for position, value in enumerate(divergence):
        weight = 1.0 if len(divergence) == 1 else 1 - (1 - floor) / (len(divergence) - 1) * position
        inside.append(weight * value <= min(threshold, threshold + budget * weight_sum - weighted_sum))
        weighted_sum += weight * value
        weight_sum += weight
    return inside


@pytest.mark.parametrize("lengths", [[5, 5, 5], [1, 3, 7]])
def test_the_budget_of_a_prefix_is_that_of_the_step_by_step_algorithm(lengths: list[int]):
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        episodes = [torch.rand(length, generator=generator, dtype=torch.float64) for length in lengths]
        sample = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)])
        step = torch.tensor([3 * t for length in lengths for t in range(length)])
        expected = [ok for episode in episodes for ok in prefix_loop(episode.tolist(), 0.7, 0.4, 0.6)]
        order = torch.randperm(len(sample), generator=generator)
        outside, over = prefix_budget(
            torch.cat(episodes)[order],
            sample[order],
            step[order],
            threshold=0.7,
            prefix_threshold=0.4,
            weight_floor=0.6,
        )
        assert (~outside).tolist() == [expected[i] for i in order.tolist()]
        assert bool((over <= outside).all())


# Flow-DPPO ------------------------------------------------------------------------------------------------------------


def test_a_threshold_of_infinity_is_the_surrogate_without_clip():
    made, micro = moved(FlowDPPO, threshold=math.inf)
    grpo, same = moved(DiffusionGRPO, clip_range=0.999)
    value, gradients, metrics = run(made, micro)
    expected, theirs, _ = run(grpo, same)
    assert value == expected and metrics["dppo/masked_fraction"] == 0
    close(gradients, theirs, rtol=0, atol=0)


def test_a_threshold_of_zero_keeps_corrective_moves_alone():
    made, micro = moved(FlowDPPO, threshold=0.0)
    _, _, log_ratio, _ = change(micro.track, present(made))
    advantage = micro.advantages.double()[:, None].expand_as(log_ratio)
    corrective = advantage * log_ratio < 0
    assert 0 < int(corrective.sum()) < 18
    value, _, metrics = run(made, micro)
    expected = torch.where(corrective, -advantage * log_ratio.exp(), 0.0).sum() / 18
    assert value == pytest.approx(float(expected), rel=1e-4)
    assert metrics["dppo/kl_mask_fraction"] == 1.0
    assert metrics["dppo/masked_fraction"] == pytest.approx(float((~corrective).double().mean()))
    both = metrics["dppo/masked_positive_fraction"] + metrics["dppo/masked_negative_fraction"]
    assert both == pytest.approx(metrics["dppo/masked_fraction"])


def test_dppo_has_the_gradient_of_float64_finite_differences():
    probe, micro = moved(FlowDPPO)
    kl = change(micro.track, present(probe))[1]
    threshold = float(kl.median()) * 1.01
    made, micro = moved(FlowDPPO, threshold=threshold)

    def value(theta: Tensor) -> Tensor:
        _, kl, log_ratio, _ = change(micro.track, theta)
        advantage = micro.advantages.double()[:, None]
        dropped = (kl >= threshold) & (advantage * log_ratio > 0)
        return torch.where(dropped, 0.0, -advantage * log_ratio.exp()).mean()

    assert 0 < run(made, micro)[2]["dppo/masked_fraction"] < 1
    torch.testing.assert_close(gradient_of(made, micro), differences(value, present(made)), rtol=1e-3, atol=1e-6)


def test_the_divergence_at_sigma_one_is_that_of_the_kernel():
    """q^2 |dt| at sigma = 1 is eta^2 / (1 - sigma_1) * (1 - sigma_1): the standard deviation is eta itself. A clamp of
    sigma to 0.99 in place of sigma_1 would make it 10 eta sqrt(|dt|)."""
    made = setup(FlowDPPO, model=AffineField())
    track = rollout(made.pipeline, sampling(sde_indices=[0])).tracks["image"]
    micro = anchored(made, track)
    displace(made.backend, 0.05)
    delta = flow_transitions(track, present(made), 0.7)["mean"] - flow_transitions(track, OLD, 0.7)["mean"]
    found = run(made, micro)[2]
    assert found["dppo/kl_mean"] == pytest.approx(float(delta.square().mean()) / (2 * 0.7**2), rel=1e-4)
    assert found["dppo/kl_max"] == pytest.approx(float(delta.square().mean(-1).max()) / (2 * 0.7**2), rel=1e-4)


@pytest.mark.parametrize("shape", [(3, 2, 4), (3, 5, 2, 4), (6, 7)], ids=["image", "video", "packed"])
def test_divergences_of_latents_of_any_rank_stay_in_their_rows(shape: tuple[int, ...]):
    generator = torch.Generator().manual_seed(2)
    mean, old = (torch.randn(3, *shape, generator=generator) for _ in range(2))
    std = torch.tensor([0.5, 1.0, 2.0])
    rows = TransitionRows(
        policy=Stats(torch.zeros(3), mean, std, None, -std),
        anchor_logp_R=torch.zeros(3),
        anchor_mean=old,
        advantage_R=torch.ones(3),
        delta_sigma_R=torch.ones(3),
        sample_R=torch.zeros(3, dtype=torch.long),
        step_R=torch.arange(3),
        progress=0.0,
    )
    expected = [float((mean[i] - old[i]).square().mean() / (2 * std[i] ** 2)) for i in range(3)]
    found = old_policy_kl(rows)
    assert found.shape == (3,) and found.tolist() == pytest.approx(expected, rel=1e-5)


def test_advantages_are_not_clipped_unless_asked():
    wide = torch.tensor([9.0, -9.0, 1.0, 2.0, -3.0, 0.5])
    track = rollout(setup(FlowDPPO).pipeline).tracks["image"]
    for clip, expected in ((None, wide), (5.0, wide.clamp(-5, 5))):
        made = setup(FlowDPPO, advantage_clip=clip)
        assert run(made, anchored(made, track, advantages=wide))[0] == pytest.approx(-float(expected.mean()), rel=1e-5)


def test_the_first_update_of_a_rollout_is_never_masked():
    made = setup(FlowDPPO, threshold=1e-12, micro=4, updates=2)
    metrics = made.stack.train(with_advantages(rollout(made.pipeline), some_advantages(6)), progress=0.0).updates
    assert metrics[0]["dppo/kl_max"] == 0 and metrics[0]["dppo/masked_fraction"] == 0
    assert metrics[1]["dppo/kl_max"] > 0


def test_a_step_without_noise_has_no_divergence():
    made = setup(FlowDPPO, strategy=CPSSDEStrategy())
    track = rollout(made.pipeline, sampling(sde_indices=[3])).tracks["image"]
    with pytest.raises(ConfigError, match="a transition without noise has no divergence to mask by"):
        run(made, anchored(made, track))


def test_flow_dppo_masks_a_kernel_that_preserves_coefficients():
    made, micro = moved(FlowDPPO, strategy=CPSSDEStrategy(), threshold=0.0)
    assert 0 < run(made, micro)[2]["dppo/masked_fraction"] < 1


# CPPO -----------------------------------------------------------------------------------------------------------------


def test_without_budget_and_weights_cppo_is_flow_dppo():
    probe, micro = moved(FlowDPPO)
    threshold = float(change(micro.track, present(probe))[1].median()) * 1.01
    dppo, micro = moved(FlowDPPO, threshold=threshold)
    options: dict[str, Any] = {"threshold": threshold, "prefix_threshold": math.inf, "weight_floor": 1.0}
    cppo, same = moved(CPPO, **options)
    value, gradients, metrics = run(cppo, same)
    expected, theirs, masked = run(dppo, micro)
    assert value == expected and 0 < metrics["dppo/masked_fraction"] == masked["dppo/masked_fraction"] < 1
    close(gradients, theirs, rtol=0, atol=0)


def test_cppo_masks_by_position_and_by_what_the_steps_before_moved():
    made, micro = moved(CPPO, threshold=1.0, prefix_threshold=0.0)
    kl = change(micro.track, present(made))[1].float()
    threshold = float(kl.mean())
    made, micro = moved(CPPO, threshold=threshold, prefix_threshold=threshold / 4, weight_floor=0.5)
    rows = rows_of(made, micro)
    metrics = RowMetrics()
    outside = made.algorithm.outside(old_policy_kl(rows), rows, metrics).view(6, 3)
    expected = [[not ok for ok in prefix_loop(own, threshold, threshold / 4, 0.5)] for own in kl.tolist()]
    assert outside.tolist() == expected and 0 < int(outside.sum()) < 18
    over, count = metrics.sums["cppo/over_budget_fraction"]
    assert 0 < float(over) <= int(outside.sum()) and count == 18


def test_cppo_needs_whole_trajectories_in_a_forward():
    for rows_per_forward in (2, 3, 6, None):
        made, micro = moved(CPPO, prefix_threshold=1e-3, threshold=1e-3, rows_per_forward=rows_per_forward)
        if rows_per_forward == 2:
            with pytest.raises(ConfigError, match="= 2 is not a multiple of the 3 trained steps of a sample"):
                run(made, micro)
        else:
            assert run(made, micro)[2]["dppo/masked_fraction"] > 0


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (GRPOGuard, {"clip_range": 0.0}, r"clip_range = 0.0 must lie in \(0, 1\)"),
        (GRPOGuard, {"old_logp_source": "rollout"}, "GRPOGuard compares transition means, which a rollout does not"),
        (FlowDPPO, {"old_logp_source": "rollout"}, "FlowDPPO compares transition means"),
        (FlowDPPO, {"threshold": -1.0}, "threshold = -1.0 must be at least 0"),
        (CPPO, {"prefix_threshold": -1.0}, "prefix_threshold = -1.0 must be at least 0"),
        (CPPO, {"prefix_threshold": 1.0, "weight_floor": 0.0}, r"weight_floor = 0.0 must lie in \(0, 1\]"),
    ],
)
def test_settings_that_cannot_work_are_refused(kind: Any, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        setup(kind, **options)
