"""Trains the policy on scored rollouts, pushes it to engines with separate weights, and keeps it within its range."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from unirl.distributed.runtime import Runtime
from unirl.trainer.clock import PhaseClock
from unirl.trainer.collector import ScoredRollout
from unirl.trainer.guardrails import GuardrailConfig, Guardrails
from unirl.trainer.roles import StackRole, SyncRole

logger = logging.getLogger(__name__)

Verdict = Literal["sound", "alarm", "stop", "rollback"]
"""What the guardrails say of a rollout: within its range, outside, or outside for so long that something is done."""


class Learner:
    """Owns the weights of a run, by the roles `stack` and `sync`.

    sync: brings the policy to an engine with weights of its own; None where the engine samples with those that train.
    """

    def __init__(
        self, runtime: Runtime, *, guardrails: GuardrailConfig, clock: PhaseClock, sync: SyncRole | None = None
    ) -> None:
        self._stack = runtime.role("stack", StackRole)
        self._sync = sync
        self._clock = clock
        self._guardrails = Guardrails(guardrails)
        self._pushed: tuple[int, str | None] | None = None
        self._is_training = False

    @property
    def is_training(self) -> bool:
        """Whether an update has begun and not ended, also where it failed: the weights are of no finished rollout."""
        return self._is_training

    def prepare(self) -> None:
        """Make the named policies, and what pushes need. Called once, before training or resuming."""
        self._stack.prepare()
        if self._sync is not None:
            self._sync.prepare()

    def old_logp(self) -> str | None:
        """Where the log-probs before the first update come from, for people."""
        return self._stack.old_logp()

    def push(self, done: int, policy: str | None) -> dict[str, float]:
        """Let an engine with weights of its own sample from a policy after `done` rollouts; returns what was pushed.

        policy: named copy of the weights; None is the policy being trained. Evaluation and rollout of one policy share
        the push. Raises WeightSyncError where the engine has not taken exactly what was sent.
        """
        if self._sync is None or self._pushed == (done, policy):
            return {}
        with self._clock.phase("sync"):
            pushed = self._sync.push(policy)
        self._pushed = (done, policy)
        return pushed

    def train(self, rollout: ScoredRollout) -> dict[str, float]:
        """The updates made from a rollout, which is released after them; returns their metrics."""
        self._is_training = True
        with self._clock.phase("train"):
            result = self._stack.train(rollout.resp, progress=rollout.progress)
        with self._clock.phase("other"):
            rollout.resp.release()
        self._is_training = False
        return dict(result.metrics)

    # Guardrails -------------------------------------------------------------------------------------------------

    def watch(self, metrics: Mapping[str, float], done: int) -> tuple[Verdict, str | None]:
        """Whether the run is within its own range after `done` rollouts, and what is wrong where it is not."""
        reason = self._guardrails.observe(metrics["train/grad_norm"], metrics["reward/mean"])
        if reason is not None:
            logger.warning("rollout %d: %s", done, reason)
        if self._guardrails.acts:
            return ("stop" if self._guardrails.config.action == "stop" else "rollback"), reason
        return ("sound" if reason is None else "alarm"), reason

    @property
    def rolls_back(self) -> bool:
        """Whether the run returns to its last checkpoint where it stays off its range."""
        return self._guardrails.rolls_back

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """Continue with the weights of a checkpoint, which the backend has loaded, and its driver state."""
        self._stack.load_state_dict(state["stack"])
        self._pushed = None
        self._guardrails.reset()

    # State ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What training changes besides the weights, which the backend saves."""
        return {"stack": self._stack.state_dict(), "guardrails": self._guardrails.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, changed: set[str]) -> None:
        """Restore `state_dict`; the range of other rewards begins anew.

        changed: sections of the recipe that differ from the run that was saved.
        """
        self._stack.load_state_dict(state["stack"])
        if "reward" not in changed:
            self._guardrails.load_state_dict(state["guardrails"])
