"""`trainer plan --gpus N --memory 80GB`: a layout of a recipe that fits, then one that is faster.

A short greedy search. The phase and the category that hold most name the knobs (`unirl.app.rehearsal.knobs`), one of
which is turned at a time; every layout is rehearsed, in a process that does nothing else, since a peak is that of the
first step of a process.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from unirl.app.command_line import Command
from unirl.app.environment import prepare_process
from unirl.app.plan.predict import STEP, predicted
from unirl.app.plan.rates import rates_of
from unirl.app.plan.report import plan_of
from unirl.app.recipe import composed
from unirl.app.rehearsal.categories import ACTIVATIONS
from unirl.app.rehearsal.command import for_devices, rehearsed
from unirl.app.rehearsal.knobs import Changes, Knob, knobs_of
from unirl.app.rehearsal.report import FIXED_BYTES, GB, SLACK, expected_bytes
from unirl.app.rehearsal.share import ANSWER_TOKENS
from unirl.config.runs import ComposedRun
from unirl.rehearsal.ledger import Peak
from unirl.types.errors import ConfigError, UniRLError

MOST_SMALLER, MOST_FASTER = 8, 4
"""Rehearsals until a layout fits, and after it."""
SMALLEST = 0.03
"""Share of a peak from which on a category is worth a rehearsal."""
GAIN = 0.01
"""Share of a step that a faster layout must save."""


@dataclass(frozen=True)
class Machine:
    """What a layout is for."""

    recipe: str
    device: str
    """A name of `unirl.app.plan.rates.DEVICES`."""
    memory_bytes: float
    answer_tokens: int = ANSWER_TOKENS
    """What an environment answers to a turn has so many."""


@dataclass(frozen=True)
class Layout:
    """One set of changes, and what a rehearsal says of it."""

    changes: Changes
    peaks: Mapping[str, Peak]
    """By phase."""
    seconds: Mapping[str, float]
    """By phase of a step."""
    error: str | None = None
    """Why it could not be rehearsed; peaks and seconds are empty then."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.get(phase, 0.0) for phase in STEP)

    @property
    def most(self) -> str:
        """The phase that takes most of the device."""
        return max(self.peaks, key=lambda phase: self.peaks[phase].num_bytes)

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return self.peaks[self.most].num_bytes


Rehearse = Callable[[Changes], Layout]


def in_own_process(machine: Machine, changes: Changes) -> Layout:
    """The rehearsal of a layout in a new process."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(rehearse_layout, machine, changes).result()
        except UniRLError as error:
            return Layout(changes, {}, {}, next(iter(str(error).splitlines()), type(error).__name__))
        except BrokenProcessPool:
            return Layout(changes, {}, {}, "the process was ended from outside, perhaps for lack of host memory")


def rehearse_layout(machine: Machine, changes: Changes) -> Layout:
    """The rehearsal of a layout in this process. Raises ConfigError as `rehearsed` does."""
    prepare_process()
    run, rates = checked(machine, changes), rates_of(machine.device)
    found = rehearsed(run, machine.memory_bytes, machine.answer_tokens)
    plan = plan_of(run, found, predicted(found, rates), rates)
    return Layout(changes, found.peaks, {name: phase.wall_s for name, phase in plan.phases.items()})


def checked(machine: Machine, changes: Changes) -> ComposedRun:
    """The run with these changes. Raises ConfigError if they do not go together."""
    return for_devices(composed(Command("plan", machine.recipe, changes)))


class Search:
    """Finds a layout that fits. `found` is the best one so far, and None until one was rehearsed."""

    def __init__(self, machine: Machine, rehearse: Rehearse) -> None:
        self._machine, self._rehearse = machine, rehearse
        self._useless = set[Knob]()
        """Knobs that could not be rehearsed, or made nothing smaller or faster."""
        self.found: Layout | None = None

    def layouts(self, start: Changes) -> Iterator[Layout]:
        """Every layout once it was rehearsed, the one to start from first. Raises ConfigError if that fails."""
        first = self._rehearse(start)
        if first.error is not None:
            raise ConfigError(first.error)
        self.found = first
        yield first
        for _ in range(MOST_SMALLER - 1):
            if self.fits(self.found):
                break
            proposal = self._smaller(self.found)
            if proposal is None:
                return
            yield self._tried(*proposal, lambda new, old: new.num_bytes < old.num_bytes)
        self._useless.clear()
        for _ in range(MOST_FASTER if self.fits(self.found) else 0):
            proposal = self._faster(self.found)
            if proposal is None:
                return
            yield self._tried(*proposal, lambda new, old: self.fits(new) and new.step_s < (1 - GAIN) * old.step_s)

    def fits(self, layout: Layout) -> bool:
        """True if a real device is large enough for what was counted."""
        return layout.error is None and expected_bytes(layout.num_bytes) <= self._machine.memory_bytes

    def _tried(self, knob: Knob, changes: Changes, is_better: Callable[[Layout, Layout], bool]) -> Layout:
        layout = self._rehearse(changes)
        if layout.error is None and self.found is not None and is_better(layout, self.found):
            self.found = layout
        else:
            self._useless.add(knob)
        return layout

    def _smaller(self, layout: Layout) -> tuple[Knob, Changes] | None:
        """The next knob, and the changes with it: the cheapest of those that make the peak's larger categories
        smaller, by as much as is too much."""
        peak = layout.peaks[layout.most]
        excess = peak.num_bytes - self._counted_bytes
        options = [
            (knob.cost, -size, knob)
            for category, size in peak.parts.items()
            if size >= SMALLEST * peak.num_bytes
            for knob in knobs_of(layout.most, category)
        ]
        for _, size, knob in sorted(options, key=lambda option: option[:2]):
            changes = self._accepted(layout, knob, max(0.0, 1 + excess / size))
            if changes is not None:
                return knob, changes
        return None

    def _faster(self, layout: Layout) -> tuple[Knob, Changes] | None:
        """The next knob that lets the slowest phase take more of the memory."""
        for phase in sorted(layout.seconds, key=lambda phase: -layout.seconds[phase]):
            used = layout.peaks[phase].parts.get(ACTIVATIONS, 0) if phase in STEP and phase in layout.peaks else 0
            if not used:
                continue
            room = 1 + (self._counted_bytes - layout.peaks[phase].num_bytes) / used
            for knob in sorted(knobs_of(phase, ACTIVATIONS), key=lambda knob: -knob.cost):
                changes = self._accepted(layout, knob, room) if room > 1 else None
                if changes is not None:
                    return knob, changes
        return None

    @property
    def _counted_bytes(self) -> float:
        """Counted bytes that a device takes."""
        return (self._machine.memory_bytes - FIXED_BYTES) / SLACK

    def _accepted(self, layout: Layout, knob: Knob, fraction: float) -> Changes | None:
        """The first changes of a knob that the recipe's rules let pass."""
        if knob in self._useless or knob.proposes is None:
            return None
        for more in knob.proposes(checked(self._machine, layout.changes), fraction):
            changes = merged(layout.changes, more)
            try:
                checked(self._machine, changes)
            except ConfigError:
                continue
            return changes
        return None


def merged(changes: Changes, more: Changes) -> Changes:
    """Both, of two values of a key the later."""
    keys = {each.partition("=")[0].lstrip("+") for each in more}
    return (*(each for each in changes if each.partition("=")[0].lstrip("+") not in keys), *more)


def header(phases: Iterable[str]) -> str:
    """Names of the columns of `row`."""
    return f"  {''.join(f'{phase:>9}' for phase in phases)}{'step':>9}  fits  changes"


def row(search: Search, layout: Layout, phases: Iterable[str], start: Changes) -> str:
    """Peaks in GB by phase, seconds of a step, and the changes besides those of the start."""
    changes = " ".join(change for change in layout.changes if change not in start) or "none"
    if layout.error is not None:
        return f"  not rehearsed: {changes}: {layout.error}"
    sizes = (f"{layout.peaks[phase].num_bytes / GB:9.3g}" if phase in layout.peaks else f"{'-':>9}" for phase in phases)
    fits = "yes" if search.fits(layout) else "no"
    return f"  {''.join(sizes)}{f'{layout.step_s:.3g} s':>9}  {fits:4}  {changes}"
