"""What a scorer in a child process needs of a machine. See `unirl.types.recipe`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from unirl.types.recipe import Fault, Machine, Messages, Part, Run

_TIMEOUT_S = 60.0
_LOOKS = (
    "import importlib.util, sys\n"
    "found = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]\n"
    "sys.exit(' '.join(found) or None)"
)


def environment_is_there(own: Part, run: Run, machine: Machine) -> Messages:
    """The interpreter exists, and finds unirl-reward and the scorer's module."""
    given = own.node.get("python")
    python = Path(sys.executable if given is None else str(given)).expanduser()
    if not python.is_file():
        yield f"{own.at}.python = {given}: no such interpreter. Make the scorer's environment, with unirl-reward in it."
        return
    module = str(own.node.get("scorer")).rpartition(".")[0]
    command = [str(python.absolute()), "-c", _LOOKS, "unirl.reward.child.host", *([module] if module else [])]
    try:
        looked = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Fault(f"{own.at}.python = {given} cannot be run: {error}")
        return
    if looked.returncode:
        last = looked.stderr.strip().splitlines()[-1:] or ["nothing"]
        where = "this environment" if given is None else f"the environment of {own.at}.python = {given}"
        yield f"{own.at}: {where} does not find {last[0]}. Install it there, or put its folder on PYTHONPATH."


MACHINE_RULES = (environment_is_there,)
RULES = ()
