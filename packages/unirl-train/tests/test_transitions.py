"""What all policy gradients on transitions share: the log-ratio's law, drawn steps, windows, credit, estimators."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from diffusion_fakes import AffineField, FieldPipeline, StepField, displace, rollout, sampling, setup, some_advantages
from torch import Tensor
from transition_cases import anchored, close, micro_of, run, segment_of

from unirl.algorithms.credit import FixedCredit, NoiseCredit
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.reference import sampled_kl
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, FlowSDEStrategy, SDEStrategy
from unirl.sde.likelihood import transition_kl
from unirl.sde.schedule import SigmaSchedule
from unirl.sde.windows import AllSteps, MixGRPOWindow
from unirl.types.errors import ConfigError

NUM_ELEMENTS = 12


def replayed(made: Any, track: Any, sample_R: Tensor, step_R: Tensor) -> Any:
    return made.pipeline.replay(track.conditions, segment_of(track), sample_R, step_R, segment_of(track).params)


# The law of the log-ratio ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kernel", [FlowSDEStrategy, DanceSDEStrategy])
def test_the_log_ratio_has_mean_minus_k_and_variance_two_k_over_n(kernel: type[SDEStrategy], reduction: Any):
    """Summed over N elements the mean is -N K and the variance 2 N K. Tolerances are four standard errors."""
    made = setup(DiffusionGRPO, model=AffineField(), strategy=kernel(reduction))
    track = rollout(made.pipeline, sampling(samples_per_prompt=1000)).tracks["image"]
    sample_R, step_R = made.algorithm.rows(micro_of(track))
    with torch.no_grad():
        old = replayed(made, track, sample_R, step_R)
        displace(made.backend, 0.1)
        new = replayed(made, track, sample_R, step_R)
    kl = transition_kl(new.mean, old.mean, old.std_R).double()
    log_ratio = (new.logp_R - old.logp_R).double() / (NUM_ELEMENTS if reduction == "sum" else 1)
    standard = (log_ratio + kl) / (2 * kl / NUM_ELEMENTS).sqrt()
    count = len(standard)
    assert count == 6000 and float(kl.mean()) > 1e-3
    assert abs(float(standard.mean())) < 4 / math.sqrt(count)
    assert abs(float(standard.var()) - 1) < 4 * math.sqrt(2 / count)


def test_estimators_of_the_reference_kl_by_hand():
    logp, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.8])
    difference = [-0.5, 0.2]
    assert sampled_kl(logp, reference, "k1").tolist() == pytest.approx([0.5, -0.2])
    assert sampled_kl(logp, reference, "k2").tolist() == pytest.approx([0.125, 0.02])
    expected = [math.exp(d) - d - 1 for d in difference]
    assert sampled_kl(logp, reference, "k3").tolist() == pytest.approx(expected, rel=1e-5)


def test_the_third_estimator_resolves_the_small_log_ratios_of_means():
    small = torch.tensor([1e-4, -3e-4])
    found = sampled_kl(torch.zeros(2), small, "k3")
    assert found.tolist() == pytest.approx([0.5e-8, 4.5e-8], rel=5e-3)  # d^2 / 2, d^3 / 6 away from it


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_of_the_reference_kl_agree_with_it_on_average(estimator: str):
    """Under kernels that sum, for actions of the policy itself; k2 is biased by a part of the order of the KL."""
    made = setup(DiffusionGRPO, model=AffineField(), strategy=FlowSDEStrategy("sum"))
    track = rollout(made.pipeline, sampling(samples_per_prompt=1000)).tracks["image"]
    sample_R, step_R = made.algorithm.rows(micro_of(track))
    with torch.no_grad():
        policy = replayed(made, track, sample_R, step_R)
        displace(made.backend, 0.1)
        reference = replayed(made, track, sample_R, step_R)
    exact = float(NUM_ELEMENTS * transition_kl(policy.mean, reference.mean, policy.std_R).double().mean())
    found = sampled_kl(policy.logp_R, reference.logp_R, estimator).double()
    error = 4 * float(found.std()) / math.sqrt(len(found))
    allowed = error + (0.1 * exact if estimator == "k2" else 0.0)
    assert exact > 0.02 and abs(float(found.mean()) - exact) < allowed
    assert bool((found >= 0).all()) == (estimator != "k1")


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_sampled_penalty_is_added_with_its_coefficient(estimator: str):
    options: dict[str, Any] = {"kl_coef": 0.5, "keep_reference": True, "kl_estimator": estimator}
    made = setup(DiffusionGRPO, model=AffineField(), **options)
    track = rollout(made.pipeline).tracks["image"]
    micro = anchored(made, track, advantages=torch.zeros(6))
    displace(made.backend, 0.2)
    sample_R, step_R = made.algorithm.rows(micro)
    logp = replayed(made, track, sample_R, step_R).logp_R.detach()
    expected = float(sampled_kl(logp, micro.anchor["logp"].flatten(), estimator).mean())
    value, _, metrics = run(made, micro)
    assert metrics["policy/reference_kl"] == pytest.approx(expected, rel=1e-4)
    assert value == pytest.approx(0.5 * expected, rel=1e-4)


# Drawn steps and windows ----------------------------------------------------------------------------------------------


def drawn(made: Any, track: Any) -> list[list[int]]:
    """Trained steps of every sample."""
    sample_R, step_R = made.algorithm.rows(micro_of(track))
    assert sample_R.device.type == step_R.device.type == "cpu" and step_R.dtype == torch.int64
    per_sample = step_R.view(track.batch_size, -1).tolist()
    assert sample_R.view(track.batch_size, -1)[:, 0].tolist() == list(range(track.batch_size))
    return per_sample


def test_every_sample_draws_its_own_steps_and_the_same_number():
    made = setup(DiffusionGRPO, step_fraction=0.6)
    params = sampling(num_inference_steps=10, sde_indices=list(range(9)), samples_per_prompt=60)
    track = rollout(made.pipeline, params).tracks["image"]
    chosen = drawn(made, track)
    assert all(len(steps) == 5 == len(set(steps)) and steps == sorted(steps) for steps in chosen)  # int(0.6 * 9)
    assert made.algorithm.num_terms(track) == 120 * 5
    assert len({tuple(steps) for steps in chosen}) > 50
    counts = torch.bincount(torch.tensor(chosen).flatten(), minlength=10).tolist()
    # Each of nine steps is in 5 / 9 of 120 samples: 66.7, standard deviation 5.4.
    assert counts[9] == 0 and all(abs(count - 66.7) < 4 * 5.4 for count in counts[:9])


def test_a_draw_depends_on_sample_rollout_and_seed_alone():
    made, other = setup(DiffusionGRPO, step_fraction=0.5), setup(DiffusionGRPO, step_fraction=0.5, seed=1)
    params = sampling(num_inference_steps=10, sde_indices=list(range(9)))
    track = rollout(made.pipeline, params).tracks["image"]
    chosen = drawn(made, track)
    assert drawn(made, track) == chosen
    assert drawn(made, track.select([4, 1])) == [chosen[4], chosen[1]]
    assert drawn(other, track) != chosen
    made.algorithm.after_rollout()
    assert drawn(made, track) != chosen
    other = setup(DiffusionGRPO, step_fraction=0.5)
    other.algorithm.load_state_dict(made.algorithm.state_dict())
    assert drawn(other, track) == drawn(made, track)


def test_only_drawn_steps_get_gradients():
    made = setup(DiffusionGRPO, model=StepField(4), step_fraction=0.34, seed=2)
    track = rollout(made.pipeline, sampling(samples_per_prompt=1), num_prompts=1).tracks["image"]
    [steps] = drawn(made, track)
    assert len(steps) == 1
    gradient = run(made, anchored(made, track, advantages=torch.ones(1)))[1]["transformer.shift"]
    assert gradient.nonzero().flatten().tolist() == steps


@pytest.mark.parametrize("step_fraction", [0.0, 1.5])
def test_a_share_of_no_steps_is_refused(step_fraction: float):
    with pytest.raises(ConfigError, match=r"step_fraction = .* must lie in \(0, 1\]"):
        setup(DiffusionGRPO, step_fraction=step_fraction)


def test_a_branching_group_shares_everything_before_its_window():
    """Flow-GRPO-Fast: one start and deterministic steps up to a random place, own noise there."""
    window = MixGRPOWindow(num_steps=6, window_size=2, strategy="random", iters_per_window=1, max_step=5, seed=3)
    places = {tuple(window.indices(rollout_id)) for rollout_id in range(30)}
    assert places == {(0, 1), (1, 2), (2, 3), (3, 4)}
    rollout_id = next(i for i in range(30) if window.start(i) == 2)
    params = sampling(num_inference_steps=6, sde_indices=None, scheduler=window, init_same_noise=True)
    resolved = params.resolved(rollout_id)
    track = rollout(FieldPipeline(AffineField()), resolved, rollout_id=rollout_id).tracks["image"]
    segment = segment_of(track)
    before, after = segment.latents_at(2), segment.latents_at(3)
    assert torch.equal(before[0], before[1]) and not torch.equal(before[0], before[3])
    assert not torch.equal(after[0], after[1])


def test_the_last_euler_step_ends_at_the_prediction_of_the_clean_latent():
    """DanceGRPO rewards x0-hat of the last step: x - sigma v is what Euler makes of a step to sigma 0."""
    made = setup(DiffusionGRPO, model=AffineField(), strategy=DanceSDEStrategy())
    scheduler = AllSteps(num_steps=4, exclude_last=True)
    params = sampling(scheduler=scheduler, sde_indices=None, keep_latents="all").resolved(0)
    segment = segment_of(rollout(made.pipeline, params).tracks["image"])
    assert segment.sde_indices == [0, 1, 2]
    x, sigma = segment.latents_at(3), float(segment.sigmas[3])
    prediction = x - sigma * (0.7 * x + 0.1)
    torch.testing.assert_close(segment.clean_latents, prediction, rtol=0, atol=1e-6)


# Credit ---------------------------------------------------------------------------------------------------------------


def test_noise_credit_is_the_deviation_of_the_kernel_with_mean_one():
    """The Flow kernel by hand: eta sqrt(sigma / (1 - sigma)) sqrt(sigma - sigma'), below the line sigmas[1] for 1."""
    pipeline = FieldPipeline(AffineField())
    segment = segment_of(rollout(pipeline, sampling(sde_indices=[0, 2, 3])).tracks["image"])
    sigmas = segment.sigmas.tolist()
    below = [sigmas[1], sigmas[2], sigmas[3]]
    raw = [math.sqrt(sigmas[i] / (1 - b) * (sigmas[i] - sigmas[i + 1])) for i, b in zip((0, 2, 3), below, strict=True)]
    found = NoiseCredit().weights(segment, pipeline)
    assert found.shape == (4,) and float(found[1]) == 0
    assert found[[0, 2, 3]].tolist() == pytest.approx([3 * value / sum(raw) for value in raw], rel=1e-5)


def test_noise_credit_falls_towards_late_steps_of_the_flow_kernel():
    """On the shapes world's schedule, where the lengths of the steps grow: they would weigh the wrong way."""
    pipeline = FieldPipeline(AffineField(), FlowSDEStrategy())
    segment = segment_of(rollout(pipeline, sampling(sde_indices=None, num_inference_steps=6)).tracks["image"])
    segment = dataclasses.replace(segment, sigmas=SigmaSchedule(shift=3.0).sigmas(6))
    found = NoiseCredit().weights(segment, pipeline)
    assert found.tolist() == pytest.approx([1.30, 1.42, 1.04, 0.87, 0.75, 0.62], abs=0.005)


def test_noise_credit_without_noise_is_refused():
    pipeline = FieldPipeline(AffineField(), CPSSDEStrategy())
    segment = segment_of(rollout(pipeline, sampling(sde_indices=[3], eta=0.5)).tracks["image"])
    with pytest.raises(ConfigError, match=r"stochastic steps \[3\] of the cps kernel have none"):
        NoiseCredit().weights(segment, pipeline)


def test_fixed_credit_is_scaled_to_mean_one_over_the_stochastic_steps():
    pipeline = FieldPipeline(AffineField())
    segment = segment_of(rollout(pipeline, sampling(sde_indices=[0, 2])).tracks["image"])
    assert FixedCredit([3.0, 50.0, 1.0, 0.0]).weights(segment, pipeline)[[0, 2]].tolist() == [1.5, 0.5]
    with pytest.raises(ConfigError, match="3 weights for 4 steps"):
        FixedCredit([1.0, 1.0, 1.0]).weights(segment, pipeline)
    with pytest.raises(ConfigError, match=r"no weight to the stochastic steps \[0, 2\]"):
        FixedCredit([0.0, 1.0, 0.0, 1.0]).weights(segment, pipeline)
    with pytest.raises(ConfigError, match="must be at least 0 and not all 0"):
        FixedCredit([1.0, -1.0])


def test_credit_multiplies_the_advantage_of_each_step():
    made = setup(DiffusionGRPO, model=StepField(4), credit=FixedCredit([1.0, 2.0, 0.0, 7.0]))
    plain = setup(DiffusionGRPO, model=StepField(4))
    track = rollout(plain.pipeline).tracks["image"]
    expected = run(plain, anchored(plain, track))[1]["transformer.shift"] * torch.tensor([1.0, 2.0, 0.0, 7.0])
    found = run(made, anchored(made, track))[1]
    close(found, {"transformer.shift": expected})
    assert float(found["transformer.shift"].abs().max()) > 0


def test_credit_follows_the_steps_that_a_sample_draws():
    made = setup(DiffusionGRPO, step_fraction=0.67, credit=FixedCredit([1.0, 2.0, 3.0, 0.0]), advantage_clip=None)
    micro = anchored(made, rollout(made.pipeline).tracks["image"], advantages=some_advantages(6))
    sample_R, step_R = made.algorithm.rows(micro)
    assert len(step_R) == 12
    expected = -(micro.advantages[sample_R] * torch.tensor([0.5, 1.0, 1.5])[step_R]).mean()
    assert run(made, micro)[0] == pytest.approx(float(expected), rel=1e-5)
