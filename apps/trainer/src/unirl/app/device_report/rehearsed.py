"""What a rehearsal says of a recipe, as JSON on standard output. A process of itself registers the pretend device.

python -m unirl.app.device_report.rehearsed RECIPE [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from unirl.app.command_line import Command
from unirl.app.environment import prepare_process
from unirl.app.recipe import composed, settled
from unirl.app.rehearsal.command import USUAL_BYTES
from unirl.app.rehearsal.rehearse import Rehearsed, rehearse
from unirl.config.check import check_recipe
from unirl.types.device_kinds import USUAL


def told(found: Rehearsed) -> dict[str, Any]:
    """The bytes and operations of a rehearsal."""
    return {
        "bytes": {phase: peak.num_bytes for phase, peak in found.peaks.items()},
        "parts": {phase: dict(peak.parts) for phase, peak in found.peaks.items()},
        "flops": dict(found.flops),
        "cpu_s": found.cpu_s,
        "notes": list(found.notes),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Rehearse one recipe, on the usual device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(argv)
    prepare_process()
    overrides = [each for each in given.overrides if not each.startswith("device=")]
    config = composed(Command("rehearse", given.recipe, (*overrides, f"device={USUAL}")))
    sys.stdout.write(json.dumps(told(rehearse(check_recipe(settled(config)), USUAL_BYTES))) + "\n")


if __name__ == "__main__":
    main()
