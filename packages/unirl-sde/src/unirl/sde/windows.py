"""Which steps of a schedule are stochastic in a given rollout: pure functions of the rollout id.

Each class answers `indices(rollout_id)`, sorted, inside 0 .. num_steps - 1. None keeps state, so any process at any
time (also after a resume) gets the same answer, and random choices come from the hash of `unirl.sde.noise`, which
depends on no library's generator. All are frozen dataclasses; bad constructor arguments raise ValueError.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, ClassVar, Literal, Protocol, get_args

from unirl.sde.bounds import Bounds, check_bounds
from unirl.sde.noise import noise_seed

WindowStrategy = Literal["progressive", "random", "decay", "exp_decay"]

# fraction * num_steps of an exact share may fall an ulp short of the integer (0.29 * 100 = 28.999...).
_ROUNDING = 1e-9


class IndexScheduler(Protocol):
    """Anything that names the stochastic steps of a rollout."""

    def indices(self, rollout_id: int) -> list[int]:
        """The stochastic steps of rollout `rollout_id` (>= 0), sorted and distinct."""
        ...


class StepWindow:
    """Base of the schedulers, with what recipes are checked against."""

    takes_every_step: ClassVar[bool] = False
    """True if every step is stochastic, but for the last where `exclude_last` says so."""
    varies: ClassVar[bool] = False
    """True if rollouts may have different steps."""


@dataclass(frozen=True)
class AllSteps(StepWindow):
    """Every step; without the last if `exclude_last`, whose noise is never denoised."""

    takes_every_step: ClassVar[bool] = True
    num_steps: Annotated[int, Bounds(ge=1)]
    exclude_last: bool = False

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.exclude_last and self.num_steps == 1:
            raise ValueError("num_steps = 1 with exclude_last leaves no stochastic step.")

    def indices(self, rollout_id: int) -> list[int]:
        _check_rollout_id(rollout_id)
        return list(range(self.num_steps - self.exclude_last))


@dataclass(frozen=True)
class FirstFraction(StepWindow):
    """The first int(fraction * num_steps) steps. Flow-GRPO trains a fraction of 0.99: all but the last."""

    num_steps: Annotated[int, Bounds(ge=1)]
    fraction: Annotated[float, Bounds(gt=0, le=1)]
    """In (0, 1]; must leave at least one step."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not 0 < self.fraction <= 1 or self._count() == 0:
            raise ValueError(
                f"fraction = {self.fraction} of num_steps = {self.num_steps} leaves no stochastic step or exceeds all: "
                f"it must lie in [{1 / self.num_steps:g}, 1]."
            )

    def _count(self) -> int:
        return int(self.fraction * self.num_steps + _ROUNDING)

    def indices(self, rollout_id: int) -> list[int]:
        _check_rollout_id(rollout_id)
        return list(range(self._count()))


@dataclass(frozen=True)
class RandomSubset(StepWindow):
    """`num_sde_steps` distinct steps, drawn anew for every rollout from a stretch of the schedule."""

    varies: ClassVar[bool] = True
    num_steps: Annotated[int, Bounds(ge=1)]
    num_sde_steps: Annotated[int, Bounds(ge=1)]
    fraction: Annotated[tuple[float, float], Bounds(ge=0, le=1)] = (0.0, 1.0)
    """The stretch: steps int(a num_steps) up to, not including, int(b num_steps)."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_bounds(self)
        start, end = self.fraction
        if not 0 <= start < end <= 1:
            raise ValueError(f"fraction = {tuple(self.fraction)} must satisfy 0 <= start < end <= 1.")
        if not 1 <= self.num_sde_steps <= len(self._pool()):
            raise ValueError(
                f"num_sde_steps = {self.num_sde_steps} cannot be drawn from the {len(self._pool())} steps that "
                f"fraction = {tuple(self.fraction)} of num_steps = {self.num_steps} leaves."
            )

    def _pool(self) -> range:
        start, end = (int(share * self.num_steps + _ROUNDING) for share in self.fraction)
        return range(start, end)

    def indices(self, rollout_id: int) -> list[int]:
        """See `IndexScheduler.indices`. Every subset of the stretch is equally likely."""
        _check_rollout_id(rollout_id)
        drawn = sorted(self._pool(), key=lambda step: noise_seed(self.seed, f"sde_subset::{rollout_id}::{step}"))
        return sorted(drawn[: self.num_sde_steps])


@dataclass(frozen=True, init=False)
class ExplicitSteps(StepWindow):
    """The same given steps in every rollout. Empty means a deterministic rollout; only this class allows it."""

    steps: tuple[int, ...]
    """Sorted and distinct."""

    def __init__(self, indices: Sequence[int]) -> None:
        steps = tuple(sorted(int(step) for step in indices))
        if len(set(steps)) != len(steps) or any(step < 0 for step in steps):
            raise ValueError(f"indices = {list(indices)} must be distinct and not negative.")
        object.__setattr__(self, "steps", steps)

    def indices(self, rollout_id: int) -> list[int]:
        _check_rollout_id(rollout_id)
        return list(self.steps)


@dataclass(frozen=True)
class MixGRPOWindow(StepWindow):
    """A window of consecutive stochastic steps that moves through the schedule as training goes on.

    A window starts at init, init + stride, ... and ends at max_step at the latest: the last one is pulled back so that
    it is whole. So every rollout has window_size stochastic steps, and with stride <= window_size every step from init
    on is visited. (The published code lets the last windows shrink, down to empty ones.) After the last window the
    scheduler stays there, or returns to the first if `roll_back`. A setting that the strategy does not use must keep
    its default. Source: MixGRPO (arXiv 2507.21802), its sliding window.
    """

    varies: ClassVar[bool] = True
    num_steps: Annotated[int, Bounds(ge=1)]
    window_size: Annotated[int, Bounds(ge=1)] = 4
    iters_per_window: Annotated[int, Bounds(ge=1)] = 25
    """Rollouts a window stays; the two decays shorten it as the window moves on."""
    stride: Annotated[int, Bounds(ge=0)] = 1
    """Steps a window moves by; 0 freezes it at `init`. Published: 1. An overlap o means window_size - o."""
    strategy: WindowStrategy = "progressive"
    """progressive: every window stays equally long. random: a new start, uniform over all whole windows, every
    iters_per_window rollouts. decay: the stay falls linearly, from iters_per_window at step 0 to min_iters at max_step.
    exp_decay: the stay is ceil(iters_per_window e^(-decay_rate relu(start - decay_knee)))."""
    init: Annotated[int, Bounds(ge=0)] = 0
    """First step of the first window."""
    max_step: Annotated[int, Bounds(ge=1)] | None = None
    """Windows end before this step; None means num_steps. MixGRPO uses num_steps - 2."""
    roll_back: bool = False
    """Start again at `init` after the last window; all strategies but random."""
    seed: int = 0
    """Seed of the random strategy; has no influence on the others."""
    min_iters: Annotated[int, Bounds(ge=1)] = 1
    """Shortest stay of a window; both decays."""
    decay_rate: Annotated[float, Bounds(ge=0)] = 0.1
    """Per step; exp_decay only."""
    decay_knee: int = 13
    """Step up to which the stay is not shortened; exp_decay only."""
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.strategy not in get_args(WindowStrategy):
            raise ValueError(f"strategy = {self.strategy!r} is not one of {get_args(WindowStrategy)}.")
        if not 1 <= self._max_step <= self.num_steps:
            raise ValueError(f"max_step = {self.max_step} must lie in 1 .. num_steps = {self.num_steps}.")
        if self.init + self.window_size > self._max_step:
            raise ValueError(
                f"init + window_size = {self.init} + {self.window_size} = {self.init + self.window_size} exceeds "
                f"max_step = {self._max_step}: no whole window fits."
            )
        if self.min_iters > self.iters_per_window:
            raise ValueError(f"min_iters = {self.min_iters} exceeds iters_per_window = {self.iters_per_window}.")
        for name, value, default, users in (
            ("roll_back", self.roll_back, False, ("progressive", "decay", "exp_decay")),
            ("min_iters", self.min_iters, 1, ("decay", "exp_decay")),
            ("decay_rate", self.decay_rate, 0.1, ("exp_decay",)),
            ("decay_knee", self.decay_knee, 13, ("exp_decay",)),
        ):
            if value != default and self.strategy not in users:
                raise ValueError(
                    f"{name} = {value} has no effect with strategy = {self.strategy!r}, only with {users}."
                )
        last = self._max_step - self.window_size
        starts = (self.init,) if self.stride == 0 else (*range(self.init, last, self.stride), last)
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_ends", tuple(accumulate(self.stay(start) for start in starts)))

    @property
    def _max_step(self) -> int:
        return self.num_steps if self.max_step is None else self.max_step

    def stay(self, start: int) -> int:
        """Rollouts for which a window starting at `start` stays, at least 1."""
        if self.strategy == "decay":
            fallen = (self.iters_per_window - self.min_iters) * start / self._max_step
            return max(self.min_iters, int(self.iters_per_window - fallen + _ROUNDING))
        if self.strategy == "exp_decay":
            past_knee = max(0, start - self.decay_knee)
            stay = math.ceil(self.iters_per_window * math.exp(-self.decay_rate * past_knee) - _ROUNDING)
            return max(self.min_iters, stay)
        return self.iters_per_window

    def start(self, rollout_id: int) -> int:
        """First step of the window of rollout `rollout_id`."""
        _check_rollout_id(rollout_id)
        if self.strategy == "random":
            num_starts = self._max_step - self.window_size - self.init + 1 if self.stride else 1
            drawn = noise_seed(self.seed, f"sde_window::{rollout_id // self.iters_per_window}")
            return self.init + drawn % num_starts
        total = self._ends[-1]
        elapsed = rollout_id % total if self.roll_back else min(rollout_id, total - 1)
        return next(start for start, end in zip(self._starts, self._ends, strict=True) if elapsed < end)

    def indices(self, rollout_id: int) -> list[int]:
        """See `IndexScheduler.indices`; always window_size consecutive steps."""
        start = self.start(rollout_id)
        return list(range(start, start + self.window_size))


def _check_rollout_id(rollout_id: int) -> None:
    if rollout_id < 0:
        raise ValueError(f"rollout_id = {rollout_id} must not be negative.")
