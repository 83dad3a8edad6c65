"""PPO against float64 finite differences, hand-worked advantages and its limits; resumed and on two ranks.

Legend: B samples, S stochastic steps, N latent elements.
"""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import SHAPE, AffineField, Setup, rollout, some_advantages
from ppo_fakes import ppo, train, trained_state
from ranks import results_of_ranks
from torch import Tensor
from train_fakes import snapshot

from unirl.algorithms.base import MicroBatch
from unirl.algorithms.critic import LatentCritic
from unirl.algorithms.ppo import DiffusionPPO, value_loss
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutTrack
from unirl.types.segments import LatentSegment

ETA = 0.7
THETA = torch.tensor([0.7, 0.1], dtype=torch.float64)
REWARDS_B = some_advantages(6)


def segment_of(track: RolloutTrack) -> LatentSegment:
    assert isinstance(track.segment, LatentSegment)
    return track.segment


def anchored(made: Setup, track: RolloutTrack, rewards: Tensor = REWARDS_B) -> MicroBatch:
    micro = MicroBatch(track=track.replace(advantages=rewards), anchor={}, update=0, progress=0.0)
    anchor = made.algorithm.anchor(micro)
    return MicroBatch(track=track.replace(advantages=rewards), anchor=anchor, update=0, progress=0.0)


def gradients(made: Setup, micro: MicroBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of policy and critic of the mean loss."""
    made.backend.zero_grad()
    for part in made.algorithm.losses(micro):
        (part.loss / made.algorithm.num_terms(micro.track)).backward()
    policy = {name: p.grad.clone() for name, p in made.backend.parameters.items() if p.grad is not None}
    critic = {name: p.grad.clone() for name, p in made.algorithm.critic.named_parameters() if p.grad is not None}
    return policy, critic


# An independent reference in float64 --------------------------------------------------------------------------------


def log_probs(track: RolloutTrack, theta: Tensor) -> Tensor:
    """[B, S] of the affine field under the Flow-SDE kernel, by the formulas."""
    segment = segment_of(track)
    sigmas, steps = segment.sigmas.double(), segment.sde_indices
    x, y = (torch.stack([segment.latents_at(s + shift) for s in steps], 1).double().flatten(2) for shift in (0, 1))
    sigma, dt = sigmas[steps], (sigmas[1:] - sigmas[:-1])[steps]
    q = ETA * (sigma / (1 - torch.where(sigma == 1, sigmas[1], sigma))).sqrt()
    v = theta[0] * x + theta[1]
    mean = x + v * dt[:, None] + (q.square() / (2 * sigma) * dt)[:, None] * (x + (1 - sigma)[:, None] * v)
    std = q * (-dt).sqrt()
    return -(y - mean).square().mean(-1) / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)


def values(track: RolloutTrack, critic: LatentCritic) -> Tensor:
    """[B, S] of the critic, in float64."""
    segment = segment_of(track)
    critic = copy.deepcopy(critic).double()
    count = track.batch_size
    with torch.no_grad():
        columns = [critic(segment.latents_at(s), segment.sigmas[s].expand(count), None) for s in segment.sde_indices]
    return torch.stack(columns, 1)


def advantages_by_hand(track: RolloutTrack, critic: LatentCritic, gamma: float, lam: float) -> Tensor:
    v = values(track, critic)
    delta = torch.cat([gamma * v[:, 1:] - v[:, :-1], (REWARDS_B.double() - v[:, -1])[:, None]], 1)
    num_steps = v.shape[1]
    decay = [[(gamma * lam) ** (k - s) if k >= s else 0.0 for k in range(num_steps)] for s in range(num_steps)]
    return delta @ torch.tensor(decay, dtype=torch.float64).T


def policy_differences(track: RolloutTrack, advantages_BS: Tensor) -> Tensor:
    """d/dtheta of -mean A log p, central differences."""
    steps = 1e-5 * torch.eye(2, dtype=torch.float64)
    value = [[-(advantages_BS * log_probs(track, THETA + sign * step)).mean() for sign in (1, -1)] for step in steps]
    return torch.stack([(above - below) / 2e-5 for above, below in value])


def test_without_a_critic_it_is_reinforce_with_the_return():
    made = ppo(model=AffineField(), gamma=1.0, lam=1.0, value_coef=0.0)
    track = rollout(made.pipeline).tracks["image"]
    policy, critic = gradients(made, anchored(made, track))
    expected = policy_differences(track, REWARDS_B.double()[:, None].expand(6, 3))
    # The kernel computes in float32.
    torch.testing.assert_close(torch.cat(list(policy.values())).double(), expected, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in critic.values())


def test_policy_and_critic_gradients_are_those_of_float64_finite_differences():
    made = ppo(model=AffineField(), displaced=0.5, gamma=0.9, lam=0.7, value_coef=0.5, advantage_clip=None)
    track = rollout(made.pipeline).tracks["image"]
    critic: LatentCritic = made.algorithm.critic
    advantages_BS = advantages_by_hand(track, critic, 0.9, 0.7)
    micro = anchored(made, track)
    torch.testing.assert_close(micro.anchor["advantage"].double(), advantages_BS, rtol=1e-4, atol=1e-5)
    policy, found = gradients(made, micro)
    expected = policy_differences(track, advantages_BS)
    torch.testing.assert_close(torch.cat(list(policy.values())).double(), expected, rtol=1e-4, atol=1e-5)

    returns_BS = advantages_BS + values(track, critic)
    moved = copy.deepcopy(critic).double()
    for name, parameter in moved.named_parameters():
        flat, gradient = parameter.data.view(-1), found[name].double().flatten()
        for index in range(0, flat.numel(), 7):
            around = []
            for sign in (1, -1):
                flat[index] += sign * 1e-5
                # At the values of before the update clipping does nothing.
                around.append(0.5 * 0.5 * (values(track, moved) - returns_BS).square().mean())
                flat[index] -= sign * 1e-5
            difference = float((around[0] - around[1]) / 2e-5)
            assert float(gradient[index]) == pytest.approx(difference, rel=1e-3, abs=1e-6), (name, index)


def test_a_constant_critic_without_decay_is_a_baseline():
    made = ppo(gamma=1.0, lam=1.0)
    torch.nn.init.constant_(made.algorithm.critic.value.bias, 0.25)
    anchor = anchored(made, rollout(made.pipeline).tracks["image"]).anchor
    torch.testing.assert_close(anchor["advantage"], (REWARDS_B - 0.25)[:, None].expand(6, 3))
    torch.testing.assert_close(anchor["return"], REWARDS_B[:, None].expand(6, 3))
    assert torch.equal(anchor["value"], torch.full((6, 3), 0.25))


def test_advantages_run_over_all_steps_also_where_some_are_trained():
    whole, part = ppo(displaced=0.5), ppo(displaced=0.5, step_fraction=0.67)
    track = rollout(whole.pipeline).tracks["image"]
    every = anchored(whole, track)
    some = anchored(part, track)
    assert some.anchor["advantage"].shape == (6, 2)
    sample_R, step_R = whole.algorithm.rows(every)
    known = dict(zip(zip(sample_R.tolist(), step_R.tolist(), strict=True), range(18), strict=True))
    sample_R, step_R = part.algorithm.rows(some)
    rows = [known[pair] for pair in zip(sample_R.tolist(), step_R.tolist(), strict=True)]
    for name in ("value", "advantage", "return"):
        assert torch.equal(some.anchor[name].flatten(), every.anchor[name].flatten()[rows])
    shuffled = track.replace(segment=segment_of(track).replace(sde_indices=[2, 0, 1], sde_logp=None))
    for name in ("value", "advantage", "return"):
        assert torch.equal(anchored(whole, shuffled).anchor[name], every.anchor[name][:, [2, 0, 1]])


def test_log_probs_of_the_rollout_can_be_trusted():
    made = ppo(displaced=0.5, old_logp_source="rollout")
    micro = anchored(made, rollout(made.pipeline).tracks["image"])
    assert set(micro.anchor) == {"value", "advantage", "return"}
    replayed = ppo(displaced=0.5)
    ours, theirs = gradients(made, micro), gradients(replayed, anchored(replayed, micro.track))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.allclose(mine[name], other[name], rtol=1e-4, atol=1e-6) for name in mine)


def test_generalised_advantages_are_clipped_not_rewards():
    made = ppo(gamma=1.0, lam=1.0, advantage_clip=0.5)
    torch.nn.init.constant_(made.algorithm.critic.value.bias, 3.0)
    micro = anchored(made, rollout(made.pipeline).tracks["image"], torch.full((6,), 3.25))
    assert torch.equal(micro.anchor["advantage"], torch.full((6, 3), 0.25))
    part = next(iter(made.algorithm.losses(micro)))
    assert float(part.metrics.sums["advantage/clipped_fraction"][0]) == 0.0
    assert float(part.metrics.sums["policy/loss"][0]) == pytest.approx(-0.25 * 18, rel=1e-6)


# Value loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [
        (0.1, 0.5 * 0.9**2, -0.9),  # inside the band
        (0.5, 0.5 * 0.8**2, 0.0),  # beyond it towards the return: held at 0.2
        (-0.5, 0.5 * 1.5**2, -1.5),  # beyond it away from the return: pulled back
        (1.9, 0.5 * 0.9**2, 0.9),  # so far beyond that its own error is the larger one
    ],
)
def test_a_value_gains_nothing_beyond_its_band(value: float, loss: float, slope: float):
    value_R = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    found = value_loss(value_R, zero, one, clip=0.2)
    found.sum().backward()
    assert float(found.detach()) == pytest.approx(loss)
    assert value_R.grad is not None and float(value_R.grad) == pytest.approx(slope)
    free = value_loss(value_R.detach(), zero, one, clip=None)
    assert float(free) == pytest.approx(0.5 * (1 - value) ** 2)


def test_the_critic_learns_what_can_be_foreseen():
    made = ppo(model=AffineField(), lr=0.0, lam=1.0, value_clip=None, critic_lr=3e-2)
    resp = rollout(made.pipeline, num_prompts=4)
    rewards = segment_of(resp.tracks["image"]).latents_at(0).mean(dim=(1, 2, 3)) + 2.0
    found = [made.stack.train(with_advantages(resp, rewards), progress=0.0).metrics for _ in range(60)]
    assert found[0]["ppo/value_mean"] == 0.0 and found[0]["ppo/explained_variance"] == pytest.approx(0.0)
    assert found[-1]["ppo/explained_variance"] > 0.5
    assert found[-1]["ppo/value_mean"] == pytest.approx(float(rewards.mean()), abs=0.1)
    assert found[-1]["ppo/value_loss"] < 0.02 * found[0]["ppo/value_loss"]


# Metrics, chunks, ranks, resume -------------------------------------------------------------------------------------


def test_explained_variance_is_over_all_rows_of_the_update():
    made = ppo(displaced=0.5, lam=0.5, micro=4, rows_per_forward=5)
    resp = rollout(made.pipeline)
    track = resp.tracks["image"]
    returns = advantages_by_hand(track, made.algorithm.critic, 1.0, 0.5) + values(track, made.algorithm.critic)
    error = returns - values(track, made.algorithm.critic)
    metrics = made.stack.train(with_advantages(resp, REWARDS_B), progress=0.0).metrics
    expected = 1 - float(error.var(correction=0) / returns.var(correction=0))
    assert metrics["ppo/explained_variance"] == pytest.approx(expected, rel=1e-4)
    assert metrics["ppo/return_mean"] == pytest.approx(float(returns.mean()), rel=1e-4)
    assert metrics["ppo/value_loss"] == pytest.approx(0.5 * float(error.square().mean()), rel=1e-4)
    assert metrics["train/critic_grad_norm"] > 0
    assert not {"return_square", "value_error", "value_error_square"} & set(metrics)


def test_returns_that_are_all_equal_have_no_explained_variance():
    made = ppo(lam=1.0)
    metrics = made.stack.train(with_advantages(rollout(made.pipeline), torch.full((6,), 0.1)), progress=0.0).metrics
    assert math.isnan(metrics["ppo/explained_variance"])


def test_the_update_does_not_depend_on_the_sizes_of_micro_batches_and_forwards():
    found = []
    for micro, rows in ((6, None), (4, 5), (1, 1)):
        made = ppo(displaced=0.5, micro=micro, rows_per_forward=rows, critic_max_grad_norm=1e9)
        made.stack.train(with_advantages(rollout(made.pipeline), REWARDS_B), progress=0.0)
        found.append((made.backend.gradients[0], snapshot(made.backend)))
    for gradient, state in found[1:]:
        for name, value in gradient.items():
            torch.testing.assert_close(value, found[0][0][name], rtol=1e-5, atol=1e-6)
        for name, value in state.items():
            if "exp_avg" in name:  # the critic's gradient, times 1 - beta
                torch.testing.assert_close(value, found[0][1][name], rtol=1e-4, atol=1e-7)


def test_two_rollouts_a_resume_and_two_rollouts_equal_four_bit_for_bit(tmp_path: Path):
    options: dict[str, Any] = {"displaced": 0.5, "micro": 4, "updates": 2, "step_fraction": 0.67}
    made = ppo(**options)
    train(made, range(2))
    Checkpointer(made.backend, str(tmp_path)).save(2, {"stack": made.stack.state_dict()})
    expected_metrics = train(made, range(2, 4))
    resumed = ppo(**options, critic_seed=8)
    resumed.stack.load_state_dict(Checkpointer(resumed.backend, str(tmp_path)).load()["stack"])
    metrics = train(resumed, range(2, 4))
    for mine, theirs in zip(metrics, expected_metrics, strict=True):
        assert {k: v for k, v in mine.items() if "timing" not in k and "perf/" not in k} == {
            k: v for k, v in theirs.items() if "timing" not in k and "perf/" not in k
        }
    found, expected = snapshot(resumed.backend), snapshot(made.backend)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.slow
def test_two_ranks_train_the_critic_and_the_policy_that_one_trains(tmp_path: Path):
    state, metrics = trained_state()
    results = results_of_ranks(trained_state, tmp_path)
    for name, value in results[0][0].items():
        assert torch.equal(value, results[1][0][name]), name
        # float32 sums in another order; AdamW divides by roots of tiny second moments (lr = 0.01).
        torch.testing.assert_close(value, state[name], rtol=1e-3, atol=1e-4)
    assert any(name.startswith("auxiliary/critic/module/") for name in state)
    for mine, theirs in zip(results[0][1], metrics, strict=True):
        for name in ("ppo/value_loss", "ppo/explained_variance", "train/critic_grad_norm", "policy/loss"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


# Mistakes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.1}, "algorithm.gamma = 1.1 must lie in"),
        ({"lam": -0.1}, "algorithm.lam = -0.1 must lie in"),
        ({"value_coef": -1.0}, "algorithm.value_coef = -1.0 must be at least 0"),
        ({"value_clip": 0.0}, "algorithm.value_clip = 0.0 must be above 0"),
        ({"critic_max_grad_norm": 0.0}, "critic_max_grad_norm = 0.0 must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        ppo(**options)


def test_a_critic_for_other_latents_says_which_option_to_change():
    made = ppo()
    made.algorithm.critic = LatentCritic(SHAPE[0] + 1)
    with pytest.raises(ContractError, match=r"latent_channels = 4 does not fit latents \(3, 2, 2\)"):
        made.stack.train(with_advantages(rollout(made.pipeline), REWARDS_B), progress=0.0)


def test_it_declares_what_check_reads():
    assert DiffusionPPO.requires_sde and DiffusionPPO.learns_value
