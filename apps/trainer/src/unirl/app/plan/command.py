"""The verb: seconds of one recipe, on published devices or on this machine; or a layout that fits them."""

from __future__ import annotations

import functools
import json
import shlex
import sys
from pathlib import Path

from unirl.app.command_line import Command
from unirl.app.plan.here import Here
from unirl.app.plan.layouts import Layout, Machine, Search, header, in_own_process, row
from unirl.app.plan.predict import predicted
from unirl.app.plan.rates import DEVICES, Clock, rates_of
from unirl.app.plan.report import as_json, lines, plan_of
from unirl.app.recipe import composed, settled
from unirl.app.rehearsal.command import USUAL_BYTES, for_devices, rehearsed, tokens_of_answers
from unirl.app.rehearsal.knobs import Changes, knobs_of
from unirl.app.rehearsal.report import FIXED_BYTES, NUM_HOLDERS, expected_bytes, limit_of, size_text
from unirl.config.check import check_recipe
from unirl.types.device_kinds import CPU, USUAL
from unirl.types.errors import ConfigError

HERE = "here"
"""What `--on` takes for this machine."""


def plan_recipe(command: Command) -> int:
    """Write the table, and JSON where --output says so; returns the exit status, 1 where no layout was found."""
    if {"gpus", "memory"} & set(command.options):
        return _plan_layout(command)
    config = composed(command, command.recipe)
    on = str(command.options.get("on", HERE if config.get("device") == CPU else next(iter(DEVICES))))
    run = check_recipe(settled(config)) if on == HERE else for_devices(config)
    rates = None if on == HERE else rates_of(on)
    if rates is None and run.num_devices > 1:
        raise ConfigError(f"--on {HERE} times one process, and the recipe has {run.num_devices}. Set num_devices=1.")
    found = rehearsed(run, USUAL_BYTES if rates is None else rates.memory_bytes, tokens_of_answers(command))
    clock: Clock = Here(run.device) if rates is None else rates
    plan = plan_of(run, found, predicted(found, clock), clock)
    shown = [*lines(plan), *(f"  {remark}" for remark in (*clock.remarks(), *found.notes))]
    _write(*shown)
    _write_json(command, as_json(plan))
    return 0


def _plan_layout(command: Command) -> int:
    """Search, one line for each layout as soon as it was rehearsed."""
    on = str(command.options.get("on", next(iter(DEVICES))))
    if on == HERE:
        raise ConfigError(f"--gpus and --memory are of devices that --on names: {', '.join(DEVICES)}, not {HERE}.")
    rates = rates_of(on)
    memory = limit_of(str(command.options["memory"]), "--memory") if "memory" in command.options else rates.memory_bytes
    if memory <= FIXED_BYTES:
        raise ConfigError(f"--memory {size_text(memory)} is no more than a device takes for its context and libraries.")
    machine, start = Machine(command.recipe, on, memory, tokens_of_answers(command)), _start(command)
    num_devices = for_devices(composed(Command("plan", command.recipe, start))).num_devices
    devices = f"{num_devices} device{'s' if num_devices > 1 else ''}"
    _write(f"{command.recipe} on {devices} of {size_text(memory)}, {rates.name}: GB by phase, each rehearsed")
    search, phases, tried = Search(machine, functools.partial(in_own_process, machine)), list[str](), list[Layout]()
    for layout in search.layouts(start):
        if not tried:
            phases += layout.peaks
            _write(header(phases))
        tried.append(layout)
        _write(row(search, layout, phases, start))
    found = search.found or tried[0]
    _write_json(command, {"fits": search.fits(found), "layouts": [_as_json(search, each) for each in tried]})
    if search.fits(found):
        _write(f"fits: {shlex.join(('trainer', command.recipe, *found.changes))}")
        return 0
    _write(*_refused(found, len(tried), memory))
    return 1


def _start(command: Command) -> Changes:
    """What is typed, and what --gpus says."""
    config, changes = composed(command), list(command.overrides)
    if "gpus" in command.options:
        num = int(command.options["gpus"])
        if num < 1:
            raise ConfigError(f"--gpus takes the number of devices, at least 1, not {num}.")
        if any(word.startswith("num_devices=") for word in command.overrides):
            raise ConfigError("--gpus is num_devices. Give one of them.")
        changes.append(f"num_devices={num}")
        if num > 1 and config.get("runtime") == "local":
            changes.append("runtime=ray")
    if config.get("device") == CPU:
        changes.append(f"device={USUAL}")
    return tuple(changes)


def _refused(layout: Layout, num_tried: int, memory: float) -> list[str]:
    """Why no layout fits."""
    peak = layout.peaks[layout.most]
    largest = sorted(peak.parts.items(), key=lambda part: -part[1])[:NUM_HOLDERS]
    return [
        f"no layout fits {size_text(memory)}. The smallest of {num_tried} takes {size_text(peak.num_bytes)} in "
        f"{layout.most}, {size_text(expected_bytes(peak.num_bytes))} on a real device; what holds most of it:",
        *(f"  {name} {size_text(size)}{_left(layout.most, name)}" for name, size in largest),
    ]


def _left(phase: str, category: str) -> str:
    """What a search leaves to the user."""
    names = [knob.says for knob in knobs_of(phase, category) if knob.proposes is None]
    return f": left to you: {', or '.join(names)}" if names else ""


def _as_json(search: Search, layout: Layout) -> dict[str, object]:
    return {
        "changes": list(layout.changes),
        "fits": search.fits(layout),
        "error": layout.error,
        "step_s": layout.step_s,
        "seconds": dict(layout.seconds),
        "peaks": {phase: dict(peak.parts) for phase, peak in layout.peaks.items()},
    }


def _write(*shown: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in shown))
    sys.stdout.flush()


def _write_json(command: Command, content: object) -> None:
    if "output" in command.options:
        Path(str(command.options["output"])).write_text(json.dumps(content, indent=1), encoding="utf-8")
