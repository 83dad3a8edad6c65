"""Notices a run that leaves its own running range before it has collapsed.

A prototype's gradient norm rose to 3, then 10, then 40 times its usual value before its accuracy fell to zero.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Annotated, Literal

from unirl.types.bounds import Bounds, Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError

Action = Literal["off", "warn", "stop", "rollback"]
ACTIONS = ("off", "warn", "stop", "rollback")


@bounded("guardrails")
@dataclass(frozen=True)
class GuardrailConfig:
    """When to speak up and what to do then.

    action: off, warn, stop (save and end) or rollback (weights of the last good checkpoint, then go on).
    """

    action: Action = "warn"
    grad_norm_factor: Annotated[float, Bounds(gt=1)] = 3.0
    """Alarm above this many times the running median of the gradient norm."""
    reward_drop: Positive = 4.0
    """Alarm when the reward falls this many running standard deviations below its running mean."""
    window: PositiveInt = 20
    """Rollouts in the running statistics."""
    warmup: Annotated[int, Bounds(ge=2)] = 8
    """Rollouts before the first alarm."""
    patience: PositiveInt = 2
    """Alarms in a row before stop or rollback acts."""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ConfigError(f"guardrails.action = {self.action!r} must be one of {', '.join(ACTIONS)}")
        if self.warmup > self.window:
            raise ConfigError(f"guardrails.warmup = {self.warmup} must be at most window = {self.window}")


class Guardrails:
    """Running ranges of gradient norm and reward over a window of rollouts."""

    def __init__(self, config: GuardrailConfig) -> None:
        self.config = config
        self._norms: list[float] = []
        self._rewards: list[float] = []
        self._alarms_in_a_row = 0

    def observe(self, grad_norm: float, reward: float) -> str | None:
        """What is wrong with this rollout in one sentence, or None. Values that alarm do not enter the statistics."""
        if self.config.action == "off":
            return None
        reason = self._grad_norm_alarm(grad_norm) or self._reward_alarm(reward)
        if reason is None:
            self._norms = [*self._norms, grad_norm][-self.config.window :]
            self._rewards = [*self._rewards, reward][-self.config.window :]
            self._alarms_in_a_row = 0
        else:
            self._alarms_in_a_row += 1
        return reason

    @property
    def acts(self) -> bool:
        """Whether the alarms in a row have used up the patience."""
        return self.config.action in ("stop", "rollback") and self._alarms_in_a_row >= self.config.patience

    @property
    def rolls_back(self) -> bool:
        """Whether the run returns to its last checkpoint when the patience is used up."""
        return self.config.action == "rollback"

    def reset(self) -> None:
        """Forget the alarms in a row (after a rollback)."""
        self._alarms_in_a_row = 0

    def _grad_norm_alarm(self, grad_norm: float) -> str | None:
        if not math.isfinite(grad_norm):
            return f"gradient norm {grad_norm} is not finite"
        if len(self._norms) < self.config.warmup:
            return None
        usual = statistics.median(self._norms)
        if grad_norm > self.config.grad_norm_factor * usual:
            return (
                f"gradient norm {grad_norm:.3g} is {grad_norm / usual:.1f} times its running median {usual:.3g} "
                f"(limit {self.config.grad_norm_factor:g}); lower the learning rate if this goes on"
            )
        return None

    def _reward_alarm(self, reward: float) -> str | None:
        if len(self._rewards) < self.config.warmup:
            return None
        mean, spread = statistics.fmean(self._rewards), statistics.pstdev(self._rewards)
        if spread > 0 and reward < mean - self.config.reward_drop * spread:
            return (
                f"reward {reward:.3g} fell {(mean - reward) / spread:.1f} running standard deviations below "
                f"{mean:.3g} (limit {self.config.reward_drop:g})"
            )
        return None

    def state_dict(self) -> dict[str, list[float] | int]:
        """What a checkpoint must hold."""
        return {"norms": self._norms, "rewards": self._rewards, "alarms": self._alarms_in_a_row}

    def load_state_dict(self, state: dict) -> None:
        """Restore `state_dict`."""
        self._norms, self._rewards = list(state["norms"]), list(state["rewards"])
        self._alarms_in_a_row = int(state["alarms"])
