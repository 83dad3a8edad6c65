"""Trains the policy on scored rollouts, pushes it to engines with separate weights, and applies the guardrails."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unirl.algorithms.traces import Trace
from unirl.distributed.runtime import Runtime
from unirl.trainer.clock import PhaseClock
from unirl.trainer.collector import ScoredPart, ScoredRollout
from unirl.trainer.guardrails import ALARMS, CHANGED_TENSORS, Alarm, Guardrails
from unirl.trainer.parity import Parity
from unirl.trainer.roles import FollowsTraining, StackRole, SyncRole
from unirl.trainer.settings import is_due
from unirl.types.copies import Copies

logger = logging.getLogger(__name__)

Verdict = Literal["sound", "alarm", "stop", "rollback"]
"""Result of the guardrails for a rollout: in range, out of range, or out of range for so long that the run is stopped
or rolled back."""


@dataclass(frozen=True)
class Watch:
    """Findings of the guardrails for a rollout."""

    verdict: Verdict
    alarms: tuple[Alarm, ...]
    begun: tuple[Alarm, ...]
    """Alarms that the previous rollout did not have."""
    metrics: dict[str, float]
    """`alarm/<name>`, 1 or 0; empty if the guardrails are off."""

    @property
    def reason(self) -> str:
        """The reasons of all alarms, joined."""
        return "; ".join(alarm.reason for alarm in self.alarms)


class Learner:
    """Owns the weights of a run, through the roles `stack` and `sync`.

    sync: pushes the policy to engines with separate weights; None if the engine samples with the trained model.
    parity: compares engine and trainer every `guardrails.parity_interval` rollouts. scored_track: as in the collector.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        guardrails: Guardrails,
        clock: PhaseClock,
        sync: SyncRole | None = None,
        parity: Parity | None = None,
        scored_track: str | None = None,
    ) -> None:
        self._runtime = runtime
        self._parity = parity
        self._scored_track = scored_track
        self._stack = runtime.role("stack", StackRole)
        self._sync = sync
        self._clock = clock
        self._guardrails = guardrails
        self._alarmed: frozenset[str] = frozenset()
        self._pushed: tuple[int, Copies] | None = None
        self._is_forgotten = False
        """True if the next push comes also if it is the last one again."""
        self._known_pushes: list[Copies] = []
        """Policies pushed since the weights were last loaded from elsewhere."""
        self._changed: dict[str, float] = {}
        """Changed tensors of the pushes since the last `watch`."""
        self._is_training = False
        self._traces: dict[str, Trace] = {}
        self._notes_traces = False
        """True while parts of a rollout train of which some samples are noted."""

    @property
    def is_training(self) -> bool:
        """True from the start of an update until it succeeds."""
        return self._is_training

    def prepare(self) -> None:
        """Make the named policies and prepare pushes. Called once, before training or resuming."""
        self._stack.prepare()
        if self._sync is not None:
            self._sync.prepare()

    def old_logp(self) -> str | None:
        """Description of where the log-probs before the first update come from."""
        return self._stack.old_logp()

    def push(self, done: int, policy: Copies) -> dict[str, float]:
        """Push a policy after `done` rollouts to an engine with separate weights; returns metrics.

        policy: named copy of the weights; None is the policy being trained. Evaluation and rollout of the same policy
        share a push. Raises WeightSyncError if the engine did not load exactly what was sent.
        """
        is_again, is_forgotten, self._is_forgotten = self._pushed == (done, policy), self._is_forgotten, False
        if self._sync is None or (is_again and not is_forgotten):
            return {}
        with self._clock.phase("sync"):
            pushed = self._sync.push(policy)
        self._pushed = (done, policy)
        if is_again:
            return pushed
        if policy in self._known_pushes:
            for name in (name for name in pushed if name.endswith(CHANGED_TENSORS)):
                self._changed[name] = min(pushed[name], self._changed.get(name, pushed[name]))
        else:
            self._known_pushes.append(policy)
        return pushed

    def forget_push(self) -> None:
        """Push again, where that would be left out because the engines have the weights: there are more of them now.
        Such a push changes nothing in the others, which is no sign of weights that do not train."""
        self._is_forgotten = True

    def train(self, rollout: ScoredRollout, traced: Sequence[str] = ()) -> dict[str, float]:
        """Run the updates of a rollout and release it; returns metrics.

        traced: samples whose traces `take_traces` gives afterwards, as far as they train.
        """
        self._traces = {}
        self._is_training = True
        if isinstance(self._sync, FollowsTraining):
            self._sync.training_begins()
        if traced:
            self._stack.trace(list(traced))
        with self._clock.phase("train"):
            result = self._stack.train(rollout.resp, progress=rollout.progress)
        with self._clock.phase("other"):
            rollout.resp.release()
            if traced:
                self._take_from_stack()
        self._is_training = False
        return dict(result.metrics)

    def train_part(self, part: ScoredPart, num_parts: int, traced: Sequence[str] = ()) -> dict[str, float]:
        """Add the gradients of a part of a rollout, one after the other, and release it; the last one ends the update.
        Returns metrics then, none before.

        traced: as in `train`; given with the first part.
        """
        if part.number == 0:
            self._traces, self._notes_traces = {}, bool(traced)
            if traced:
                self._stack.trace(list(traced))
        is_last = part.number == num_parts - 1
        self._is_training = is_last
        if part.number == 0 and isinstance(self._sync, FollowsTraining):
            self._sync.training_begins()
        with self._clock.phase("train"):
            result = self._stack.train_part(part.resp, progress=part.progress, num_parts=num_parts)
        with self._clock.phase("other"):
            part.resp.release()
            if is_last and self._notes_traces:
                self._take_from_stack()
        self._is_training = False
        return {} if result is None else dict(result.metrics)

    def _take_from_stack(self) -> None:
        # Ranks that work on the same samples have the same.
        self._traces = {trace["sample_id"]: trace for shard in self._stack.take_traces() for trace in shard}

    def take_traces(self) -> list[Trace]:
        """Traces of the rollout that was trained on last."""
        taken, self._traces = list(self._traces.values()), {}
        return taken

    # Guardrails -------------------------------------------------------------------------------------------------

    def is_parity_due(self, done: int) -> bool:
        """True every `guardrails.parity_interval` rollouts."""
        return self._parity is not None and is_due(done, self._guardrails.config.parity_interval or 0)

    def compare(self, done: int, policy: Copies) -> dict[str, float]:
        """Push a policy after `done` rollouts, and compare what engine and trainer sample from it; returns metrics."""
        if self._parity is None:
            return {}
        pushed = self.push(done, policy)
        with self._clock.phase("eval"):
            return {**pushed, **self._parity.run(self._runtime, policy, self._scored_track)}

    def watch(self, metrics: Mapping[str, float], done: int) -> Watch:
        """Check if the run is within its usual range after `done` rollouts."""
        # A push for an evaluation also serves the next rollout, but its metrics are logged with the evaluation.
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
        """True if a run that stays out of range returns to its last checkpoint."""
        return self._guardrails.rolls_back

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint whose weights the backend has loaded. state: its driver state."""
        self._stack.load_state_dict(state["stack"])
        self._pushed = None
        self._known_pushes.clear()
        self._guardrails.reset()

    # State ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State of training besides the weights, which the backend saves."""
        return {"stack": self._stack.state_dict(), "guardrails": self._guardrails.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, changed: set[str]) -> None:
        """Restore `state_dict`; running statistics are reset if the reward has changed.

        changed: sections of the recipe that differ from the saved run.
        """
        self._stack.load_state_dict(state["stack"])
        if "reward" not in changed:
            self._guardrails.load_state_dict(state["guardrails"])
