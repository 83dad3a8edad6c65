"""Trains the policy on scored rollouts, pushes it to engines with separate weights, and keeps it within its range."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from unirl.distributed.runtime import Runtime
from unirl.trainer.clock import PhaseClock
from unirl.trainer.collector import ScoredRollout
from unirl.trainer.guardrails import ALARMS, CHANGED_TENSORS, Alarm, Guardrails
from unirl.trainer.roles import StackRole, SyncRole
from unirl.types.copies import Copies

logger = logging.getLogger(__name__)

Verdict = Literal["sound", "alarm", "stop", "rollback"]
"""What the guardrails say of a rollout: within its range, outside, or outside for so long that something is done."""


@dataclass(frozen=True)
class Watch:
    """What the guardrails found in a rollout."""

    verdict: Verdict
    alarms: tuple[Alarm, ...]
    begun: tuple[Alarm, ...]
    """Those that the rollout before did not have."""
    metrics: dict[str, float]
    """`alarm/<name>`, 1 or 0; none where the guardrails are off."""

    @property
    def reason(self) -> str:
        """Everything that is wrong."""
        return "; ".join(alarm.reason for alarm in self.alarms)


class Learner:
    """Owns the weights of a run, by the roles `stack` and `sync`.

    sync: brings the policy to an engine with weights of its own; None where the engine samples with those that train.
    """

    def __init__(
        self, runtime: Runtime, *, guardrails: Guardrails, clock: PhaseClock, sync: SyncRole | None = None
    ) -> None:
        self._stack = runtime.role("stack", StackRole)
        self._sync = sync
        self._clock = clock
        self._guardrails = guardrails
        self._alarmed: frozenset[str] = frozenset()
        self._pushed: tuple[int, Copies] | None = None
        self._known_pushes: list[Copies] = []
        """Policies pushed since the weights last came from anywhere but training."""
        self._changed: dict[str, float] = {}
        """Changed tensors of the pushes since the last rollout that was watched."""
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

    def push(self, done: int, policy: Copies) -> dict[str, float]:
        """Let an engine with weights of its own sample from a policy after `done` rollouts; returns what was pushed.

        policy: named copy of the weights; None is the policy being trained. Evaluation and rollout of one policy share
        the push. Raises WeightSyncError where the engine has not taken exactly what was sent.
        """
        if self._sync is None or self._pushed == (done, policy):
            return {}
        with self._clock.phase("sync"):
            pushed = self._sync.push(policy)
        self._pushed = (done, policy)
        if policy in self._known_pushes:
            for name in (name for name in pushed if name.endswith(CHANGED_TENSORS)):
                self._changed[name] = min(pushed[name], self._changed.get(name, pushed[name]))
        else:
            self._known_pushes.append(policy)
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

    def watch(self, metrics: Mapping[str, float], done: int) -> Watch:
        """Whether the run is within its own range after `done` rollouts, and what is wrong where it is not."""
        # A push for an evaluation serves the rollout after it too, and its metrics are logged with the evaluation.
        pushed = {name: value for name, value in metrics.items() if not name.endswith(CHANGED_TENSORS)} | self._changed
        self._changed = {}
        alarms = self._guardrails.observe(pushed)
        for alarm in alarms:
            logger.warning("rollout %d: %s", done, alarm.reason)
        names = {alarm.name for alarm in alarms}
        begun = tuple(alarm for alarm in alarms if alarm.name not in self._alarmed)
        self._alarmed = frozenset(names)
        verdict: Verdict = "alarm" if self._guardrails.is_alarmed else "sound"
        if self._guardrails.acts:
            verdict = "rollback" if self._guardrails.rolls_back else "stop"
        watched = () if self._guardrails.config.action == "off" else ALARMS
        return Watch(verdict, tuple(alarms), begun, {f"alarm/{name}": float(name in names) for name in watched})

    @property
    def rolls_back(self) -> bool:
        """Whether the run returns to its last checkpoint where it stays off its range."""
        return self._guardrails.rolls_back

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """Continue with the weights of a checkpoint, which the backend has loaded, and its driver state."""
        self._stack.load_state_dict(state["stack"])
        self._pushed = None
        self._known_pushes.clear()
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
