"""The verb: one recipe, or all that are packaged for real models."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING

from unirl.app.command_line import Command
from unirl.app.recipe import composed, settled
from unirl.app.rehearsal.rehearse import Rehearsed, rehearse
from unirl.app.rehearsal.report import limit_of, lines, verdict
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
    is_all = "all" in command.options
    names = [name for name in available() if not name.startswith(WORLDS)] if is_all else [command.recipe]
    limit = limit_of(str(command.options["fits"])) if "fits" in command.options else None
    device_bytes = limit or USUAL_BYTES
    failed = 0
    for name in names:
        try:
            found = rehearsed(for_devices(composed(command, name)), device_bytes)
        except UniRLError as error:
            if not is_all:
                raise
            sys.stdout.write(f"{name}: not rehearsed: {error}\n")
            sys.stdout.flush()
            failed += 1
            continue
        shown = list(lines(found))
        if limit is not None:
            fits, said = verdict(found, limit)
            failed += not fits
            shown += said
        sys.stdout.write("".join(f"{line}\n" for line in shown))
        sys.stdout.flush()
    return int(failed > 0)


def for_devices(config: DictConfig) -> ComposedRun:
    """The checked run of a recipe; `device: auto` is a GPU, also on a machine without one."""
    if config.get("device") == "auto":
        config.device = USUAL
    return check_recipe(settled(config))


def rehearsed(run: ComposedRun, device_bytes: float) -> Rehearsed:
    """Raises ConfigError for a recipe that cannot be rehearsed, with the line that stands in the way."""
    try:
        return rehearse(run, device_bytes)
    except UniRLError:
        raise
    except Exception as error:  # whatever a model's code does with a tensor that has no values
        places = [own_place(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        place = next((place for place in reversed(places) if place is not None), "a library")
        said = next(iter(str(error).splitlines()), "")
        raise ConfigError(f"cannot be rehearsed: {place}: {type(error).__name__}: {said}") from error
