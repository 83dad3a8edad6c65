"""Decoupled PPO: the clip is around pi_prox, and the weight pi_prox / pi_b stands outside of it.

L = - mean of w min(r A, clip(r) A),  w = pi_prox / pi_b without gradient,  r = pi / pi_prox,
with pi_prox replayed, or put between pi_b and pi by versions.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import displace
from diffusion_fakes import rollout as latents_rollout
from diffusion_fakes import setup as diffusion_setup
from token_fakes import Setup, TinyLM, advantages_of, response, setup
from token_reference import TrainedTokens, along, derivative, in_float64
from torch import Tensor
from transition_cases import close, micro_of, run, segment_of

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.ar_ppo import ARPPO
from unirl.algorithms.base import MicroBatch
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.flow_dppo import FlowDPPO
from unirl.algorithms.old_logp import log_linear_logp, proximal_share
from unirl.algorithms.rollout_correction import RolloutCorrection
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutResp

NUM_SAMPLES = 12
CLIP = 0.05
UNBOUNDED = RolloutCorrection(mode="mask", lower=0.0, upper=None)
"""w as it is."""


def decoupled(source: str, **options: Any) -> Setup:
    """A model some updates away from the one that sampled, about to train on its samples in two updates."""
    given: dict[str, Any] = {"rollout_correction": UNBOUNDED, "clip_range": CLIP, "lr": 3e-2, "displaced": 0.1}
    made = setup(ARGRPO, old_logp_source=source, updates=2, **{**given, **options})
    made.backend.progress.policy_version = 5
    return made


def sampled_at(versions: list[int]) -> RolloutResp:
    resp = response()
    resp.tracks["text"] = resp.tracks["text"].replace(policy_versions=torch.tensor(versions))
    return resp


def second_update(made: Setup, resp: RolloutResp) -> tuple[TinyLM, TinyLM, dict[str, float]]:
    """Train; the models before the first and the second update, in float64, and what the second measured."""
    models = [in_float64(made.pipeline.model)]
    step = made.backend.optimizer_step

    def kept(max_grad_norm: float) -> Any:
        stats = step(max_grad_norm)
        models.append(in_float64(made.pipeline.model))
        return stats

    made.backend.optimizer_step = kept
    result = made.stack.train(with_advantages(resp, advantages_of(NUM_SAMPLES)), progress=0.0)
    return models[0], models[1], result.updates[1]


def samples_of_update(resp: RolloutResp, update: int) -> tuple[TrainedTokens, Tensor, Tensor]:
    """Its tokens, their advantages [M] and versions [M]: mini-batches take every second sample."""
    rows = list(range(update, NUM_SAMPLES, 2))
    tokens = TrainedTokens.of(resp.select(rows))
    versions = resp.tracks["text"].policy_versions
    assert versions is not None
    return tokens, advantages_of(NUM_SAMPLES)[rows].double()[tokens.sample_M], versions[rows][tokens.sample_M]


def objective(logp: Tensor, prox: Tensor, behave: Tensor, advantage: Tensor) -> Tensor:
    """The paper's, token by token; prox has no gradient."""
    ratio = (logp - prox).exp()
    clipped = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -((prox - behave).exp() * clipped).mean()


def test_a_replay_and_a_correction_without_bounds_are_decoupled_ppo():
    made, resp = decoupled("replay"), sampled_at([0] * NUM_SAMPLES)
    before, present, metrics = second_update(made, resp)
    tokens, advantage, _ = samples_of_update(resp, 1)
    prox, behave = tokens.logp(before).detach(), tokens.engine_logp_M
    value, expected, direction = derivative(lambda m: objective(tokens.logp(m), prox, behave, advantage), present)
    assert metrics["policy/loss"] == pytest.approx(value, rel=1e-4)
    assert along(made.backend.gradients[1], direction) == pytest.approx(expected, rel=1e-3)
    # The clip binds, the weights are wide, and PPO around pi_b is something else.
    assert metrics["policy/clipfrac_high"] > 0 and metrics["policy/clipfrac_low"] > 0
    weight = (prox - behave).exp()
    assert float(weight.max() / weight.min()) > 2
    coupled, *_ = derivative(lambda m: objective(tokens.logp(m), behave, behave, advantage), present)
    assert abs(coupled - value) > 0.01 * abs(value)


# Log-linear ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "before", "present", "share"),
    [
        (3, 5, 6, 2 / 3),  # two updates of three
        (5, 5, 6, 0.0),  # sampled by pi_prox itself
        (0, 5, 7, 5 / 7),
        (3, 5, 5, 1.0),  # nothing trained since: pi is pi_prox
        (5, 5, 5, 1.0),
        (9, 5, 6, 0.0),  # of a later policy, which no run has
    ],
)
def test_the_share_by_hand(version: int, before: int, present: int, share: float):
    found = proximal_share(torch.tensor([version]), before=before, present=present)
    assert found.tolist() == [pytest.approx(share)]


def test_the_share_is_areals_where_pi_prox_is_one_version_behind():
    """Their alpha: (v - 1 - v_b) / (v - v_b) where v > v_b, clamped to [0, 1]."""
    versions = torch.arange(8)
    expected = [max(0.0, (7 - v) / (8 - v)) for v in range(8)]
    assert proximal_share(versions, before=7, present=8).tolist() == pytest.approx(expected)


def test_the_line_is_exact_at_its_ends_and_has_no_gradient():
    generator = torch.Generator().manual_seed(0)
    logp = torch.randn(1000, generator=generator, requires_grad=True)
    behave = torch.randn(1000, generator=generator)
    assert torch.equal(log_linear_logp(logp, behave, torch.ones(1000)), logp)
    assert torch.equal(log_linear_logp(logp, behave, torch.zeros(1000)), behave)
    half = log_linear_logp(logp, behave, torch.full((1000,), 0.25))
    assert not half.requires_grad
    torch.testing.assert_close(half, behave + 0.25 * (logp.detach() - behave))


@pytest.mark.parametrize("micro", [100, 3])
def test_log_linear_is_decoupled_ppo_between_versions(micro: int):
    versions = [5, 4, 3, 0, 5, 1, 2, 2, 0, 4, 3, 3]
    made, resp = decoupled("log-linear", micro=micro), sampled_at(versions)
    _, present, metrics = second_update(made, resp)
    tokens, advantage, sampled = samples_of_update(resp, 1)
    behave = tokens.engine_logp_M
    share = (5 - sampled).double() / (6 - sampled)  # the rollout began at version 5; one update has been made
    prox = (behave + share * (tokens.logp(present) - behave)).detach()
    value, expected, direction = derivative(lambda m: objective(tokens.logp(m), prox, behave, advantage), present)
    assert metrics["policy/loss"] == pytest.approx(value, rel=1e-4)
    assert along(made.backend.gradients[1], direction) == pytest.approx(expected, rel=1e-3)
    assert metrics["policy/clipfrac_high"] > 0
    assert metrics["mismatch/staleness/max"] == 5.0


def test_it_costs_no_forward_and_its_first_update_is_that_of_a_replay():
    replayed, approximated = decoupled("replay"), decoupled("log-linear")
    for made in (replayed, approximated):
        result = made.stack.train(
            with_advantages(sampled_at([0] * NUM_SAMPLES), advantages_of(NUM_SAMPLES)), progress=0.0
        )
        assert result.updates[0]["policy/ratio_max_abs_dev"] == 0.0
    assert (replayed.pipeline.num_replays, approximated.pipeline.num_replays) == (3, 2)
    for name, gradient in replayed.backend.gradients[0].items():
        assert torch.equal(approximated.backend.gradients[0][name], gradient)


def test_along_a_run_the_line_is_nearer_to_pi_prox_than_either_end():
    made, resp = setup(ARGRPO, lr=1e-3), response()
    models = [in_float64(made.pipeline.model)]
    for _ in range(6):
        made.stack.train(with_advantages(resp, advantages_of(NUM_SAMPLES)), progress=0.0)
        models.append(in_float64(made.pipeline.model))
    tokens = TrainedTokens.of(resp)
    behave, prox, present = (tokens.logp(models[version]).detach() for version in (0, 4, 6))
    share = proximal_share(torch.zeros(len(behave), dtype=torch.long), before=4, present=6)
    error = (log_linear_logp(present, behave, share) - prox).abs().mean()
    assert error < 0.1 * min((behave - prox).abs().mean(), (present - prox).abs().mean())


def test_after_a_skipped_step_pi_is_still_pi_prox():
    made = decoupled("log-linear")
    track = sampled_at([2] * NUM_SAMPLES).tracks["text"].replace(advantages=advantages_of(NUM_SAMPLES))
    [part] = made.algorithm.losses(MicroBatch(track, {}, 1, 0.0, policy_version=5))
    assert float(part.metrics.maxima["policy/ratio_max_abs_dev"]) == 0.0


@pytest.mark.parametrize(("chunk", "cut"), [(None, 0), (3, 0), (None, 1), (3, 2)])
def test_denoising_steps_are_put_on_the_same_line(chunk: int | None, cut: int):
    """cut: steps that weights took which are two versions older than those of the others."""
    options: dict[str, Any] = {"rollout_correction": UNBOUNDED, "clip_range": 1e-3, "rows_per_forward": chunk}
    made = diffusion_setup(DiffusionGRPO, old_logp_source="log-linear", **options)
    track = latents_rollout(made.pipeline).tracks["image"]
    versions = torch.tensor([5, 4, 3, 0, 2, 1])
    displace(made.backend, 0.05)
    segment = segment_of(track)
    older = 2 * (torch.arange(segment.num_steps) < cut).long()
    if cut:
        segment = track.segment = segment.replace(versions=versions[:, None] - older)
    assert segment.sde_logp is not None and segment.params is not None
    made.backend.progress.policy_version = 7
    micro = replace(micro_of(track.replace(policy_versions=versions)), update=2, policy_version=5)
    value, gradients, metrics = run(made, micro)

    loss = torch.zeros((), dtype=torch.float64)
    for sample, step in itertools.product(range(6), (0, 1, 2)):
        one = torch.tensor([sample]), torch.tensor([step])
        logp = made.pipeline.replay(track.conditions, segment, *one, segment.params).logp_R[0].double()
        behave = segment.sde_logp[sample, step].double()
        version = int(versions[sample] - older[step])
        share = (5 - version) / (7 - version)
        prox = (behave + share * (logp - behave)).detach()
        ratio, advantage = (logp - prox).exp(), micro.advantages[sample].double()
        clipped = torch.minimum(ratio * advantage, ratio.clamp(1 - 1e-3, 1 + 1e-3) * advantage)
        loss = loss - (prox - behave).exp() * clipped / 18
    parameters = made.backend.parameters
    assert value == pytest.approx(float(loss.detach()), rel=1e-4)
    grads = torch.autograd.grad(loss, list(parameters.values()))
    close(gradients, dict(zip(parameters, grads, strict=True)), rtol=1e-3, atol=1e-5)
    assert metrics["policy/clipfrac_high"] > 0
    assert not made.algorithm.uses_anchor


# Refused ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_put_on_a_line_is_refused():
    with pytest.raises(ConfigError, match="FlowDPPO compares transition means"):
        diffusion_setup(FlowDPPO, old_logp_source="log-linear")
    with pytest.raises(ConfigError, match="ARPPO needs a replay before the first update"):
        setup(ARPPO, critic_seed=1, old_logp_source="log-linear")
    with pytest.raises(ConfigError, match="m2_threshold needs a replay before the first update"):
        setup(ARGRPO, old_logp_source="log-linear", rollout_correction=RolloutCorrection(m2_threshold=0.04))


def test_samples_without_version_or_log_probs_are_named():
    made = decoupled("log-linear")
    track = response().tracks["text"].replace(advantages=advantages_of(NUM_SAMPLES))
    with pytest.raises(ConfigError, match="log-linear needs the version of the policy on every sample"):
        list(made.algorithm.losses(MicroBatch(track.replace(policy_versions=None), {}, 0, 0.0)))
    latents = diffusion_setup(DiffusionGRPO, old_logp_source="log-linear")
    image = latents_rollout(latents.pipeline).tracks["image"]
    with pytest.raises(ContractError, match="'log-linear' but the engine returned no log-probs"):
        run(latents, micro_of(image.replace(segment=segment_of(image).replace(sde_logp=None))))
