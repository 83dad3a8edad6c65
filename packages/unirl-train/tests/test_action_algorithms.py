"""GRPO and PPO on actions: formulas by hand, masks of what was executed, and that cuts change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from action_fakes import NetBundle, NetPipeline, S, episodes

from unirl.algorithms.action_grpo import ActionGRPO
from unirl.algorithms.action_ppo import ActionPPO, decision_rewards, episode_advantages
from unirl.algorithms.base import MicroBatch
from unirl.algorithms.critic import TokenCritic
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.train.stack import TrainStack
from unirl.types.actions import ActionSegment
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutResp, RolloutTrack

ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, -2.0])


def critic() -> TokenCritic:
    made = TokenCritic(S, width=4)
    with torch.no_grad():
        made.value.weight.copy_(torch.tensor([[0.5, -0.3, 0.8, 0.1]]))
    return made


class Setup:
    def __init__(self, kind: type[ActionGRPO], *, micro: int = 4, updates: int = 1, epochs: int = 1, **options: Any):
        bundle = NetBundle()
        self.net: Any = bundle.net
        self.backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-2))
        self.pipeline = NetPipeline(self.net)
        if issubclass(kind, ActionPPO):
            options = {"critic": critic(), "critic_optimizer": OptimizerConfig(learning_rate=1e-2), **options}
        self.algorithm: Any = kind(self.pipeline, self.backend, **options)
        self.stack = TrainStack(
            self.backend,
            self.algorithm,
            micro_batch_size=micro,
            num_updates_per_batch=updates,
            num_epochs=epochs,
            track="action",
        )
        self.stack.prepare()

    def train(self, segment: ActionSegment | None = None):
        return self.stack.train(response(episodes() if segment is None else segment), progress=0.0)

    def weights(self) -> torch.Tensor:
        return self.net.mean.weight.detach().clone()


def track_of(segment: ActionSegment) -> RolloutTrack:
    ids = [f"e{row}" for row in range(segment.batch_size)]
    return RolloutTrack(sample_ids=ids, segment=segment, advantages=ADVANTAGES[: segment.batch_size].clone())


def response(segment: ActionSegment) -> RolloutResp:
    return RolloutResp(tracks={"action": track_of(segment)})


def micro_of(segment: ActionSegment, **changes: Any) -> MicroBatch:
    fields: dict[str, Any] = {"track": track_of(segment), "anchor": {}, "update": 0, "progress": 0.0, **changes}
    return MicroBatch(**fields)


def test_every_executed_term_has_the_advantage_of_its_episode():
    """At ratio one the loss is the mean of -A over executed terms, and its gradient that of -A log p."""
    made, segment = Setup(ActionGRPO), episodes()
    parts = list(made.algorithm.losses(micro_of(segment)))
    counts = segment.term_mask
    expected = -(ADVANTAGES[segment.episode_N][:, None] * counts).sum()
    assert sum(part.num_terms for part in parts) == made.algorithm.num_terms(track_of(segment)) == int(counts.sum())
    torch.testing.assert_close(parts[0].loss.detach(), expected)
    parts[0].loss.backward()
    gradient = made.net.mean.weight.grad.clone()
    made.net.mean.weight.grad = None
    logp = made.pipeline.replay(segment, torch.arange(8), segment.params).logp_NL
    (-(ADVANTAGES[segment.episode_N][:, None] * logp)).sum().backward()
    torch.testing.assert_close(gradient, made.net.mean.weight.grad)


def test_ratios_are_clipped_term_by_term():
    made, segment = Setup(ActionGRPO, clip_range=0.2, clip_range_high=0.3, old_logp_source="rollout"), episodes()
    shift = torch.linspace(-0.6, 0.6, segment.log_probs.numel()).view_as(segment.log_probs)
    moved = segment.replace(log_probs=segment.log_probs - shift)  # ratios exp(shift)
    part = next(made.algorithm.losses(micro_of(moved)))
    ratio, advantage = shift.exp(), ADVANTAGES[segment.episode_N][:, None]
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.3))
    torch.testing.assert_close(part.loss.detach(), loss[segment.term_mask].sum())


@pytest.mark.parametrize("kind", [ActionGRPO, ActionPPO])
def test_cuts_into_micro_batches_and_forwards_change_nothing(kind):
    whole = Setup(kind, updates=2)
    metrics = whole.train().metrics
    for micro, rows in ((1, None), (2, 1), (3, 2)):
        parts = Setup(kind, updates=2, micro=micro, decisions_per_forward=rows)
        other = parts.train().metrics
        torch.testing.assert_close(parts.weights(), whole.weights(), rtol=1e-4, atol=1e-6)
        for name, value in metrics.items():
            if not name.startswith(("timing_s/", "perf/")):
                assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("kind", [ActionGRPO, ActionPPO])
def test_the_first_ratio_is_one_and_the_rollout_agrees(kind):
    metrics = Setup(kind).train().metrics
    assert metrics["policy/first_ratio_max_abs_dev"] == 0
    assert metrics["mismatch/logp_absdiff/max"] == 0


@pytest.mark.parametrize("kind", [ActionGRPO, ActionPPO])
def test_a_replayed_anchor_and_a_trusted_rollout_train_alike(kind):
    replaying, trusting = Setup(kind, updates=2, epochs=2), Setup(kind, updates=2, epochs=2)
    trusting.algorithm.trust_rollout()
    replaying.train(), trusting.train()
    torch.testing.assert_close(trusting.weights(), replaying.weights(), rtol=1e-6, atol=1e-7)
    assert trusting.pipeline.num_forwards < replaying.pipeline.num_forwards


def test_epochs_repeat_the_updates_with_the_anchor_of_the_first():
    """Two epochs of one update: the second has the ratios of what the first changed."""
    made = Setup(ActionGRPO, epochs=2)
    result = made.train()
    assert len(result.updates) == 2
    first, second = result.updates
    assert first["policy/ratio_max_abs_dev"] == 0 < second["policy/ratio_max_abs_dev"]
    by_hand = Setup(ActionGRPO)
    segment = episodes()
    by_hand.train(segment)
    ratio = (by_hand.pipeline.replay(segment, torch.arange(8), segment.params).logp_NL - segment.log_probs).exp()
    deviation = (ratio[segment.term_mask] - 1).abs().max()
    assert second["policy/ratio_max_abs_dev"] == pytest.approx(deviation.item(), rel=1e-5)


def test_more_epochs_of_several_updates_see_each_sample_as_often():
    made = Setup(ActionPPO, updates=2, epochs=3, micro=1)
    assert len(made.train().updates) == 6


def test_epochs_and_turns_of_tracks_are_refused_together():
    made = Setup(ActionGRPO)
    algorithms = {"a": made.algorithm, "b": made.algorithm}
    with pytest.raises(ConfigError, match=r"stack.num_epochs = 2 repeats the updates of a rollout, in which \['a'\]"):
        TrainStack(made.backend, algorithms, micro_batch_size=1, num_epochs=2, losses={"a": {"every": 2}})


def test_rewards_of_decisions_add_up_to_that_of_the_episode():
    segment = episodes(lengths=(2, 1))
    rewards = decision_rewards(segment, torch.tensor([5.0, 0.5]))
    a, b, c = segment.rewards.double().tolist()
    torch.testing.assert_close(rewards, torch.tensor([a, 5 - a, 0.5], dtype=torch.float64))
    own = decision_rewards(segment, torch.tensor([a + b, c]))
    torch.testing.assert_close(own.float(), segment.rewards)


def test_generalised_advantages_by_hand():
    """gamma .5, lambda .5. The first episode was ended, the second cut off where the critic sees 4.

    First: delta = (0 + .5 2 - 1, 1 - 2) = (0, -1), A = (-.25, -1). Second: delta = 3 + .5 4 - 1 = 4.
    """
    advantages, returns = episode_advantages(
        torch.tensor([0.0, 1.0, 3.0]),
        torch.tensor([1.0, 2.0, 1.0]),
        torch.tensor([0.0, 4.0]),
        torch.tensor([2, 1]),
        gamma=0.5,
        lam=0.5,
    )
    assert advantages.tolist() == [-0.25, -1.0, 4.0]
    assert returns.tolist() == [0.75, 1.0, 5.0]


def test_only_episodes_that_were_cut_off_are_worth_something_after_their_end():
    made, segment = Setup(ActionPPO, gamma=1.0, lam=1.0), episodes(lengths=(1, 1), truncated=(1,))
    anchor = made.algorithm.anchor(micro_of(segment))
    final = made.algorithm.critic(segment.final_states)
    expected = ADVANTAGES[:2] + torch.tensor([0.0, 1.0]) * final.detach()
    torch.testing.assert_close(anchor["return"], expected)
    torch.testing.assert_close(anchor["advantage"], expected - anchor["value"])


def test_the_critic_learns_and_leaves_the_policy_alone():
    made = Setup(ActionPPO, value_coef=1.0)
    segment = episodes()
    before = [parameter.detach().clone() for parameter in made.algorithm.critic.parameters()]
    flat = track_of(segment).replace(advantages=torch.zeros(4))
    calm = MicroBatch(track=flat, anchor={}, update=0, progress=0.0)
    valued = made.algorithm._valued(calm)
    anchored = MicroBatch(track=flat, anchor={**valued, "advantage": torch.zeros(8)}, update=0, progress=0.0)
    next(made.algorithm.losses(anchored)).loss.backward()
    assert made.net.mean.weight.grad is None or not made.net.mean.weight.grad.any()
    made.train(segment)
    after = list(made.algorithm.critic.parameters())
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_value_loss_counts_decisions_not_terms():
    """Its mean is over decisions, each weighed by the terms it has."""
    made, segment = Setup(ActionPPO, value_coef=1.0, value_clip=None), episodes()
    micro = micro_of(segment)
    anchor = {**made.algorithm.anchor(micro), "advantage": torch.zeros(8)}
    part = next(made.algorithm.losses(micro_of(segment, anchor=anchor)))
    loss = 0.5 * (anchor["value"] - anchor["return"]).square()
    torch.testing.assert_close(part.loss.detach(), (loss * segment.term_mask.sum(1)).sum())


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="actions have k1, k2 and k3"):
        Setup(ActionGRPO, kl_estimator="exact")
    made = Setup(ActionGRPO, old_logp_source="rollout")
    bare = episodes().replace(log_probs=None)
    with pytest.raises(ContractError, match="were played by the most probable actions"):
        list(made.algorithm.losses(micro_of(bare)))
    with pytest.raises(ContractError, match="expected episodes"):
        made.algorithm.num_terms(RolloutTrack(sample_ids=["a"]))
