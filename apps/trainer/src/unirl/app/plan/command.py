"""The verb: seconds of one recipe, on published devices or on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from unirl.app.command_line import Command
from unirl.app.plan.here import Here
from unirl.app.plan.predict import predicted
from unirl.app.plan.rates import DEVICES, Clock, rates_of
from unirl.app.plan.report import as_json, lines, plan_of
from unirl.app.recipe import composed, settled
from unirl.app.rehearsal.command import USUAL_BYTES, for_devices, rehearsed
from unirl.config.check import check_recipe
from unirl.types.errors import ConfigError

HERE = "here"
"""What `--on` takes for this machine."""


def plan_recipe(command: Command) -> None:
    """Write the table, and JSON where --output says so."""
    config = composed(command, command.recipe)
    on = str(command.options.get("on", HERE if config.get("device") == "cpu" else next(iter(DEVICES))))
    run = check_recipe(settled(config)) if on == HERE else for_devices(config)
    rates = None if on == HERE else rates_of(on)
    if rates is None and run.num_devices > 1:
        raise ConfigError(f"--on {HERE} times one process, and the recipe has {run.num_devices}. Set num_devices=1.")
    found = rehearsed(run, USUAL_BYTES if rates is None else rates.memory_bytes)
    clock: Clock = Here(run.device) if rates is None else rates
    plan = plan_of(run, found, predicted(found, clock), clock)
    shown = [*lines(plan), *(f"  {remark}" for remark in (*clock.remarks(), *found.notes))]
    sys.stdout.write("".join(f"{line}\n" for line in shown))
    if "output" in command.options:
        Path(str(command.options["output"])).write_text(json.dumps(as_json(plan), indent=1), encoding="utf-8")
