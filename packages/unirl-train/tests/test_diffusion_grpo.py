"""DiffusionGRPO against float64 finite differences, closed forms and its own limiting cases."""

import math
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import (
    AffineField,
    FieldPipeline,
    Setup,
    StepField,
    displace,
    rollout,
    sampling,
    setup,
    some_advantages,
)
from torch import Tensor
from transition_cases import anchored, close, flow_transitions, micro_of, run, segment_of

from unirl.algorithms.base import sampled_with
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.kl import AdaptiveKL
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, SDEStrategy
from unirl.sde.windows import MixGRPOWindow
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutTrack

# An independent reference in float64 --------------------------------------------------------------------------------


def finite_differences(track: RolloutTrack, advantages: Tensor, theta: Tensor, eta: float, is_dance: bool) -> Tensor:
    """d/dtheta of -mean A log p over samples and steps, central differences in float64."""

    def value(at: Tensor) -> Tensor:
        return -(advantages.double()[:, None] * flow_transitions(track, at, eta, is_dance)["logp"]).mean()

    steps = 1e-5 * torch.eye(2, dtype=torch.float64)
    return torch.stack([(value(theta + step) - value(theta - step)) / 2e-5 for step in steps])


@pytest.mark.parametrize("kernel", ["flow", "dance"])
def test_the_gradient_is_the_score_function_gradient_of_float64_finite_differences(kernel: str):
    strategy = DanceSDEStrategy() if kernel == "dance" else None
    made = setup(DiffusionGRPO, model=AffineField(), strategy=strategy)
    track = rollout(made.pipeline).tracks["image"]
    advantages = some_advantages(6)
    theta = torch.tensor([0.7, 0.1], dtype=torch.float64)
    expected = finite_differences(track, advantages, theta, 0.7, kernel == "dance")
    _, gradients, _ = run(made, anchored(made, track, advantages=advantages))
    found = torch.cat([gradients["transformer.scale"], gradients["transformer.shift"]]).double()
    # The kernel computes in float32.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_batched_rows_give_what_a_loop_over_steps_gives():
    made = setup(DiffusionGRPO, clip_range=0.2)
    track = rollout(made.pipeline).tracks["image"]
    displace(made.backend, 0.02)
    segment = segment_of(track)
    assert segment.sde_logp is not None
    advantages = some_advantages(6)
    micro = micro_of(track, advantages, anchor={"logp": segment.sde_logp})
    value, gradients, _ = run(made, micro)
    made.backend.zero_grad()
    looped = 0.0
    for column, step in enumerate(segment.sde_indices):
        rows = torch.arange(6)
        assert segment.params is not None
        replayed = made.pipeline.replay(track.conditions, segment, rows, torch.full((6,), step), segment.params)
        ratio = (replayed.logp_R - segment.sde_logp[:, column]).exp()
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).sum() / 18
        loss.backward()
        looped += float(loss.detach())
    assert value == pytest.approx(looped, rel=1e-6)
    close(gradients, {n: p.grad for n, p in made.backend.parameters.items() if p.grad is not None}, atol=1e-7)


# Penalty ------------------------------------------------------------------------------------------------------------


def penalised(**options: Any) -> Setup:
    return setup(DiffusionGRPO, model=AffineField(), kl_coef=0.5, keep_reference=True, **options)


@pytest.mark.parametrize("estimator", ["exact", "flow_grpo"])
def test_the_penalty_equals_the_closed_form(estimator: str):
    made = penalised(kl_estimator=estimator)
    track = rollout(made.pipeline).tracks["image"]
    displace(made.backend, 0.3)
    theta = torch.tensor([float(v) for v in made.parameters.values()], dtype=torch.float64)
    new = flow_transitions(track, theta, 0.7)
    old = flow_transitions(track, torch.tensor([0.7, 0.1], dtype=torch.float64), 0.7)
    kl = 0.5 * (new["mean"] - old["mean"]).square().mean(-1) / new["std"].square()
    expected = kl if estimator == "exact" else kl * new["dt"]
    value, _, metrics = run(made, anchored(made, track, advantages=torch.zeros(6)))
    assert metrics["policy/reference_kl"] == pytest.approx(float(expected.mean()), rel=1e-4)
    assert value == pytest.approx(0.5 * float(expected.mean()), rel=1e-4)
    assert metrics["policy/loss"] == 0.0


@pytest.mark.parametrize("strategy", [None, DanceSDEStrategy(), CPSSDEStrategy()])
def test_the_velocity_estimator_is_the_distance_of_velocities_at_the_stored_latents(strategy: SDEStrategy | None):
    made = penalised(kl_estimator="velocity", strategy=strategy)
    track = rollout(made.pipeline).tracks["image"]
    displace(made.backend, 0.3)
    scale, shift = (float(value) for value in made.parameters.values())
    segment = segment_of(track)
    x = torch.stack([segment.latents_at(step) for step in segment.sde_indices], dim=1).double()
    moved = (scale - 0.7) * x + (shift - 0.1)
    _, _, metrics = run(made, anchored(made, track, advantages=torch.zeros(6)))
    assert metrics["policy/reference_kl"] == pytest.approx(float(moved.square().mean()), rel=1e-4)


def test_the_published_estimator_is_the_step_length_times_the_exact_one():
    for step in range(3):
        found = {}
        for estimator in ("exact", "flow_grpo"):
            made = penalised(kl_estimator=estimator)
            track = rollout(made.pipeline, sampling(sde_indices=[step])).tracks["image"]
            displace(made.backend, 0.3)
            found[estimator] = run(made, anchored(made, track))[2]["policy/reference_kl"]
        sigmas = made.pipeline.sigmas(sampling())
        assert found["flow_grpo"] == pytest.approx(float(sigmas[step] - sigmas[step + 1]) * found["exact"], rel=1e-5)


def test_the_penalty_and_its_gradient_are_zero_at_the_reference():
    made = penalised()
    track = rollout(made.pipeline).tracks["image"]
    _, gradients, metrics = run(made, anchored(made, track, advantages=torch.zeros(6)))
    assert metrics["policy/reference_kl"] == 0.0
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients.values())


def test_the_adaptive_coefficient_moves_towards_its_target_and_is_kept():
    for target, direction in ((1e6, -1), (1e-9, 1)):
        made = penalised(adaptive_kl=AdaptiveKL(target=target, horizon=60.0))
        track_resp = rollout(made.pipeline)
        displace(made.backend, 0.3)
        metrics = made.stack.train(with_advantages(track_resp, torch.zeros(6)), progress=0.0).metrics
        # Clipped to a fifth of a full correction: 0.2 * 6 samples / 60.
        assert made.algorithm.reference.coef == pytest.approx(0.5 * (1 + direction * 0.02))
        assert metrics["policy/kl_coef"] == made.algorithm.reference.coef
        again = penalised(adaptive_kl=AdaptiveKL(target=target, horizon=60.0))
        again.stack.load_state_dict(made.stack.state_dict())
        assert again.algorithm.reference.coef == made.algorithm.reference.coef


def test_a_kernel_without_diffusion_coefficient_has_no_published_estimator():
    made = penalised(kl_estimator="flow_grpo", strategy=CPSSDEStrategy())
    track = rollout(made.pipeline).tracks["image"]
    with pytest.raises(ConfigError, match="use kl_estimator: exact"):
        run(made, anchored(made, track))


def test_a_transition_without_noise_has_no_kl():
    made = penalised(strategy=CPSSDEStrategy())
    last = sampling().num_inference_steps - 1
    track = rollout(made.pipeline, sampling(sde_indices=[last])).tracks["image"]
    with pytest.raises(ConfigError, match="a transition without noise has no KL"):
        run(made, anchored(made, track))


# Anchor -------------------------------------------------------------------------------------------------------------


def test_rollout_and_replay_anchors_agree():
    replayed, trusted = setup(DiffusionGRPO), setup(DiffusionGRPO, old_logp_source="rollout")
    assert replayed.algorithm.uses_anchor and not trusted.algorithm.uses_anchor
    track = rollout(replayed.pipeline).tracks["image"]
    anchor = replayed.algorithm.anchor(micro_of(track))
    torch.testing.assert_close(anchor["logp"], segment_of(track).sde_logp, rtol=0, atol=1e-6)
    one, gradients, _ = run(replayed, micro_of(track, anchor=anchor))
    other, others, metrics = run(trusted, micro_of(track))
    assert one == pytest.approx(other, abs=1e-6)
    close(gradients, others, rtol=1e-4)
    assert metrics["policy/ratio_max_abs_dev"] < 1e-5


def test_a_rollout_without_log_probs_cannot_be_the_anchor():
    made = setup(DiffusionGRPO, old_logp_source="rollout")
    track = rollout(made.pipeline).tracks["image"]
    bare = track.replace(segment=segment_of(track).replace(sde_logp=None))
    with pytest.raises(ContractError, match="returned no log-probs. Use old_logp_source: replay"):
        run(made, micro_of(bare))
    _, _, metrics = run(setup(DiffusionGRPO), micro_of(bare))
    assert not any(name.startswith("mismatch/") for name in metrics)


def test_the_gap_between_rollout_and_replay_is_reported_by_step():
    made = setup(DiffusionGRPO, micro=4)
    resp = rollout(made.pipeline, sampling(sde_indices=[0, 2]))
    track = resp.tracks["image"]
    logp = segment_of(track).sde_logp
    assert logp is not None
    told = logp + torch.tensor([0.25, -0.5])
    resp.tracks["image"] = track.replace(segment=segment_of(track).replace(sde_logp=told))
    metrics = made.stack.train(with_advantages(resp, some_advantages(6)), progress=0.0).metrics
    assert metrics["mismatch/logp_absdiff/ts_0"] == pytest.approx(0.25, abs=1e-5)
    assert metrics["mismatch/logp_absdiff/ts_2"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["mismatch/logp_absdiff/mean"] == pytest.approx(0.375, abs=1e-5)
    assert metrics["mismatch/logp_absdiff/max"] == pytest.approx(0.5, abs=1e-5)
    assert "mismatch/logp_absdiff/ts_1" not in metrics


def test_a_track_without_stochastic_steps_is_refused():
    made = setup(DiffusionGRPO)
    resp = rollout(made.pipeline, sampling(eta=0.0))
    with pytest.raises(ContractError, match="set sampling.eta > 0 and sampling.scheduler"):
        made.stack.train(with_advantages(resp, some_advantages(6)), progress=0.0)


# Clips --------------------------------------------------------------------------------------------------------------


def test_advantages_are_clipped_before_they_multiply_the_ratio():
    wide = torch.tensor([9.0, -9.0, 1.0, 2.0, -3.0, 0.5])
    made = setup(DiffusionGRPO, advantage_clip=2.0)
    track = rollout(made.pipeline).tracks["image"]
    _, gradients, _ = run(made, anchored(made, track, advantages=wide))
    _, clamped, _ = run(made, anchored(made, track, advantages=wide.clamp(-2, 2)))
    close(gradients, clamped, rtol=0, atol=0)
    free = setup(DiffusionGRPO, advantage_clip=None)
    value, _, _ = run(free, anchored(free, track, advantages=wide))
    assert value == pytest.approx(-float(wide.mean()), rel=1e-6)


def test_the_upper_half_width_is_its_own():
    track = rollout(setup(DiffusionGRPO).pipeline).tracks["image"]
    good = torch.ones(6)
    for high, fraction in ((None, 1.0), (0.2, 0.0)):
        made = setup(DiffusionGRPO, clip_range=0.1, clip_range_high=high)
        _, gradients, metrics = run(made, anchored(made, track, math.log(1.15), advantages=good))
        assert metrics["policy/ratio_mean"] == pytest.approx(1.15, rel=1e-5)
        assert metrics["policy/clipfrac_high"] == fraction and metrics["policy/clipfrac_low"] == 0
        assert all(bool((gradient == 0).all()) == bool(fraction) for gradient in gradients.values())
    _, _, metrics = run(made, anchored(made, track, math.log(0.85), advantages=good))
    assert metrics["policy/clipfrac_low"] == 1.0
    assert metrics["policy/approx_kl"] == pytest.approx(0.5 * math.log(0.85) ** 2, rel=1e-4)


@pytest.mark.parametrize(("schedule", "clips"), [("constant", 0.0), ("linear_decay", 1.0), ("cosine_decay", 1.0)])
def test_clips_narrow_as_the_schedule_says(schedule: str, clips: float):
    made = setup(DiffusionGRPO, clip_range=0.2, clip_schedule=schedule)
    track = rollout(made.pipeline).tracks["image"]
    for progress, expected in ((0.0, 0.0), (1.0, clips)):
        _, _, metrics = run(made, anchored(made, track, math.log(1.15), progress=progress))
        assert metrics["policy/clipfrac_high"] == expected


# Mistakes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"old_logp_source": "native"}, "old_logp_source = 'native' must be one of auto, rollout, replay"),
        ({"kl_estimator": "k4"}, "kl_estimator = 'k4' must be one of exact, flow_grpo, velocity, k1, k2, k3"),
        ({"clip_schedule": "step"}, "clip_schedule = 'step' must be one of constant, linear_decay, cosine_decay"),
        ({"clip_range": 0.0}, r"clip_range = 0.0 must lie in \(0, 1\)"),
        ({"clip_range_high": 1.5}, r"clip_range_high = 1.5 must lie in \(0, 1\)"),
        ({"kl_coef": -0.1}, "kl_coef = -0.1 must be at least 0"),
        ({"adaptive_kl": AdaptiveKL(1.0, 1.0)}, "adaptive_kl needs a starting algorithm.kl_coef above 0"),
        ({"advantage_clip": 0.0}, "advantage_clip = 0.0 must be above 0"),
        ({"rows_per_forward": 0}, "rows_per_forward = 0 must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        setup(DiffusionGRPO, **options)


def test_sampling_that_differs_between_rollout_and_replay_is_named():
    params = sampling()
    segment = segment_of(rollout(FieldPipeline(AffineField()), params).tracks["image"])
    assert sampled_with(segment.params, None) is params
    assert sampled_with(segment.params, sampling(sde_indices=None, scheduler=None)) is params
    with pytest.raises(ContractError) as caught:
        sampled_with(segment.params, sampling(guidance_scale=4.5, negative_prompt="", eta=0.3))
    message = str(caught.value)
    assert "guidance_scale: rollout 1.0, replay 4.5" in message and "eta: rollout 0.7, replay 0.3" in message
    assert "sde_indices" not in message
    with pytest.raises(ContractError, match="must set its params"):
        sampled_with(None, params)
    made = setup(DiffusionGRPO, model=AffineField(), params=sampling(seed=1))
    with pytest.raises(ContractError, match="seed: rollout 42, replay 1"):
        made.stack.train(with_advantages(rollout(made.pipeline, params), some_advantages(6)), progress=0.0)


# Recipes of the same class ------------------------------------------------------------------------------------------


def test_only_steps_of_the_window_get_gradients():
    window = MixGRPOWindow(num_steps=4, window_size=2, iters_per_window=1)
    for rollout_id, trained in ((0, [0, 1]), (1, [1, 2])):
        made = setup(DiffusionGRPO, model=StepField(4))
        params = sampling(scheduler=window, sde_indices=None).resolved(rollout_id)
        made.stack.train(with_advantages(rollout(made.pipeline, params), some_advantages(6)), progress=0.0)
        gradient = made.backend.gradients[0]["transformer.shift"]
        assert gradient.nonzero().flatten().tolist() == trained


def test_a_window_over_all_steps_is_flow_grpo():
    found = []
    for scheduler in (None, MixGRPOWindow(num_steps=4, window_size=4, stride=0)):
        made = setup(DiffusionGRPO)
        params = sampling(scheduler=scheduler, sde_indices=None).resolved(3)
        made.stack.train(with_advantages(rollout(made.pipeline, params), some_advantages(6)), progress=0.0)
        found.append(made.backend.gradients[0])
    close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("strategy", [DanceSDEStrategy(), CPSSDEStrategy()])
def test_other_kernels_train_unchanged(strategy: SDEStrategy):
    made = setup(DiffusionGRPO, strategy=strategy, micro=4, updates=2)
    metrics = made.stack.train(with_advantages(rollout(made.pipeline), some_advantages(6)), progress=0.0).metrics
    assert metrics["policy/first_ratio_max_abs_dev"] == 0.0
    assert metrics["mismatch/logp_absdiff/max"] < 1e-5
    assert all(float(g.abs().max()) > 0 for step in made.backend.gradients for g in step.values())
