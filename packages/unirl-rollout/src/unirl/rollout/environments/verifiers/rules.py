"""What a task set of verifiers needs of a recipe and of a machine. See `unirl.types.recipe`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from unirl.types.recipe import Fault, Machine, Messages, Part, Run

_TIMEOUT_S = 60.0
_LOOKS = (
    "import importlib.util, sys\n"
    "sys.exit(' and '.join(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None) or None)"
)


def episodes_end_before_their_process(own: Part, run: Run) -> Messages:
    """A turn that takes too long fails its own episode, before the process with all of its episodes is replaced."""
    for stage in run.stages:
        if stage.turns is None or stage.turns.inner.get("environment") is not own:
            continue
        own_s, step_s = own.get("timeout_s"), stage.turns.get("step_timeout_s")
        if own_s >= step_s:
            yield (
                f"{own.at}.timeout_s = {own_s:g} reaches {stage.turns.at}.step_timeout_s = {step_s:g}: a slow task "
                "would lose its process, and all of its episodes. Raise the last, or lower the first."
            )


def library_is_there(own: Part, run: Run, machine: Machine) -> Messages:
    """The interpreter exists, and finds the library and what plays it."""
    given = own.node.get("python")
    python = Path(sys.executable if given is None else str(given)).expanduser()
    if not python.is_file():
        yield f"{own.at}.python = {given}: no such interpreter. Make an environment with verifiers and unirl-rollout."
        return
    command = [str(python.absolute()), "-c", _LOOKS, "verifiers", "unirl"]
    try:
        looked = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Fault(f"{own.at}.python = {given} cannot be run: {error}")
        return
    if looked.returncode:
        last = looked.stderr.strip().splitlines()[-1:] or ["nothing"]
        where = "this environment" if given is None else f"the environment of {own.at}.python = {given}"
        yield (
            f"{own.at}: {where} does not find {last[0].replace('unirl', 'unirl-rollout')}. Install it there; verifiers "
            "0.4 needs other libraries than training does, so name the interpreter of an environment that has it."
        )


MACHINE_RULES = (library_is_there,)
RULES = (episodes_end_before_their_process,)
