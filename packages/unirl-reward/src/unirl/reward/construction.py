"""Builds a scorer from its import path and keywords, in a process that was told both."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, cast

from unirl.reward.base import LocalScorer
from unirl.reward.wire import OWN_REWARD
from unirl.types.errors import ConfigError, as_sentence
from unirl.types.protocols.rewards import Scorer


def built(
    target: str,
    params: Mapping[str, Any],  # Any: values of a configuration file
    offered: Mapping[str, str],
    *,
    shown: str,
    environment: str,
) -> Scorer:
    """The scorer. params: its keywords; a mapping with a `_target_` becomes the object that it describes. offered: more
    of them for constructors that take these, unless params say them.

    shown, environment: the scorer, and where it must be installed, as messages call them. Raises ConfigError for what
    cannot be imported, and naming the class for keywords that it, or a base that it hands them on to, does not take.
    """
    keywords = {str(key): _with_targets(value, f"params.{key}", environment) for key, value in params.items()}
    cls = _imported(target, shown, environment)
    try:
        taken = inspect.signature(cls).parameters
        keywords = {**{key: value for key, value in offered.items() if key in taken}, **keywords}
        inspect.signature(cls).bind(**keywords)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{shown}: {error}") from error
    try:
        scorer = cls(**keywords)
    except TypeError as error:
        raise ConfigError(f"{shown}: {error}") from error
    if not isinstance(scorer, Scorer):
        raise ConfigError(f"{shown} makes a {type(scorer).__name__}, which has no `name` and `score`")
    if isinstance(scorer, LocalScorer) and OWN_REWARD in scorer.component_weights:
        raise ConfigError(f"{shown} has a component called {OWN_REWARD}, which is what the sum is called. Rename it.")
    return scorer


def _imported(target: str, shown: str, environment: str) -> Any:  # Any: whatever stands at a dotted path
    module, _, name = target.rpartition(".")
    try:
        owner = importlib.import_module(module)
    except (ModuleNotFoundError, ValueError) as error:
        raise ConfigError(
            f"{shown}: {as_sentence(error)} Install it in the environment of {environment}, or put its folder on "
            "PYTHONPATH."
        ) from error
    if not hasattr(owner, name):
        raise ConfigError(f"{shown}: module {module} has no attribute {name!r}")
    found = vars(owner)[name]
    if not callable(found):
        raise ConfigError(f"{shown} is a {type(found).__name__}, which cannot be called")
    return cast("Any", found)


def _with_targets(node: Any, where: str, environment: str) -> Any:  # Any: values of a configuration file
    """`node` with every mapping that has a `_target_` replaced by the object it describes."""
    if isinstance(node, list):
        return [_with_targets(item, f"{where}[{i}]", environment) for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    ready = {
        str(key): _with_targets(value, f"{where}.{key}", environment)
        for key, value in node.items()
        if key != "_target_"
    }
    if "_target_" not in node:
        return ready
    target = _imported(str(node["_target_"]), f"scorer {node['_target_']}", environment)
    try:
        inspect.signature(target).bind(**ready)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}, _target_ {node['_target_']}: {error}") from error
    return target(**ready)
