"""The verb: one recipe, or all that are packaged for real models."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from unirl.app.command_line import Command
from unirl.app.environment import prepare_process
from unirl.app.recipe import composed, settled
from unirl.app.rehearsal.rehearse import Rehearsed, rehearse
from unirl.app.rehearsal.report import limit_of, lines, verdict
from unirl.app.rehearsal.share import ANSWER_TOKENS
from unirl.config.catalog import available
from unirl.config.check import check_recipe
from unirl.config.runs import ComposedRun
from unirl.rehearsal.mode import own_place
from unirl.types.device_kinds import USUAL
from unirl.types.errors import ConfigError, UniRLError

if TYPE_CHECKING:
    from omegaconf import DictConfig

WORLDS = "worlds/"
"""Recipes of small models that come with the trainer, which run on any machine."""
USUAL_BYTES = 80e9
"""Memory of a device, if --fits does not say: some engines take a share of it."""


def rehearse_recipes(command: Command) -> int:
    """Write a table for each; returns the exit status, 1 where one does not fit or cannot be rehearsed."""
    limit = limit_of(str(command.options["fits"])) if "fits" in command.options else None
    num_jobs = int(command.options.get("jobs", 1))
    if num_jobs < 1 or ("jobs" in command.options and "all" not in command.options):
        raise ConfigError(f"--jobs {num_jobs}: rehearsals at a time, 1 or more, for rehearse --all alone")
    tokens_of_answers(command)
    if "all" not in command.options:
        report = _report(command, limit, command.recipe)
        sys.stdout.write(report.text)
        return int(not report.is_well)
    names = [name for name in available() if not name.startswith(WORLDS)]
    is_well = True
    for report in _reports(partial(_report_or_reason, command, limit), names, num_jobs):
        sys.stdout.write(report.text)
        sys.stdout.flush()
        is_well = is_well and report.is_well
    return int(not is_well)


@dataclass(frozen=True)
class _Report:
    text: str
    is_well: bool
    """Rehearsed, and it fits where a limit was given."""


def _reports(report: Callable[[str], _Report], names: Sequence[str], num_jobs: int) -> Iterator[_Report]:
    """Reports in the order of their names, made by so many processes; by this one alone if it is one."""
    if num_jobs == 1:
        yield from map(report, names)
        return
    with ProcessPoolExecutor(num_jobs, multiprocessing.get_context("spawn"), prepare_process) as pool:
        yield from pool.map(report, names)


def _report(command: Command, limit: float | None, name: str) -> _Report:
    found = rehearsed(for_devices(composed(command, name)), limit or USUAL_BYTES, tokens_of_answers(command))
    fits, said = verdict(found, limit) if limit is not None else (True, [])
    return _Report("".join(f"{line}\n" for line in (*lines(found), *said)), fits)


def _report_or_reason(command: Command, limit: float | None, name: str) -> _Report:
    try:
        return _report(command, limit, name)
    except UniRLError as error:
        return _Report(f"{name}: not rehearsed: {error}\n", is_well=False)


def for_devices(config: DictConfig) -> ComposedRun:
    """The checked run of a recipe; `device: auto` is a GPU, also on a machine without one."""
    if config.get("device") == "auto":
        config.device = USUAL
    return check_recipe(settled(config))


def tokens_of_answers(command: Command) -> int:
    """Tokens of what environments answer to a turn. Raises ConfigError for a negative number."""
    num = int(command.options.get("answer_tokens", ANSWER_TOKENS))
    if num < 0:
        raise ConfigError(f"--answer-tokens {num}: what an environment answers to a turn has 0 tokens or more")
    return num


def rehearsed(run: ComposedRun, device_bytes: float, answer_tokens: int = ANSWER_TOKENS) -> Rehearsed:
    """Raises ConfigError for a recipe that cannot be rehearsed, with the line that stands in the way."""
    try:
        return rehearse(run, device_bytes, answer_tokens)
    except UniRLError:
        raise
    except Exception as error:  # whatever a model's code does with a tensor that has no values
        places = [own_place(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        place = next((place for place in reversed(places) if place is not None), "a library")
        said = next(iter(str(error).splitlines()), "")
        raise ConfigError(f"cannot be rehearsed: {place}: {type(error).__name__}: {said}") from error
