"""What a rehearsal and a plan say of a recipe, as JSON on standard output. The pretend device needs a process.

python -m unirl.app.device_report.rehearsed RECIPE [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from unirl.app.command_line import Command
from unirl.app.environment import prepare_process
from unirl.app.plan.here import Here
from unirl.app.plan.predict import Seconds, predicted
from unirl.app.recipe import composed
from unirl.app.rehearsal.command import USUAL_BYTES, for_devices, rehearsed
from unirl.app.rehearsal.rehearse import Rehearsed
from unirl.types.device_kinds import USUAL

DEVICE = "device="


def told(found: Rehearsed, planned: Mapping[str, Seconds]) -> dict[str, Any]:
    """The bytes and operations of a rehearsal, and the seconds of a plan."""
    return {
        "seconds": {phase: seconds.wall_s for phase, seconds in planned.items()},
        "bytes": {phase: peak.num_bytes for phase, peak in found.peaks.items()},
        "parts": {phase: dict(peak.parts) for phase, peak in found.peaks.items()},
        "flops": dict(found.flops),
        "cpu_s": found.cpu_s,
        "notes": list(found.notes),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Rehearse one recipe, on the usual device, and time its operators on the one that it names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(argv)
    prepare_process()
    named = [each for each in given.overrides if each.startswith(DEVICE)]
    overrides = [each for each in given.overrides if each not in named]
    config = composed(Command("rehearse", given.recipe, (*overrides, f"device={USUAL}")))
    found = rehearsed(for_devices(config), USUAL_BYTES)
    clock = Here(named[-1].removeprefix(DEVICE) if named else "cpu")
    sys.stdout.write(json.dumps(told(found, predicted(found, clock))) + "\n")


if __name__ == "__main__":
    main()
