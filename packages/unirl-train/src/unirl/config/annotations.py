"""Checks that a recipe's value fits a constructor's annotation, as far as the source shows.

Scalars, literals, optional values and declared bounds (`unirl.types.bounds`) are checked; everything else is left to
the constructor.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from unirl.config.instantiation import TARGET
from unirl.config.signatures import MAX_DEPTH, Module, may_be_mapping, resolve_annotation
from unirl.types.bounds import Bounds

Value = Any  # Any: a recipe's scalar, list or mapping

_SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
_SEQUENCES = {"list", "tuple", "Sequence", "Iterable", "Collection"}
_MAPPINGS = {"dict", "Mapping", "MutableMapping"}
_WORDS = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false"}


def mismatch(value: Value, annotation: ast.expr | None, module: Module) -> str | None:
    """Description of what the annotation requires if `value` does not fit; None if it fits or cannot be judged."""
    if annotation is None:
        return None
    fits, words = _judge(value, annotation, module, 0)
    return words if fits is False else None


def _judge(value: Value, node: ast.expr, module: Module, depth: int) -> tuple[bool | None, str]:
    """(True, False or None for unknown, the annotation in words)."""
    unknown = (None, ast.unparse(node))
    if depth > MAX_DEPTH:
        return unknown
    if isinstance(node, ast.Constant):
        return _judge_constant(value, node, module, depth)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _any_of([_judge(value, side, module, depth + 1) for side in (node.left, node.right)])
    if isinstance(node, ast.Subscript):
        return _judge_subscript(value, node, module, depth)
    if isinstance(node, ast.Attribute):
        return _judge(value, ast.Name(node.attr), module, depth + 1) if node.attr in _SEQUENCES | _MAPPINGS else unknown
    if isinstance(node, ast.Name):
        return _judge_name(value, node.id, module, depth)
    return unknown


def _judge_constant(value: Value, node: ast.Constant, module: Module, depth: int) -> tuple[bool | None, str]:
    if node.value is None:
        return value is None, "null"
    if isinstance(node.value, str):
        return _judge(value, ast.parse(node.value, mode="eval").body, module, depth + 1)
    return None, ast.unparse(node)


def _judge_name(value: Value, name: str, module: Module, depth: int) -> tuple[bool | None, str]:
    if name in _SCALARS:
        is_bool = isinstance(value, bool)
        return isinstance(value, _SCALARS[name]) and (is_bool == (name == "bool")), _WORDS[name]
    if name in _SEQUENCES:
        return isinstance(value, Sequence) and not isinstance(value, str), "a list"
    if name in _MAPPINGS:
        return isinstance(value, Mapping), "a mapping"
    if name in ("Path", "PathLike"):
        return isinstance(value, str), "a path"
    resolved, where = resolve_annotation(name, module)
    if isinstance(resolved, ast.ClassDef):
        # Objects come from `_target_`; a builder may accept a list.
        is_plain = isinstance(value, (str, int, float, bool))
        is_bare = isinstance(value, Mapping) and TARGET not in value and not may_be_mapping(resolved, where)
        return (False if is_plain or is_bare else None), f"a {name} (a mapping with _target_)"
    if resolved is not None:
        return _judge(value, resolved, where, depth + 1)
    return None, name


def _judge_subscript(value: Value, node: ast.Subscript, module: Module, depth: int) -> tuple[bool | None, str]:
    head = ast.unparse(node.value).rsplit(".", 1)[-1]
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if head == "Literal":
        allowed = [item.value for item in inner if isinstance(item, ast.Constant)]
        return value in allowed, f"one of {', '.join(map(repr, allowed))}"
    if head == "Optional":
        return _any_of([(value is None, "null"), _judge(value, inner[0], module, depth + 1)])
    if head == "Union":
        return _any_of([_judge(value, item, module, depth + 1) for item in inner])
    if head == "Annotated":
        return _judge_bounded(value, inner[0], inner[1:], module, depth)
    if head in _SEQUENCES | _MAPPINGS:
        return _judge_name(value, head, module, depth + 1)
    return None, ast.unparse(node)


def _judge_bounded(
    value: Value, type_: ast.expr, metadata: list[ast.expr], module: Module, depth: int
) -> tuple[bool | None, str]:
    fits, words = _judge(value, type_, module, depth + 1)
    if fits is not True:
        return fits, words
    for item in metadata:
        bounds = declared_bounds(item)
        wanted = None if bounds is None else bounds.problem(value)
        if wanted is not None:
            return False, wanted
    return True, words


def declared_bounds(node: ast.expr) -> Bounds | None:
    """The bounds in a call `Bounds(...)` with literals; None for anything else."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func).rsplit(".", 1)[-1] != Bounds.__name__:
        return None
    return Bounds(**{item.arg: ast.literal_eval(item.value) for item in node.keywords if item.arg is not None})


def _any_of(parts: list[tuple[bool | None, str]]) -> tuple[bool | None, str]:
    words = " or ".join(dict.fromkeys(text for _, text in parts))
    if any(fits for fits, _ in parts):
        return True, words
    return (None if any(fits is None for fits, _ in parts) else False), words
