"""What was typed after the verbs that take no recipe. Imports nothing heavy."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from unirl.types.errors import ConfigError

RUNS_FOLDER = "runs"
"""What `view` looks at where no folder is given."""
DATA_ACTIONS = ("list", "prepare")
"""What `data` can do."""
KINDS = {
    "reward": "a reward function",
    "algorithm": "a loss: a policy gradient on images",
    "model": "a diffusion model",
    "engine": "an engine that samples images",
    "environment": "an environment that a language model takes turns with",
    "tool": "a tool that a language model calls",
    "recipe": "a recipe that changes a packaged one",
}
"""What `init` writes."""
SHELLS = ("bash", "zsh", "fish")
"""What `completion` writes for."""
Given = Mapping[str, str | int | bool]
Meant = tuple[str, tuple[str, ...]]
"""What the verb acts on, and further names: Command.recipe and Command.recipes."""


def data_words(words: Sequence[str], options: Given) -> Meant:
    """`data list [NAME]` or `data prepare NAME`. Raises ConfigError."""
    action, names = words[0] if words else DATA_ACTIONS[0], words[1:]
    if action not in DATA_ACTIONS:
        near = difflib.get_close_matches(action, DATA_ACTIONS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"To make a set: uv run trainer data prepare {action}."
        raise ConfigError(f"data does one of {', '.join(DATA_ACTIONS)}, not {action!r}. {hint}")
    if action == "list" and options:
        raise ConfigError(f"--{next(iter(options))} does nothing with data list; it is for: data prepare.")
    if action == "prepare" and len(names) != 1:
        raise ConfigError(f"data prepare takes the name of one set, not {len(names)}. See: uv run trainer data list.")
    if len(names) > 1:
        raise ConfigError(f"data list takes the name of one set or none, not {' '.join(names)}.")
    return action, tuple(names)


def view_words(words: Sequence[str], options: Given) -> Meant:
    """`view [FOLDER]`. Raises ConfigError."""
    if len(words) > 1:
        raise ConfigError("view takes one folder of runs, or none for runs/, and no recipe.")
    if not 0 <= int(options.get("port", 1)) < 1 << 16:
        raise ConfigError(f"--port {options['port']} is no port. Give one from 1 to 65535, or 0 for a free one.")
    if options.get("token") == "":
        raise ConfigError("--token is empty. Give one, or leave it out: one is drawn where it is needed.")
    return words[0] if words else RUNS_FOLDER, ()


def conformance_words(words: Sequence[str], options: Given) -> Meant:
    """`conformance [MODEL ...]`. Raises ConfigError."""
    if any("=" in word or word.startswith("~") for word in words):
        raise ConfigError("conformance takes names of models alone; its recipes are its own.")
    return "", tuple(words)


def init_words(words: Sequence[str], options: Given) -> Meant:
    """`init KIND NAME`. Raises ConfigError."""
    kinds = "\n".join(f"  uv run trainer init {kind} my_{kind:12} {text}" for kind, text in KINDS.items())
    if len(words) != 2:
        raise ConfigError(f"init takes what to write and a name:\n{kinds}")
    kind, name = words
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        raise ConfigError(f"init cannot write {kind!r}.{f' Did you mean {near[0]}?' if near else ''}\n{kinds}")
    return kind, (name,)


def doctor_words(words: Sequence[str], options: Given) -> Meant:
    """`doctor`. Raises ConfigError."""
    if words:
        raise ConfigError(f"doctor takes no words; what a recipe needs is said by: uv run trainer check {words[0]}")
    return "", ()


def completion_words(words: Sequence[str], options: Given) -> Meant:
    """`completion SHELL`. Raises ConfigError."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise ConfigError(f"completion takes one of {', '.join(SHELLS)}, not {' '.join(words)!r}.")
    return words[0], ()


WITHOUT_RECIPE: dict[str, Callable[[Sequence[str], Given], Meant]] = {
    "data": data_words,
    "view": view_words,
    "conformance": conformance_words,
    "init": init_words,
    "doctor": doctor_words,
    "completion": completion_words,
}
"""Verb -> what reads its words."""
