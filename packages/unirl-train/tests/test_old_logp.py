"""The log-probs before the first update: its own forward gives them there, a replay or the rollout later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import displace, rollout, setup
from ppo_fakes import ppo
from token_fakes import advantages_of, response
from token_fakes import setup as token_setup
from transition_cases import anchored, close, micro_of, run

from unirl.algorithms.ar_dppo import ARDPPO
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.ar_ppo import ARPPO
from unirl.algorithms.awm import AWM
from unirl.algorithms.base import MicroBatch, StageAlgorithm
from unirl.algorithms.cppo import CPPO
from unirl.algorithms.ddpo import DDPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.flow_dppo import FlowDPPO
from unirl.algorithms.grpo_guard import GRPOGuard
from unirl.algorithms.rollout_correction import RolloutCorrection
from unirl.types.errors import ConfigError
from unirl.types.segments import LatentSegment

REFERENCE: dict[str, Any] = {"kl_coef": 0.1, "keep_reference": True}
TRANSITIONS: dict[str, dict[str, Any]] = {
    "grpo": {"kind": DiffusionGRPO, **REFERENCE},
    "chunks": {"kind": DiffusionGRPO, "rows_per_forward": 5},
    "some_steps": {"kind": DiffusionGRPO, "step_fraction": 0.67},
    "ddpo": {"kind": DDPO},
    "guard": {"kind": GRPOGuard},
    "dppo": {"kind": FlowDPPO},
    "cppo": {"kind": CPPO, "prefix_threshold": 1e-3},
    "awm": {"kind": AWM},
}
TOKENS: dict[str, dict[str, Any]] = {
    "grpo": {"kind": ARGRPO, **REFERENCE},
    "dppo": {"kind": ARDPPO},
    "corrected": {"kind": ARGRPO, "rollout_correction": RolloutCorrection(mode="truncate", upper=2.0)},
    "ppo": {"kind": ARPPO, "critic_seed": 5},
    "ppo_penalty": {"kind": ARPPO, "critic_seed": 5, "kl_in_reward": True, **REFERENCE},
}


class Counted:
    """Counts the forwards of a pipeline."""

    def __init__(self, pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.with_gradients = self.without = 0
        for name in ("replay", "velocity"):
            if name in dir(type(pipeline)):
                monkeypatch.setattr(pipeline, name, self._counting(getattr(pipeline, name)))

    def _counting(self, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self.with_gradients += 1
            else:
                self.without += 1
            return forward(*args, **kwargs)

        return call


# The first update ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TRANSITIONS)
def test_the_own_forward_of_the_first_update_gives_the_gradient_of_a_replayed_anchor(case: str):
    made = setup(**TRANSITIONS[case])
    track = rollout(made.pipeline).tracks["image"]
    displace(made.backend, 0.02)  # the rollout's log-probs would give something else
    value, gradients, metrics = run(made, micro_of(track))
    expected, replayed, _ = run(made, anchored(made, track))
    assert value == expected
    assert all(torch.equal(gradients[name], gradient) for name, gradient in replayed.items())
    assert metrics["policy/ratio_max_abs_dev"] == 0.0


def test_the_critic_of_the_first_update_is_the_present_one():
    made = ppo(displaced=0.5)
    track = rollout(made.pipeline).tracks["image"]
    value, gradients, _ = run(made, micro_of(track))
    expected, replayed, _ = run(made, anchored(made, track))
    assert value == expected
    assert all(torch.equal(gradients[name], gradient) for name, gradient in replayed.items())


@pytest.mark.parametrize("case", TOKENS)
def test_the_own_forward_gives_the_token_gradient_of_a_replayed_anchor(case: str):
    def gradients(*, is_replayed: bool) -> dict[str, torch.Tensor]:
        made = token_setup(**TOKENS[case], displaced=0.05)
        track = response().tracks["text"]
        micro = MicroBatch(track.replace(advantages=advantages_of(track.batch_size)), {}, 0, 0.0)
        if is_replayed:
            micro = replace(micro, anchor=made.algorithm.anchor(micro))
        [part] = made.algorithm.losses(micro)
        part.loss.backward()
        return {name: p.grad.clone() for name, p in made.backend.parameters.items() if p.grad is not None}

    own, replayed = gradients(is_replayed=False), gradients(is_replayed=True)
    assert own.keys() == replayed.keys()
    assert all(torch.equal(own[name], gradient) for name, gradient in replayed.items())


@pytest.mark.parametrize(("updates", "forwards"), [(1, 0), (2, 1), (3, 2)])
def test_only_later_updates_cost_a_forward(updates: int, forwards: int, monkeypatch: pytest.MonkeyPatch):
    made = setup(DiffusionGRPO, updates=updates)
    resp = rollout(made.pipeline)
    count = Counted(made.pipeline, monkeypatch)
    made.stack.train(with_advantages(resp, advantages_of(6)), progress=0.0)
    assert (count.with_gradients, count.without) == (updates, forwards)


# Trust in the rollout -----------------------------------------------------------------------------------------------


def test_auto_trusts_only_where_it_is_told():
    for source, trusts in (("auto", True), ("replay", False), ("rollout", True)):
        algorithm = setup(DiffusionGRPO, old_logp_source=source).algorithm
        assert algorithm.uses_anchor == (source != "rollout")
        algorithm.trust_rollout()
        assert algorithm.uses_anchor == (not trusts)
        assert algorithm.old_logp.startswith("the rollout's" if trusts else "replay")


def test_under_trust_later_updates_take_the_log_probs_of_the_rollout(monkeypatch: pytest.MonkeyPatch):
    made, replayed = setup(DiffusionGRPO, updates=3), setup(DiffusionGRPO, updates=3, old_logp_source="replay")
    made.algorithm.trust_rollout()
    resp = rollout(made.pipeline)
    count = Counted(made.pipeline, monkeypatch)
    result = made.stack.train(with_advantages(resp, advantages_of(6)), progress=0.0)
    expected = replayed.stack.train(with_advantages(resp, advantages_of(6)), progress=0.0)
    assert (count.with_gradients, count.without) == (3, 0)
    assert result.updates[0]["policy/ratio_max_abs_dev"] == 0.0
    for mine, theirs in zip(made.backend.gradients, replayed.backend.gradients, strict=True):
        close(mine, theirs, rtol=1e-4, atol=1e-6)  # other shapes round otherwise
    # The gap is measured where it costs nothing, and agrees with what a replay measures.
    assert result.metrics["mismatch/logp_absdiff/max"] <= expected.metrics["mismatch/logp_absdiff/max"] < 1e-5


def test_under_trust_tokens_take_the_log_probs_of_the_rollout(monkeypatch: pytest.MonkeyPatch):
    made = token_setup(ARGRPO, updates=2)
    made.algorithm.trust_rollout()
    count = Counted(made.pipeline, monkeypatch)
    result = made.stack.train(
        with_advantages(response(), advantages_of(response().tracks["text"].batch_size)), progress=0.0
    )
    assert (count.with_gradients, count.without) == (2, 0)
    assert result.metrics["mismatch/logp_absdiff/max"] < 1e-5


@pytest.mark.parametrize(
    "options", [TRANSITIONS["guard"], TRANSITIONS["dppo"], TRANSITIONS["awm"]], ids=["guard", "dppo", "awm"]
)
def test_what_a_rollout_does_not_keep_is_replayed_all_the_same(options: dict[str, Any]):
    algorithm: StageAlgorithm = setup(**options).algorithm
    algorithm.trust_rollout()
    assert algorithm.uses_anchor and str(algorithm.old_logp).startswith("replay")


@pytest.mark.parametrize("case", ["corrected", "ppo"])
def test_token_algorithms_that_need_a_replay_make_one(case: str):
    algorithm = token_setup(**TOKENS[case]).algorithm
    algorithm.trust_rollout()
    assert algorithm.uses_anchor and algorithm.old_logp.startswith("replay")


def test_trust_in_a_rollout_without_log_probs_is_an_error():
    made = setup(DiffusionGRPO, updates=2)
    made.algorithm.trust_rollout()
    resp = rollout(made.pipeline)
    segment = resp.tracks["image"].segment
    assert isinstance(segment, LatentSegment)
    resp.tracks["image"] = resp.tracks["image"].replace(segment=segment.replace(sde_logp=None))
    with pytest.raises(Exception, match="returned no log-probs"):
        made.stack.train(with_advantages(resp, advantages_of(6)), progress=0.0)


def test_another_source_is_refused():
    for make in (lambda: setup(DiffusionGRPO, old_logp_source="x"), lambda: token_setup(ARGRPO, old_logp_source="x")):
        with pytest.raises(ConfigError, match="old_logp_source = 'x' must be one of auto, rollout, replay"):
            make()
