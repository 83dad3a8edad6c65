"""What an engine in a process of its own needs of this machine. See `unirl.types.recipe`."""

from __future__ import annotations

from pathlib import Path

from unirl.types.recipe import Machine, Messages, Part, Run


def environment_exists(own: Part, run: Run, machine: Machine) -> Messages:
    """An engine that runs in an environment of its own has it."""
    python = own.node.get("python")
    if python is not None and not Path(str(python)).is_file():
        yield (
            f"{own.at}.python = {python}: no such interpreter. Make the engine's environment by `uv sync --project "
            f"{own.ability('environment')}` in a clone, or name the interpreter of the environment that has it."
        )


RULES = ()
MACHINE_RULES = (environment_exists,)
