"""Detects runs that leave their usual range before they collapse, or that look healthy but do not learn.

A prototype's gradient norm rose to 3, then 10, then 40 times its usual value before its accuracy fell to zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from unirl.types.bounds import Bounds, NonNegative, Positive, PositiveFraction, PositiveInt, bounded
from unirl.types.errors import ConfigError

Action = Literal["off", "warn", "stop", "rollback"]
AlarmName = Literal[
    "grad_norm_range",
    "reward_range",
    "constant_reward",
    "zero_gradient",
    "non_finite_gradient",
    "unchanged_push",
    "penalty_share",
    "first_ratio",
    "logp_gap",
    "reward_parity",
    "reward_hacking",
    "idle_part",
]
ALARMS: tuple[AlarmName, ...] = get_args(AlarmName)
ENDED_BY_ROLLBACK: tuple[AlarmName, ...] = ("grad_norm_range", "reward_range", "non_finite_gradient")
"""Alarms that earlier weights do not have; the others would be raised again at once after a rollback."""
ONLY_TOLD: tuple[AlarmName, ...] = ("idle_part",)
"""Alarms that neither stop a run nor keep it from a checkpoint: nothing is wrong with the weights."""

GRAD_NORM = "train/grad_norm"
CHANGED_TENSORS = "sync/changed_tensors"
PENALTY_SHARE = "policy/penalty_share"
LOGP_GAP = "mismatch/logp_absdiff/mean"
WALL_S = "schedule/wall_s"
PARTS = ("engine", "reward", "learner")
"""What overlaps in a schedule, as in `schedule/<part>_idle_s`."""
PARITY = ("parity/engine_reward", "parity/trainer_reward", "parity/gap_stderr", "parity/reward_std")
"""Metrics of `unirl.trainer.parity`."""
LEAST_PARITY_GAP = 0.1
"""Share of the rewards' standard deviation over prompts up to which a difference is rounding, however sure it is."""
ROUNDING_GAP = 1e-6
"""Log-prob gaps up to this are float32 rounding and are ignored."""


@bounded("guardrails")
@dataclass(frozen=True)
class GuardrailConfig:
    """When to raise alarms, and what to do then.

    action: off, warn, stop (save and end) or rollback (continue from the last good checkpoint). Only alarms that
    earlier weights do not have (`ENDED_BY_ROLLBACK`) cause a rollback; the others warn.
    """

    action: Action = "warn"
    grad_norm_factor: Annotated[float, Bounds(gt=1)] = 3.0
    """Alarm if the gradient norm exceeds this many times its running median."""
    reward_drop: Positive = 4.0
    """Alarm if the reward falls this many running standard deviations below its running mean."""
    min_grad_norm: NonNegative = 1e-10
    """Alarm if the gradient norm is at most this. Adam's epsilon is 1e-8, so such a gradient changes nothing."""
    penalty_share: PositiveFraction = 0.8
    """Alarm if the penalty towards the reference exceeds this share of the loss (`policy/penalty_share`); 1 disables
    it."""
    first_ratio: NonNegative = 1e-6
    """Alarm if a ratio before the first update, which should be exactly 1, differs from 1 by more than this."""
    logp_gap_factor: Annotated[float, Bounds(gt=1)] = 5.0
    """Alarm if the mean log-prob gap between engine and trainer exceeds this many times its running median."""
    parity_interval: PositiveInt | None = None
    """Rollouts between comparisons of rewards of engine and trainer on the same held-out prompts; None makes none."""
    parity_samples: Annotated[int, Bounds(ge=2)] = 32
    """Prompts of a comparison, one sample each by both."""
    parity_gap: Positive = 4.0
    """Alarm if the mean rewards differ by more than this many standard errors of their paired difference, and by more
    than a tenth of the rewards' standard deviation."""
    scorer_drop: Positive = 4.0
    """Alarm if from the first to the second half of the window the reward rises and a scorer falls, each by this many
    standard errors."""
    idle_share: PositiveFraction = 0.9
    """Alarm if engine, reward or learner waited for more than this share of the window, where they overlap; 1 disables
    it."""
    window: Annotated[int, Bounds(ge=2)] = 20
    """Rollouts in the running statistics."""
    warmup: Annotated[int, Bounds(ge=2)] = 8
    """Rollouts before the first alarm that compares with running statistics."""
    patience: PositiveInt = 2
    """Consecutive rollouts with alarms before a stop or rollback."""

    def __post_init__(self) -> None:
        if self.warmup > self.window:
            raise ConfigError(f"guardrails.warmup = {self.warmup} must be at most window = {self.window}")


@dataclass(frozen=True)
class Alarm:
    """One problem of a rollout."""

    name: AlarmName
    reason: str
    """One sentence with the values."""


class Guardrails:
    """Checks the metrics of every rollout, mostly against running statistics over a window of rollouts.

    scorers: scorers that should not fall while the reward rises.
    exact_ratios: metrics that are 0 if every ratio of a first update is exactly 1.
    learns_from_reward: True if the algorithms learn from rewards (distillation may not need them).
    """

    def __init__(
        self,
        config: GuardrailConfig,
        *,
        scorers: Sequence[str] = (),
        exact_ratios: Sequence[str] = (),
        learns_from_reward: bool = True,
    ) -> None:
        self.config = config
        self._scorers = tuple(scorers)
        self._exact_ratios = tuple(exact_ratios)
        self._learns_from_reward = learns_from_reward
        self._norms: list[float] = []
        self._rewards: list[float] = []
        self._gaps: dict[str, list[float]] = {}
        self._scores: dict[str, list[float]] = {}
        """Mean reward and mean of each scorer, for every rollout in the window."""
        self._waits: dict[str, list[float]] = {}
        """Share of each rollout's wall time in which a part waited, in the window."""
        self._parity: Alarm | None = None
        """The alarm of the newest comparison, until there is another."""
        self._alarms_in_a_row = 0

    def observe(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """The alarms of a rollout. Values that raise an alarm are not added to the running statistics."""
        if self.config.action == "off":
            return []
        alarms = [
            *self._gradient_alarms(metrics),
            *self._reward_alarms(metrics),
            *self._push_alarms(metrics),
            *self._penalty_alarms(metrics),
            *self._ratio_alarms(metrics),
            *self._gap_alarms(metrics),
            *self._parity_alarms(metrics),
            *self._hacking_alarms(metrics),
            *self._idle_alarms(metrics),
        ]
        names = {alarm.name for alarm in alarms}
        if not names & {"grad_norm_range", "zero_gradient", "non_finite_gradient", "reward_range"}:
            self._norms = self._newest([*self._norms, metrics[GRAD_NORM]])
            self._rewards = self._newest([*self._rewards, metrics["reward/mean"]])
        counted = names & set(ENDED_BY_ROLLBACK) if self.rolls_back else names - set(ONLY_TOLD)
        self._alarms_in_a_row = self._alarms_in_a_row + 1 if counted else 0
        return alarms

    @property
    def acts(self) -> bool:
        """True if there were alarms in `patience` consecutive rollouts and the action is stop or rollback."""
        return self.config.action in ("stop", "rollback") and self._alarms_in_a_row >= self.config.patience

    @property
    def is_alarmed(self) -> bool:
        """True if the last rollout had an alarm that the action applies to."""
        return self._alarms_in_a_row > 0

    @property
    def rolls_back(self) -> bool:
        """True if the action is to return to the last checkpoint."""
        return self.config.action == "rollback"

    def reset(self) -> None:
        """Reset the count of consecutive alarms (after a rollback)."""
        self._alarms_in_a_row = 0
        self._parity = None

    # What is wrong ----------------------------------------------------------------------------------------------

    def _gradient_alarms(self, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        for name, norm in _named(metrics, GRAD_NORM):
            if not math.isfinite(norm):
                yield Alarm("non_finite_gradient", f"gradient norm {norm} is not finite ({name})")
            elif norm <= self.config.min_grad_norm:
                yield Alarm(
                    "zero_gradient",
                    f"gradient norm {norm:.3g} moves no weight ({name}, limit {self.config.min_grad_norm:g}); look at "
                    "advantage/abs_mean, and at what is masked or frozen",
                )
        norm = metrics[GRAD_NORM]
        if len(self._norms) < self.config.warmup or not math.isfinite(norm):
            return
        usual = statistics.median(self._norms)
        if norm > self.config.grad_norm_factor * usual:
            yield Alarm(
                "grad_norm_range",
                f"gradient norm {norm:.3g} is {norm / usual:.1f} times its running median {usual:.3g} "
                f"(limit {self.config.grad_norm_factor:g}); lower the learning rate if this goes on",
            )

    def _reward_alarms(self, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        reward = metrics["reward/mean"]
        is_comparable = self._learns_from_reward and metrics["group/trained_samples"] > 1
        if is_comparable and metrics["reward/min"] == metrics["reward/max"]:
            yield Alarm(
                "constant_reward",
                f"every sample of the rollout has the reward {reward:.3g}, so none is better than another; score "
                "samples that you can judge yourself, or give part marks",
            )
        if len(self._rewards) < self.config.warmup:
            return
        mean, spread = statistics.fmean(self._rewards), statistics.pstdev(self._rewards)
        if spread > 0 and reward < mean - self.config.reward_drop * spread:
            yield Alarm(
                "reward_range",
                f"reward {reward:.3g} fell {(mean - reward) / spread:.1f} running standard deviations below "
                f"{mean:.3g} (limit {self.config.reward_drop:g})",
            )

    def _push_alarms(self, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        for name, count in _named(metrics, CHANGED_TENSORS):
            if count == 0:
                yield Alarm(
                    "unchanged_push",
                    f"a push after an update brought the engine the weights that it had ({name} = 0), so it samples "
                    "from the same policy again; raise the learning rate, or push in sync.dtype: fp32 where updates "
                    "are smaller than the rounding",
                )

    def _penalty_alarms(self, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        for name, share in _named(metrics, PENALTY_SHARE):
            if share > self.config.penalty_share:
                yield Alarm(
                    "penalty_share",
                    f"the penalty towards the reference is {share:.0%} of the loss ({name}, limit "
                    f"{self.config.penalty_share:.0%}), so the run learns to stay where it is; lower algorithm.kl_coef",
                )

    def _ratio_alarms(self, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        for name in self._exact_ratios:
            distance = metrics.get(name, 0.0)
            if not distance <= self.config.first_ratio:
                yield Alarm(
                    "first_ratio",
                    f"a ratio before the first update is {distance:.3g} away from 1 ({name}, limit "
                    f"{self.config.first_ratio:g}): the old log-probs are not of the policy that is updated",
                )

    def _gap_alarms(self, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        for name, gap in _named(metrics, LOGP_GAP):
            known = self._gaps.get(name, [])
            usual = max(statistics.median(known), ROUNDING_GAP) if known else ROUNDING_GAP
            if len(known) >= self.config.warmup and not gap <= self.config.logp_gap_factor * usual:
                yield Alarm(
                    "logp_gap",
                    f"the engine's log-probs are {gap:.3g} from the trainer's ({name}), {gap / usual:.1f} times the "
                    f"running median {usual:.3g} (limit {self.config.logp_gap_factor:g}): it samples from other "
                    "weights, or in lower precision than they need by now",
                )
            else:
                self._gaps[name] = self._newest([*known, gap])

    def _parity_alarms(self, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        if PARITY[0] in metrics:
            engine, trainer, error, spread = (metrics[name] for name in PARITY)
            least = max(self.config.parity_gap * error, LEAST_PARITY_GAP * spread)
            self._parity = None
            if not abs(engine - trainer) <= least:
                self._parity = Alarm(
                    "reward_parity",
                    f"on the same held-out prompts the engine's samples have the mean reward {engine:.4g} and the "
                    f"trainer's {trainer:.4g}, {abs(engine - trainer):.3g} apart with a standard error of {error:.2g} "
                    f"(limit {least:.2g}): the engine does not sample as the trainer does; compare its weights, "
                    "guidance, solver, temperature and decoder with the recipe's",
                )
        if self._parity is not None:
            yield self._parity

    def _hacking_alarms(self, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        for name in ("reward/mean", *(f"reward/{name}/mean" for name in self._scorers)):
            if name in metrics:
                self._scores[name] = self._newest([*self._scores.get(name, []), metrics[name]])
        risen = self._drift("reward/mean")
        if risen <= self.config.scorer_drop:
            return
        for name in self._scorers:
            fallen = -self._drift(f"reward/{name}/mean")
            if fallen > self.config.scorer_drop:
                yield Alarm(
                    "reward_hacking",
                    f"scorer {name} fell by {fallen:.1f} standard errors within {self.config.window} rollouts while "
                    f"the reward rose by {risen:.1f} (limit {self.config.scorer_drop:g} each): the policy may exploit "
                    "the reward; look at samples/, weigh this scorer more, or raise algorithm.kl_coef",
                )

    def _idle_alarms(self, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        if WALL_S not in metrics:
            return
        for part in PARTS:
            share = metrics[f"schedule/{part}_idle_s"] / metrics[WALL_S]
            self._waits[part] = self._newest([*self._waits.get(part, []), share])
        shares = {part: statistics.fmean(self._waits[part]) for part in PARTS}
        part = max(PARTS, key=shares.__getitem__)
        if len(self._waits[part]) == self.config.window and shares[part] > self.config.idle_share:
            yield Alarm(
                "idle_part",
                f"the {part} waited {shares[part]:.0%} of the last {self.config.window} rollouts (limit "
                f"{self.config.idle_share:.0%}); give its devices to what never waits, or raise schedule.max_staleness",
            )

    def _drift(self, name: str) -> float:
        """Change of the mean from the first to the second half of the window, in standard errors; 0 until the window is
        full."""
        values = self._scores.get(name, [])
        if len(values) < self.config.window:
            return 0.0
        halves = values[: len(values) // 2], values[len(values) // 2 :]
        change = statistics.fmean(halves[1]) - statistics.fmean(halves[0])
        error = math.sqrt(sum(statistics.pvariance(half) / len(half) for half in halves))
        return change / error if error > 0 else math.copysign(math.inf, change) if change else 0.0

    def _newest(self, values: list[float]) -> list[float]:
        return values[-self.config.window :]

    # State ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:  # Any: JSON values
        """State for checkpoints."""
        return {
            "norms": self._norms,
            "rewards": self._rewards,
            "gaps": {name: list(values) for name, values in self._gaps.items()},
            "scores": {name: list(values) for name, values in self._scores.items()},
            "waits": {name: list(values) for name, values in self._waits.items()},
            "alarms": self._alarms_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: as in state_dict
        """Restore `state_dict`; alarms that are missing in an older state start empty."""
        self._norms, self._rewards = list(state["norms"]), list(state["rewards"])
        self._gaps = {name: list(values) for name, values in state.get("gaps", {}).items()}
        self._scores = {name: list(values) for name, values in state.get("scores", {}).items()}
        self._waits = {name: list(values) for name, values in state.get("waits", {}).items()}
        self._alarms_in_a_row = int(state["alarms"])


def _named(metrics: Mapping[str, float], name: str) -> Iterator[tuple[str, float]]:
    """A metric, and the same metric of policies or tracks (`<policy>/...`)."""
    return ((key, value) for key, value in metrics.items() if key == name or key.endswith(f"/{name}"))
