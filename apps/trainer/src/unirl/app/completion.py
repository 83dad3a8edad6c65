"""Completion of the command in a shell, by argcomplete: `trainer completion SHELL` prints what a shell evaluates."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

PROGRAM = "trainer"
ASKS = "_ARGCOMPLETE"
"""Variable that a shell sets while it asks for completions."""


def shell_code(shell: str) -> str:
    """What `shell` evaluates: `eval "$(trainer completion bash)"`."""
    import argcomplete

    return argcomplete.shellcode([PROGRAM], shell=shell)


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks for completions and end the process; nothing otherwise."""
    if ASKS in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options=False)


def words(prefix: str, parsed_args: argparse.Namespace, **_: object) -> Iterator[str]:
    """Words that may follow: verbs first, then what the verb takes, recipes and their parts."""
    from unirl.app.command_line import LISTS, VERBS
    from unirl.app.without_recipe import DATA_ACTIONS, KINDS, SHELLS

    typed = list(parsed_args.words or ())
    verb = typed[0] if typed and typed[0] in VERBS else None
    fixed = {"data": DATA_ACTIONS, "init": tuple(KINDS), "completion": SHELLS, "list": LISTS}
    if verb in fixed:
        if len(typed) == 1:
            yield from fixed[verb]
        elif verb == "data" and typed[1:] == ["prepare"]:
            from unirl.datasets.catalog import SETS

            yield from SETS
        return
    if not typed:
        yield from VERBS
    from unirl.config.catalog import available, parts

    yield from available()
    for part in parts():
        folder, name = part.rsplit("/", 1)
        yield f"{folder}={name}"
