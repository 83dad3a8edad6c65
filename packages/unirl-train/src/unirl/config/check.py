"""Finds the mistakes of a recipe before anything heavy is imported or a device is touched.

First names and keywords (keys, import paths, arguments, simple types), then the rules of the named classes. All
mistakes of one step are reported together.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from unirl.config import schema
from unirl.config.annotations import mismatch
from unirl.config.environment_pools import OF_DEVICES, OF_ENVIRONMENTS
from unirl.config.instantiation import RESERVED, TARGET, instantiate_at
from unirl.config.runs import (
    ComposedRun,
    Resolved,
    does_train,
    injected_into,
    one_or_several,
    policy_sections,
    run_of,
)
from unirl.config.schema import (
    ENABLED,
    Component,
    NamedPolicySections,
    PolicySections,
    Pool,
    StageSections,
    components,
    plain_sections,
)
from unirl.config.signatures import KEYWORDS_OF, NUM_INPUTS, Target, lies_in, read_target
from unirl.config.suggestions import did_you_mean, takes_out
from unirl.types.errors import ConfigError
from unirl.types.recipe import RULES_OF, Machine, Part

Value = Any  # Any: a recipe's scalar, list or mapping

OF_POLICIES = schema.keys(PolicySections)
"""Every key of a policy; in a recipe without `policies` they are top-level keys."""
TOP_LEVEL = (*schema.keys(schema.Recipe), *OF_POLICIES)
"""Every key that a recipe may have."""
MACHINE_RULES = "MACHINE_RULES"
"""Optional name in a module of rules."""

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")


SAMPLED = ("sampling", "engine")
"""Sections that a recipe without stages must have."""
UNASKED = ("data", "eval", "reward")
"""Sections that an export does not need: prompts and scorers may be missing on the exporting machine."""


def exported(recipe: Resolved) -> dict[str, Value]:
    """The part of a recipe that an export needs, without scorers and trackers, whose files may be on another
    machine."""
    reward = {key: value for key, value in recipe["reward"].items() if key != "weights"}
    return {**recipe, "reward": {**reward, "scorers": {}}, "trackers": {}}


def check_recipe(
    recipe: Resolved,
    machine: Machine | None = None,
    *,
    unread: Path | None = None,
    asks_teachers: bool = True,
    is_exported: bool = False,
) -> ComposedRun:
    """The run of a recipe. Raises ConfigError with all mistakes of the first step that finds any.

    recipe: resolved, in plain containers. machine: also check that this machine can run it; None checks only the
    recipe. unread: a folder on the import path whose rule modules are not imported, see `unread_rules`.
    asks_teachers: True if the run trains; otherwise the machine need not have the teachers' models.
    is_exported: True if only weights are needed, see `exported`. Rules between sections, which the run passed when it
        began, and the prompts on this machine are then not checked.
    """
    for stage in (_keys, _signatures):
        _refuse(stage(recipe))
    run = run_of(recipe)
    if not is_exported:
        _refuse(run_findings(run, unread=unread))
    if machine is not None:
        asked = run if asks_teachers else dataclasses.replace(run, teachers={})
        _refuse(machine_findings(asked, machine, unread=unread, skips=UNASKED if is_exported else ()))
    return run


def run_findings(run: ComposedRun, *, unread: Path | None = None) -> Iterator[str]:
    """Mistakes between sections of a recipe, found by the rules of the run and of its parts."""
    for module in map(_rules_module, schema.RUN_RULES):
        for of_run in module.RULES:
            yield from of_run(run)
    for part in run.parts():
        for module in map(_rules_module, _read_rules(part, unread)):
            for rule in module.RULES:
                yield from rule(part, run.seen_by(part))


def machine_findings(
    run: ComposedRun, machine: Machine, *, unread: Path | None = None, skips: Collection[str] = ()
) -> Iterator[str]:
    """Reasons why this machine cannot run a valid recipe.

    skips: sections whose parts are not checked.
    """
    for module in map(_rules_module, schema.RUN_RULES):
        for of_run in vars(module).get(MACHINE_RULES, ()):
            yield from of_run(run, machine)
    for part in (part for part in run.parts() if part.at.partition(".")[0] not in skips):
        for module in map(_rules_module, _read_rules(part, unread)):
            for rule in vars(module).get(MACHINE_RULES, ()):
                yield from rule(part, run.seen_by(part), machine)


def unread_rules(run: ComposedRun, unread: Path) -> list[str]:
    """Rule modules of a recipe's classes that lie in the folder `unread`. They were not imported, so that checking a
    recipe executes no code from files next to it."""
    found = [name for part in run.parts() for name in part.rules if lies_in(name, unread)]
    return list(dict.fromkeys(found))


def _read_rules(part: Part, unread: Path | None) -> Iterator[str]:
    return (name for name in part.rules if unread is None or not lies_in(name, unread))


def _rules_module(name: str) -> ModuleType:
    """The module that a class names in RULES_OF. Raises ConfigError if it does not exist or has no rules."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{RULES_OF} = {name!r} of a class of this recipe: there is no module {error.name}."
        ) from error
    if "RULES" not in vars(module):
        raise ConfigError(f"{RULES_OF} = {name!r} of a class of this recipe: the module has no RULES.")
    return module


def _refuse(messages: Iterable[str]) -> None:
    found = list(dict.fromkeys(messages))
    if found:
        raise ConfigError("\n".join(found))


def build_values(run: ComposedRun) -> None:
    """Build the parts of a run that are plain values (schedules, kernels, optimizer options, ...), so that their
    constructors can refuse arguments.

    Imports torch, loads no model. Raises ConfigError naming the place.
    """
    for stage in run.stages:
        for part in (stage.sampling, stage.advantages, *((stage.reads,) if stage.reads else ())):
            instantiate_at(part.at, part.node)
    of_policies = [part for policy in run.all_policies.values() for part in policy.parts()]
    for part in (*of_policies, *(stage.engine for stage in run.stages)):
        if part.at.endswith(("bundle", "sync")):
            continue
        for key, value in part.node.items():
            if isinstance(value, Mapping):
                instantiate_at(f"{part.at}.{key}", value)
    for part in (run.evaluation, run.guardrails, run.selection):
        if part is not None:
            instantiate_at(part.at, part.node)


def _keys(recipe: Resolved) -> Iterator[str]:
    """Mistakes in keys of the top level, plain sections and policies: unknown, missing, of the wrong type or out of
    bounds."""
    for key in recipe:
        if key not in TOP_LEVEL:
            yield f"unknown key {key!r} in the recipe. {_meant(str(key), (*TOP_LEVEL, 'defaults'))}"
    yield from _stage_keys(recipe)
    yield from _pool_keys(recipe)
    of_policies = list(policy_sections(recipe).values()) if isinstance(recipe.get("policies", {}), Mapping) else []
    required = {"": (*schema.required(schema.Recipe), *(() if recipe.get("stages") else SAMPLED))}
    for prefix, sections in of_policies:
        needed = [key for key in schema.required(PolicySections) if _is_built(key, prefix, sections)]
        required[prefix] = (*required.get(prefix, ()), *needed)
        known = (*OF_POLICIES, *schema.keys(NamedPolicySections)) if prefix else OF_POLICIES
        for key in sections:
            if key not in known:
                yield f"{prefix}{key}: unknown key. {_meant(str(key), known)}"
    for prefix, keys in required.items():
        own = recipe if not prefix else dict(of_policies)[prefix]
        for key in keys:
            if own.get(key) is None:
                yield (
                    f"{prefix}{key} is missing from the recipe. Add it, or compose from a recipe of: "
                    "uv run trainer list."
                )
    yield from _plain_values(schema.Recipe, recipe, "")
    for prefix, sections in of_policies:
        yield from _plain_values(PolicySections, sections, prefix)
        if prefix:
            yield from _plain_values(NamedPolicySections, sections, prefix)
        for key, several in schema.SEVERAL.items():
            if _is_built(key, prefix, sections):
                yield from _is_one_or_several(sections, prefix, key, several)
    name = recipe.get("recipe")
    if isinstance(name, str) and not _NAME.fullmatch(name):
        yield (
            f"recipe = {name} must be a name such as sd3/mine: runs are written into runs/<recipe>. Use letters, "
            "digits, _ - and . (not first), with / between the parts."
        )
    resume = recipe.get("resume")
    if isinstance(resume, str) and resume != "auto" and not Path(resume).expanduser().is_dir():
        yield f"resume = {resume!r} must be auto or the folder of a run; there is no such folder."
    if recipe.get("resume_changes") == "allow" and recipe.get("resume") is None:
        yield "resume_changes = 'allow' does nothing without resume. Set resume=auto, or leave it out."


def _meant(key: str, known: Iterable[str]) -> str:
    """What a file may have meant by an unknown key: dots that stand for mappings, or another name."""
    *outer, last = key.split(".")
    if not outer:
        return did_you_mean(key, known)
    nested = "".join(f"{name}: {{" for name in outer) + f"{last}: ..." + "}" * len(outer)
    return f"In a file write it nested, {nested}; dots are for the command line."


def _stage_keys(recipe: Resolved) -> Iterator[str]:
    """Mistakes in keys of stages: unknown, of the wrong type, or without effect because there are no stages."""
    stages, policies = recipe.get("stages") or {}, recipe.get("policies")
    for name, own in policies.items() if isinstance(policies, Mapping) and not stages else ():
        for key in (key for key in schema.OF_STAGE if isinstance(own, Mapping) and own.get(key)):
            yield f"policies.{name}.{key}: no stage samples from {name}. Add stages, or remove it."
    for key in (key for key in SAMPLED if stages and policies and recipe.get(key)):
        if all(prefix for prefix, _ in policy_sections(recipe).values()):
            yield f"{key}: each stage has its own, or its policy's. Move it to stages.{next(iter(stages))}.{key}."
    yield from _named_sections("stages", stages, StageSections)


def _pool_keys(recipe: Resolved) -> Iterator[str]:
    """Mistakes in keys of pools: unknown, missing or of the wrong type."""
    pools = recipe.get("pools") or {}
    yield from _named_sections("pools", pools, Pool)
    for name, pool in pools.items() if isinstance(pools, Mapping) else ():
        if not isinstance(pool, Mapping):
            continue
        at, is_of_devices = f"pools.{name}", pool.get("kind") in (None, "devices")
        if is_of_devices and pool.get("devices") is None:
            yield f"{at} has no devices. Name some in {at}.devices, such as 0-3, or remove the pool."
        for key in OF_ENVIRONMENTS if is_of_devices else OF_DEVICES:
            if pool.get(key) is not None and pool.get(key) is not False:
                what = "devices" if is_of_devices else "kind env, which has no devices"
                yield f"{at}.{key} does nothing in a pool of {what}. Remove it."


def _named_sections(place: str, sections: Value, section: type) -> Iterator[str]:
    """Mistakes in named plain sections: no mapping, unknown keys, values of the wrong type."""
    known = schema.keys(section)
    for name, own in sections.items() if isinstance(sections, Mapping) else ():
        at = f"{place}.{name}"
        if not isinstance(own, Mapping):
            yield f"{at} = {own!r} must be a mapping of {', '.join(known)}."
            continue
        for key in (key for key in own if key not in known):
            yield f"{at}.{key}: unknown key. {_meant(str(key), known)}"
        yield from _plain_values(section, own, f"{at}.")


def _is_built(key: str, prefix: str, sections: Resolved) -> bool:
    """True if a section of a policy is used. Policies that are not trained do not use the sections for learning."""
    return key not in schema.LEARNING or does_train(prefix, sections)


def _is_one_or_several(sections: Resolved, prefix: str, key: str, several: str) -> Iterator[str]:
    one, many = sections.get(key), sections.get(several)
    if one is None and not any(node is not None for node in (many or {}).values()):
        yield (
            f"{prefix}{key} is missing from the recipe. Add it (or {prefix}{several} by track), or compose from a "
            "recipe of: uv run trainer list."
        )
    if one is not None and many:
        yield f"{prefix}{key} and {prefix}{several} are both set. Keep one of them."
    for name, node in many.items() if isinstance(many, Mapping) else ():
        if not isinstance(node, Mapping) and not (node is None and key in schema.LEARNING):
            yield f"{prefix}{several}.{name} = {node!r} must be a mapping."


def _plain_values(section: type, values: Mapping[str, Value], prefix: str) -> Iterator[str]:
    """Mistakes in values of a plain section, by its annotations, nested sections included. Null means the default."""
    parameters, inner = read_target(f"{section.__module__}.{section.__qualname__}").parameters, plain_sections(section)
    for key, value in values.items():
        if value is None or key not in parameters:
            continue
        if key in inner and isinstance(value, Mapping):
            known = read_target(f"{inner[key].__module__}.{inner[key].__qualname__}").parameters
            for unknown in (name for name in value if name not in known):
                yield f"{prefix}{key}.{unknown}: unknown key. {_meant(str(unknown), known)}"
            for missing in (name for name in schema.required(inner[key]) if value.get(name) is None):
                yield f"{prefix}{key}.{missing} is missing. Add it, or remove {prefix}{key}."
            yield from _plain_values(inner[key], value, f"{prefix}{key}.")
            continue
        is_section = key in inner or key in components(section)
        wanted = "a mapping" if is_section else mismatch(value, parameters[key].annotation, parameters[key].module)
        if wanted is not None and not (is_section and isinstance(value, Mapping)):
            yield f"{prefix}{key} = {value!r} must be {wanted}."


def _signatures(recipe: Resolved) -> Iterator[str]:
    """Mistakes in components: a `_target_` that does not exist or does not take its keywords."""
    for place, node, component in _component_nodes(recipe):
        if TARGET not in node and component.default is None:
            yield f"{place}: has no _target_. Give the import path of what to build."
            continue
        yield from _bound({TARGET: component.default, **node}, place, component)
    for name, node in (recipe.get("trackers") or {}).items():
        place = f"trackers.{name}"
        if node is None:
            continue
        if not isinstance(node, Mapping) or TARGET not in node:
            yield f"{place}: must be a mapping with _target_ (and, if you like, {ENABLED}: false), or null."
            continue
        if not isinstance(node.get(ENABLED, True), bool):
            yield f"{place}.{ENABLED} = {node[ENABLED]!r} must be true or false."
        yield from _bound({key: value for key, value in node.items() if key != ENABLED}, place, Component())


def _component_nodes(recipe: Resolved) -> Iterator[tuple[str, Resolved, Component]]:
    """(place, node, component) of every component of the recipe except trackers."""
    for key, component in components(schema.Recipe).items():
        if recipe.get(key) or (key in schema.required(schema.Recipe)):
            yield key, recipe[key], component
    for track, stage in (recipe.get("stages") or {}).items():
        for key, component in components(StageSections).items():
            if stage.get(key) is not None:
                yield f"stages.{track}.{key}", stage[key], component
    for prefix, sections in policy_sections(recipe).values():
        own = components(NamedPolicySections) if prefix else {}
        for key, component in {**components(PolicySections), **own}.items():
            if not _is_built(key, prefix, sections):
                continue
            if key in schema.SEVERAL:
                for place, node in one_or_several(sections, prefix, key).values():
                    yield place, node, component
            elif key not in schema.SEVERAL.values() and sections.get(key) is not None:
                yield f"{prefix}{key}", sections[key], component


def _bound(node: Mapping[str, Value], place: str, component: Component | None = None) -> Iterator[str]:
    """Mistakes in the keywords of a node. component: its entry in the schema; None for a nested value."""
    try:
        target = read_target(str(node[TARGET]))
    except ConfigError as error:
        yield f"{place}.{TARGET} = {error}"
        return
    if target.path.partition(".")[0] in sys.stdlib_module_names:
        yield f"{place}.{TARGET} = {target.path} is of Python's own library, which has no part of a run."
        return
    if target.is_function and component is not None:
        yield (
            f"{place}.{TARGET} = {target.path} is a function that does not say which class it returns. Name a class, "
            "or annotate what the function returns."
        )
        return
    try:
        target = _with_function(target, node)
    except ConfigError as error:
        yield f"{place}.{target.constants[KEYWORDS_OF]} = {error}"
        return
    injected = frozenset() if component is None else injected_into(target, component)
    for key, value in node.items():
        if key in RESERVED or (component is not None and key in component.own_keys):
            continue
        inside = f"{place}.{key}"
        if key in injected:
            yield f"{inside} is set by the trainer. Remove it here{_own_key(key)}."
        elif key not in target.parameters and not target.accepts_any:
            usable = set(target.parameters) - injected
            if not takes_out(key, value, usable):
                yield f"{inside}: {target.path} has no argument {key!r}. {_meant(key, usable)}"
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
    """The target, with the keywords of the function that gets its `**kwargs` added, if the recipe names one.

    Raises ConfigError if there is no such function.
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
    if wanted is None and isinstance(value, float) and math.isnan(value):
        wanted = "a number"
    if wanted is not None:
        shown = "null" if value is None else repr(value)
        yield f"{place} = {shown} must be {wanted}."


def _nested(node: Mapping[str, Value], place: str) -> Iterator[str]:
    if TARGET in node:
        yield from _bound(node, place)
        return
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _nested(value, f"{place}.{key}")


def _own_key(key: str) -> str:
    return f" and use the top-level {key}" if key in ("device", "seed") else ""
