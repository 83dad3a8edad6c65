"""What the tests of rehearsals share."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

from unirl.app.command_line import parse
from unirl.app.recipe import composed, settled
from unirl.config.check import check_recipe
from unirl.config.runs import ComposedRun


def trainer(*words: str) -> subprocess.CompletedProcess[str]:
    """A separate process: a rehearsal registers a device for good."""
    command = [str(Path(sys.executable).parent / "trainer"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


rehearse = partial(trainer, "rehearse")


def checked(*words: str) -> ComposedRun:
    """The run of a recipe with changes."""
    return check_recipe(settled(composed(parse(["rehearse", *words]))))


def tflop(*words: str) -> dict[str, float]:
    """TFLOP of a rehearsed step by phase."""
    done = rehearse(*words)
    assert done.returncode == 0, done.stderr
    return tflop_of(done.stdout)


def tflop_of(shown: str) -> dict[str, float]:
    """The same, of what a rehearsal says."""
    [line] = re.findall(r"TFLOP of a step, per device: (.*)", shown)
    return {phase: float(value) for phase, value in (each.split() for each in line.split(", "))}


def peaks_of(shown: str) -> dict[str, float]:
    """Bytes by phase."""
    units = {"MB": 1e6, "GB": 1e9}
    found = re.finditer(r"^  (\w+) +([\d.]+) ([MG]B) per device", shown, re.M)
    return {match[1]: float(match[2]) * units[match[3]] for match in found}
