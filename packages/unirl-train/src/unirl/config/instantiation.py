"""Builds the object that a recipe section names. Errors say where in the recipe the mistake is."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unirl.config.suggestions import did_you_mean, takes_out
from unirl.types.errors import ConfigError, UniRLError

TARGET = "_target_"
PARTIAL = "_partial_"
RESERVED = (TARGET, PARTIAL)

Node = Any  # Any: a recipe holds mappings, lists and scalars, told apart here
Built = Any  # Any: whatever the recipe names


def instantiate(node: Node, **dependencies: Built) -> Built:
    """Build what `node` names: `_target_` is the import path of a class or function, the other keys its keywords.

    Nested mappings with `_target_` and lists are built first; other mappings stay plain dicts. `_partial_: true`
    returns functools.partial instead of calling. dependencies: keywords of the outermost target that the caller adds;
    they are passed on untouched. Raises ConfigError for an unknown target, an unknown or missing keyword, a keyword
    given twice, or a value that the target refuses. UniRLErrors of the target are raised unchanged.
    """
    return _build(node, "", dependencies)


def instantiate_at(place: str, node: Node) -> Built:
    """`instantiate` for a section at `place` in the recipe, which error messages name."""
    return _build(node, place, {})


def _build(node: Node, place: str, dependencies: Mapping[str, Built]) -> Built:
    if isinstance(node, Mapping):
        values = {str(key): _build(item, _inside(place, str(key)), {}) for key, item in node.items()}
        if TARGET not in values:
            if dependencies:
                raise ConfigError(f"{_named(place)}: has no _target_. Give the import path of what to build.")
            return values
        return _call(values, place, dependencies)
    if isinstance(node, Sequence) and not isinstance(node, (str, bytes)):
        return [_build(item, f"{place}[{index}]", {}) for index, item in enumerate(node)]
    return node


def _call(values: dict[str, Built], place: str, dependencies: Mapping[str, Built]) -> Built:
    path = values[TARGET]
    target = import_target(path, place)
    keywords = {key: value for key, value in values.items() if key not in RESERVED}
    twice = sorted(set(keywords) & set(dependencies))
    if twice:
        raise ConfigError(f"{_named(place)}: {', '.join(twice)} of {path} is set by the trainer. Remove it here.")
    keywords.update(dependencies)
    keywords = _usable_keywords(target, keywords, path, place)
    if values.get(PARTIAL):
        return functools.partial(target, **keywords)
    try:
        return target(**keywords)
    except UniRLError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{_named(place)}: {path} refuses its arguments: {error}") from error


def import_target(path: Node, place: str = "") -> Callable[..., Built]:
    """The class or function at a dotted import path. Raises ConfigError with the nearest names."""
    if not isinstance(path, str) or "." not in path.strip("."):
        raise ConfigError(f"{_named(place)}: _target_ = {path!r} must be an import path such as package.module.Class.")
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            found: Built = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
                continue
            raise
        for name in parts[length:]:
            if name not in dir(found):
                raise ConfigError(
                    f"{_named(place)}: _target_ = {path}: {getattr(found, '__name__', module_name)} has no {name!r}. "
                    f"{did_you_mean(name, (known for known in dir(found) if not known.startswith('_')))}"
                )
            found = getattr(found, name)
        if not callable(found):
            raise ConfigError(f"{_named(place)}: _target_ = {path} is a {type(found).__name__}, not a class.")
        return found
    raise ConfigError(f"{_named(place)}: _target_ = {path}: there is no module {parts[0]!r}.")


def _usable_keywords(
    target: Callable[..., Built], keywords: dict[str, Built], path: str, place: str
) -> dict[str, Built]:
    """The keywords that the target has, without those that null takes out. Raises ConfigError for others."""
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:
        return keywords  # a builtin without a readable signature checks for itself
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return keywords
    usable = {name for name, parameter in parameters.items() if parameter.kind is not parameter.POSITIONAL_ONLY}
    absent = {name: value for name, value in keywords.items() if name not in usable}
    for name, value in absent.items():
        if not takes_out(name, value, usable):
            raise ConfigError(f"{_inside(place, name)}: {path} has no argument {name!r}. {did_you_mean(name, usable)}")
    return {name: value for name, value in keywords.items() if name not in absent}


def _inside(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _named(place: str) -> str:
    return place or "recipe"
