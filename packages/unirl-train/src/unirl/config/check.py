"""Finds the mistakes of a recipe before anything heavy is imported or a device is touched.

Names and keywords first (top-level keys, import paths, arguments, simple types), then the rules between sections. All
mistakes of one stage are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from unirl.config.annotations import mismatch
from unirl.config.injection import INJECTED, INJECTED_IF_TAKEN
from unirl.config.instantiation import RESERVED, TARGET, instantiate_at
from unirl.config.rules import MACHINE_RULES, RULES, Machine, Recipe
from unirl.config.signatures import Target, read_target
from unirl.config.suggestions import did_you_mean
from unirl.types.bounds import Seed
from unirl.types.errors import ConfigError

Value = Any  # Any: a recipe's scalar, list or mapping

REQUIRED_SECTIONS = ("data", "sampling", "bundle", "pipeline", "backend", "engine", "reward", "algorithm", "stack")
OPTION_SECTIONS = {
    "eval": "unirl.trainer.evaluation.EvaluationConfig",
    "guardrails": "unirl.trainer.guardrails.GuardrailConfig",
    "selection": "unirl.algorithms.selection.SampleSelection",
}
"""Sections whose `_target_` may be left out: the trainer builds this class from them."""
SCALARS: dict[str, tuple[type, ...]] = {
    "recipe": (str,),
    "seed": (int,),
    "runtime": (str,),
    "device": (str,),
    "num_devices": (int,),
    "batch_size": (int,),
    "num_rollouts": (int,),
}
"""Required top-level values."""
(SEED,) = get_args(Seed)[1:]
"""What `seed` may be."""
CHOICES = {"runtime": ("local", "ray"), "device": ("auto", "cpu", "cuda"), "resume_changes": ("refuse", "allow")}
OPTIONAL_SCALARS: dict[str, tuple[type, ...]] = {
    "media_interval": (int,),
    "max_cpu_s": (float, int),
    "run_dir": (str,),
    "resume": (str,),
    "resume_changes": (str,),
}
SAVE_KEYS: dict[str, tuple[type, ...]] = {
    "interval": (int,),
    "keep_last": (int,),
    "keep_best": (bool,),
    "is_async": (bool,),
    "best_metric": (str,),
}
TOP_LEVEL = (
    *SCALARS,
    *OPTIONAL_SCALARS,
    *REQUIRED_SECTIONS,
    *OPTION_SECTIONS,
    "advantages",
    "trainer",
    "sync",
    "save",
    "trackers",
)
"""Every key that a recipe may have."""
KEYWORDS_OF, NUM_INPUTS = "keywords_of", "num_inputs"
"""Constants of a class with `**kwargs` for a function that the recipe names: which argument names it, and how many
arguments the function gets from the class."""
ENABLED = "enabled"
"""Key of a tracker that switches it on or off without removing it."""

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")
_WORDS: dict[type, str] = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


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
    for section, path in OPTION_SECTIONS.items():
        if recipe.get(section):
            instantiate_at(section, {TARGET: path, **recipe[section]})


def _rules(recipe: Recipe) -> Iterator[str]:
    for rule in RULES:
        yield from rule(recipe)


def _keys(recipe: Recipe) -> Iterator[str]:
    """Top-level keys: unknown, missing, of the wrong type."""
    for key in recipe:
        if key not in TOP_LEVEL:
            hint = did_you_mean(str(key), (*TOP_LEVEL, "defaults"))
            yield f"unknown key {key!r} in the recipe. {hint}"
    for key in (*SCALARS, *REQUIRED_SECTIONS):
        if recipe.get(key) is None:
            yield f"{key} is missing from the recipe. Add it, or compose from a recipe of: trainer list."
    for key, types in {**SCALARS, **OPTIONAL_SCALARS}.items():
        yield from _scalar(key, recipe.get(key), types)
    name = recipe.get("recipe")
    if isinstance(name, str) and not _NAME.fullmatch(name):
        yield (
            f"recipe = {name} must be a name such as diffusion/mine: runs are written into runs/<recipe>. Use letters, "
            "digits, _ - and . (not first), with / between the parts."
        )
    seed = SEED.problem(recipe.get("seed"))
    if seed is not None:
        yield f"seed = {recipe['seed']} must be {seed}."
    for key, allowed in CHOICES.items():
        if isinstance(recipe.get(key), str) and recipe[key] not in allowed:
            yield f"{key} = {recipe[key]!r} must be one of {', '.join(allowed)}."
    if recipe.get("resume_changes") == "allow" and recipe.get("resume") is None:
        yield "resume_changes = 'allow' does nothing without resume. Set resume=auto, or leave it out."
    for key in (*REQUIRED_SECTIONS, *OPTION_SECTIONS, "advantages", "trainer", "sync", "save", "trackers"):
        value = recipe.get(key)
        if value is not None and not isinstance(value, Mapping):
            yield f"{key} = {value!r} must be a mapping."
    save = recipe.get("save")
    for key, value in save.items() if isinstance(save, Mapping) else ():
        if key not in SAVE_KEYS:
            yield f"save.{key}: unknown key. {did_you_mean(str(key), SAVE_KEYS)}"
        else:
            yield from _scalar(f"save.{key}", value, SAVE_KEYS[key])


def _scalar(name: str, value: Value, types: tuple[type, ...]) -> Iterator[str]:
    if value is None:
        return
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        yield f"{name} = {value!r} must be {_WORDS[types[0]]}."


def _signatures(recipe: Recipe) -> Iterator[str]:
    """Every `_target_` resolves and takes the keywords it is given."""
    for section in (*REQUIRED_SECTIONS, "advantages", "trainer", "sync"):
        node = recipe.get(section)
        if node is None:
            continue
        if TARGET not in node:
            yield f"{section}: has no _target_. Give the import path of what to build."
            continue
        yield from _bound(node, section, INJECTED[section], INJECTED_IF_TAKEN.get(section, frozenset()))
    for section, path in OPTION_SECTIONS.items():
        if recipe.get(section):
            yield from _bound({TARGET: path, **recipe[section]}, section, frozenset())
    for name, node in (recipe.get("trackers") or {}).items():
        place = f"trackers.{name}"
        if node is None:
            continue
        if not isinstance(node, Mapping) or TARGET not in node:
            yield f"{place}: must be a mapping with _target_ (and, if you like, {ENABLED}: false), or null."
            continue
        yield from _scalar(f"{place}.{ENABLED}", node.get(ENABLED), (bool,))
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
    return replace(target, parameters={**function.parameters, **target.parameters}, accepts_any=function.accepts_any)


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
