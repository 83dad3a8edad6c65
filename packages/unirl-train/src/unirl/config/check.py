"""Finds the mistakes of a recipe before anything heavy is imported or a device is touched.

Names and keywords first (top-level keys, import paths, arguments, simple types), then the rules between sections. All
mistakes of one stage are reported together.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unirl.config import schema
from unirl.config.annotations import mismatch
from unirl.config.instantiation import RESERVED, TARGET, instantiate_at
from unirl.config.rules import MACHINE_RULES, RULES, Machine, Recipe
from unirl.config.schema import components, plain_sections
from unirl.config.signatures import Target, read_target
from unirl.config.suggestions import did_you_mean
from unirl.types.errors import ConfigError

Value = Any  # Any: a recipe's scalar, list or mapping

TOP_LEVEL = tuple(field.name for field in dataclasses.fields(schema.Recipe))
"""Every key that a recipe may have."""
KEYWORDS_OF, NUM_INPUTS = "keywords_of", "num_inputs"
"""Constants of a class with `**kwargs` for a function that the recipe names: which argument names it, and how many
arguments the function gets from the class."""
ENABLED = "enabled"
"""Key of a tracker that switches it on or off without removing it."""

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")


def check_recipe(recipe: Recipe, machine: Machine | None = None) -> None:
    """Raise ConfigError with every mistake of the first stage that finds one.

    recipe: resolved, plain containers. machine: also ask whether this machine can run it; None checks the recipe alone.
    """
    for stage in (_keys, _signatures, _rules):
        found = list(stage(recipe))
        if found:
            raise ConfigError("\n".join(found))
    found = machine_findings(recipe, machine) if machine is not None else []
    if found:
        raise ConfigError("\n".join(found))


def machine_findings(recipe: Recipe, machine: Machine) -> list[str]:
    """What keeps this machine from running a recipe that is right in itself."""
    return [message for rule in MACHINE_RULES for message in rule(recipe, machine)]


def build_values(recipe: Recipe) -> None:
    """Build the parts of a recipe that are values (schedules, kernels, optimizer options, ...), to let them refuse.

    Imports torch, loads no model. Raises ConfigError naming the place.
    """
    for section in ("sampling", "advantages"):
        if recipe.get(section):
            instantiate_at(section, recipe[section])
    for section in ("pipeline", "backend", "algorithm", "engine", "stack"):
        for key, value in recipe[section].items():
            if isinstance(value, Mapping):
                instantiate_at(f"{section}.{key}", value)
    for section, component in components().items():
        if component.default is not None and recipe.get(section):
            instantiate_at(section, {TARGET: component.default, **recipe[section]})


def _rules(recipe: Recipe) -> Iterator[str]:
    for rule in RULES:
        yield from rule(recipe)


def _keys(recipe: Recipe) -> Iterator[str]:
    """Top-level keys and those of plain sections: unknown, missing, of the wrong type or outside their bounds."""
    for key in recipe:
        if key not in TOP_LEVEL:
            yield f"unknown key {key!r} in the recipe. {did_you_mean(str(key), (*TOP_LEVEL, 'defaults'))}"
    for key in schema.required():
        if recipe.get(key) is None:
            yield f"{key} is missing from the recipe. Add it, or compose from a recipe of: trainer list."
    yield from _plain_values(schema.Recipe, recipe, "")
    name = recipe.get("recipe")
    if isinstance(name, str) and not _NAME.fullmatch(name):
        yield (
            f"recipe = {name} must be a name such as diffusion/mine: runs are written into runs/<recipe>. Use letters, "
            "digits, _ - and . (not first), with / between the parts."
        )
    if recipe.get("resume_changes") == "allow" and recipe.get("resume") is None:
        yield "resume_changes = 'allow' does nothing without resume. Set resume=auto, or leave it out."


def _plain_values(section: type, values: Mapping[str, Value], prefix: str) -> Iterator[str]:
    """Values of a plain section by its annotations, and those of the plain sections inside. Null means the default."""
    parameters, inner = read_target(f"{section.__module__}.{section.__qualname__}").parameters, plain_sections(section)
    for key, value in values.items():
        if value is None or key not in parameters:
            continue
        if key in inner and isinstance(value, Mapping):
            known = read_target(f"{inner[key].__module__}.{inner[key].__qualname__}").parameters
            for unknown in (name for name in value if name not in known):
                yield f"{prefix}{key}.{unknown}: unknown key. {did_you_mean(str(unknown), known)}"
            yield from _plain_values(inner[key], value, f"{prefix}{key}.")
            continue
        is_section = key in inner or key in components(section)
        wanted = "a mapping" if is_section else mismatch(value, parameters[key].annotation, parameters[key].module)
        if wanted is not None and not (is_section and isinstance(value, Mapping)):
            yield f"{prefix}{key} = {value!r} must be {wanted}."


def _signatures(recipe: Recipe) -> Iterator[str]:
    """Every `_target_` resolves and takes the keywords it is given."""
    for section, component in components().items():
        node = recipe.get(section)
        if node is None or (not node and component.default is not None):
            continue
        if TARGET not in node and component.default is None:
            yield f"{section}: has no _target_. Give the import path of what to build."
            continue
        yield from _bound({TARGET: component.default, **node}, section, component.injected, component.if_taken)
    for name, node in (recipe.get("trackers") or {}).items():
        place = f"trackers.{name}"
        if node is None:
            continue
        if not isinstance(node, Mapping) or TARGET not in node:
            yield f"{place}: must be a mapping with _target_ (and, if you like, {ENABLED}: false), or null."
            continue
        if not isinstance(node.get(ENABLED, True), bool):
            yield f"{place}.{ENABLED} = {node[ENABLED]!r} must be true or false."
        yield from _bound({key: value for key, value in node.items() if key != ENABLED}, place, frozenset())


def _bound(
    node: Mapping[str, Value], place: str, injected: frozenset[str], if_taken: frozenset[str] = frozenset()
) -> Iterator[str]:
    try:
        target = read_target(str(node[TARGET]))
    except ConfigError as error:
        yield f"{place}.{TARGET} = {error}"
        return
    try:
        target = _with_function(target, node)
    except ConfigError as error:
        yield f"{place}.{target.constants[KEYWORDS_OF]} = {error}"
        return
    injected |= if_taken & set(target.parameters)
    for key, value in node.items():
        if key in RESERVED:
            continue
        inside = f"{place}.{key}"
        if key in injected:
            yield f"{inside} is set by the trainer. Remove it here{_own_key(key)}."
        elif key not in target.parameters and not target.accepts_any:
            usable = set(target.parameters) - injected
            yield f"{inside}: {target.path} has no argument {key!r}. {did_you_mean(key, usable)}"
        else:
            yield from _value(value, inside, target, key)
    given = set(node) | injected
    missing = [name for name, item in target.parameters.items() if not item.has_default and name not in given]
    if missing:
        yield f"{place}: {target.path} needs {', '.join(missing)}. Set {' and '.join(f'{place}.{m}' for m in missing)}."
    if not target.accepts_any and node.get("_partial_") is None:
        refused = sorted(name for name in injected if name not in target.parameters)
        if refused:
            yield f"{place}: {target.path} must take the keywords {', '.join(refused)}, which the trainer passes."


def _with_function(target: Target, node: Mapping[str, Value]) -> Target:
    """The target with the keywords of the function that it passes its own `**kwargs` to, where the recipe names one.

    Raises ConfigError where there is no such function.
    """
    argument, num_inputs = target.constants.get(KEYWORDS_OF), target.constants.get(NUM_INPUTS)
    path = node.get(argument) if isinstance(argument, str) else None
    if not isinstance(path, str) or not isinstance(num_inputs, int):
        return target
    function = read_target(path, num_inputs)
    return dataclasses.replace(
        target, parameters={**function.parameters, **target.parameters}, accepts_any=function.accepts_any
    )


def _value(value: Value, place: str, target: Target, key: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _nested(value, place)
        if TARGET in value:
            return
    if isinstance(value, Sequence) and not isinstance(value, str):
        for index, item in enumerate(value):
            if isinstance(item, Mapping):
                yield from _nested(item, f"{place}[{index}]")
    parameter = target.parameters.get(key)
    if parameter is None:
        return
    wanted = mismatch(value, parameter.annotation, parameter.module)
    if wanted is not None:
        shown = "null" if value is None else repr(value)
        yield f"{place} = {shown} must be {wanted}."


def _nested(node: Mapping[str, Value], place: str) -> Iterator[str]:
    if TARGET in node:
        yield from _bound(node, place, frozenset())
        return
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _nested(value, f"{place}.{key}")


def _own_key(key: str) -> str:
    return f" and use the top-level {key}" if key in ("device", "seed") else ""
