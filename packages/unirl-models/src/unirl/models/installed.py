"""What the installed diffusers and transformers have, without importing them, and messages on what they lack.

Both list the names of what they offer in files of text: diffusers in its package, transformers in its auto classes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

MODULAR_INDEX = "modular_model_index.json"
"""Index of a pipeline of blocks in diffusers, which is no DiffusionPipeline."""
_NAMED_IN = {"diffusers": "__init__.py", "transformers": "models/auto/*.py"}
_WRITE_A_FAMILY = "or upgrade the library and write a family for it (docs/guides/own_model.md)"


def wrong_pipeline(where: str, found: object, needed: Collection[str]) -> str:
    """The message for a folder whose index names another pipeline than the bundle loads."""
    wanted = " or ".join(needed)
    if missing := _lacks("diffusers", found):
        return f"{where} holds a {found}, {missing}. Give a folder of {wanted}, {_WRITE_A_FAMILY}."
    return (
        f"{where} holds a {found}; this model needs a {wanted}. Point PRETRAINED_MODEL at such a checkpoint or choose "
        "the model group of the recipe that fits it."
    )


def wrong_modular_pipeline(where: str, found: object, needed: Collection[str]) -> str:
    """The message for a folder of a pipeline of blocks that the bundle does not load."""
    name = str(found)
    plain = name.replace("ModularPipeline", "Pipeline")
    missing = _lacks("diffusers", plain) if plain != name else None
    reason = f"; its {plain} is a class {missing}" if missing else ""
    return (
        f"{where} holds a {name}, a pipeline of blocks ({MODULAR_INDEX}){reason}. Give a folder of "
        f"{' or '.join(needed)}, choose the model group of the recipe that fits it, {_WRITE_A_FAMILY}."
    )


def wrong_component(where: str, component: str, found: str, needed: Collection[str]) -> str:
    """The message for a component of another class than the family has."""
    missing = _lacks("diffusers", found) and _lacks("transformers", found)
    return (
        f"{where}: component {component!r} is a {found}{', ' + missing if missing else ''}; need "
        f"{' or '.join(needed)}. Point PRETRAINED_MODEL at a checkpoint of this model family."
    )


def wrong_model(where: str, found: object, needed: Collection[str]) -> str | None:
    """The message for a folder whose configuration names another type than the bundle loads; None for one that it does.

    needed: empty loads any that transformers has.
    """
    if found in needed:
        return None
    missing = _lacks("transformers", found)
    if not needed:
        return missing and (
            f"{where} holds a model of type {found!r}, {missing}. Give a checkpoint of a type that it has, or upgrade "
            "the library."
        )
    wanted = " or ".join(needed)
    if missing:
        return f"{where} holds a model of type {found!r}, {missing}. Give a checkpoint of {wanted}, {_WRITE_A_FAMILY}."
    return (
        f"{where} holds a model of type {found!r}; this bundle loads {wanted}. Point PRETRAINED_MODEL at such a "
        "checkpoint or choose the model group of the recipe that fits it."
    )


def _lacks(library: str, name: object) -> str | None:
    """What to say of a class or type of model that the installed library does not name; None where it does, or is not
    installed itself."""
    try:
        installed = version(library)
    except PackageNotFoundError:
        return None
    if f'"{name}"' in _names(library) or (library == "transformers" and _is_registered(name)):
        return None
    return f"which the installed {library} {installed} does not have"


def _is_registered(name: object) -> bool:
    """True for a type of model that this process has registered with transformers."""
    auto = sys.modules.get("transformers.models.auto.configuration_auto")
    return auto is not None and name in auto.CONFIG_MAPPING


@cache
def _names(library: str) -> str:
    spec = find_spec(library)
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders for file in sorted(Path(folder).glob(_NAMED_IN[library]))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)
