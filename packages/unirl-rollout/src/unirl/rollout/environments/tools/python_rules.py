"""What code of a model needs of a machine. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.rollout.environments.tools.python import PythonInterpreter
from unirl.types.errors import ConfigError
from unirl.types.recipe import Machine, Messages, Part, Run

_OPTIONS = ("memory_mb", "files_mb", "processes", "libraries", "isolation")


def code_is_isolated(own: Part, run: Run, machine: Machine) -> Messages:
    """This machine isolates code, which the tool tries."""
    try:
        PythonInterpreter(**{name: own.node[name] for name in _OPTIONS if name in own.node})
    except ConfigError as error:
        yield f"{own.at}: {error}"


MACHINE_RULES = (code_is_isolated,)
RULES = ()
