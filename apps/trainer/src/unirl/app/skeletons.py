"""`trainer init KIND NAME`: a folder with a small part that works, its recipe and its tests, to be changed."""

from __future__ import annotations

import importlib.resources
import importlib.util
import keyword
import sys
from importlib.resources.abc import Traversable
from pathlib import Path

from unirl.app.command_line import Command
from unirl.types.errors import ConfigError

MODULE = "unirl.skeletons"
"""Has a folder for each of `without_recipe.KINDS`, in whose files names hold `my_KIND` and classes `MyKind`."""
TESTS = "tests.py"
SETTINGS = "[pytest]\npythonpath = .\n"


def write_skeleton(command: Command) -> None:
    """Write the folder that was asked for, and print what to do with it. Raises ConfigError for a bad name."""
    kind, name = command.recipe, command.recipes[0]
    _check_name(name)
    folder = Path(str(command.options.get("to", name)))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already. Choose another name, or another folder with --to.")
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted(_sources(kind), key=lambda source: source.name):
        to = f"test_{name}.py" if source.name == TESTS else _renamed(source.name, kind, name)
        (folder / to).write_text(_renamed(source.read_text(encoding="utf-8"), kind, name), encoding="utf-8")
        sys.stdout.write(f"{folder / to}\n")
    (folder / "pytest.ini").write_text(SETTINGS, encoding="utf-8")
    sys.stdout.write(
        f"{folder / 'pytest.ini'}\n\ncd {folder}\nuv run pytest                     # its tests\n"
        f"uv run trainer check {name}.yaml\nuv run trainer {name}.yaml\n"
    )


def _check_name(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or not name.islower():
        raise ConfigError(f"{name!r} cannot be a module's name. Write a lower-case word such as my_reward.")
    if name == "test" or _is_installed(name):
        raise ConfigError(f"{name!r} is the name of an installed module, which would hide yours. Choose another.")


def _is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    # Where the working directory is on the path, each of its folders is a namespace package.
    here = [str(Path.cwd() / name)]
    return spec is not None and not (spec.origin is None and list(spec.submodule_search_locations or ()) == here)


def _sources(kind: str) -> list[Traversable]:
    folder = importlib.resources.files(MODULE) / kind
    return [file for file in folder.iterdir() if file.name.endswith((".py", ".yaml"))]


def _renamed(text: str, kind: str, name: str) -> str:
    """The text with `my_KIND` as the name and `MyKind` as the name in capitals."""
    capitals = "".join(word.capitalize() for word in name.split("_"))
    return text.replace(f"my_{kind}", name).replace(f"My{kind.capitalize()}", capitals)
