"""Reads signatures of import paths from source, without importing.

Importing torch or a model library takes seconds; reading source takes milliseconds. So recipes can be checked against
constructors on any machine, even without the libraries that the classes need.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path

from unirl.config.suggestions import did_you_mean
from unirl.types.errors import ConfigError
from unirl.types.recipe import RULES_OF

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
KEYWORDS_OF, NUM_INPUTS = "keywords_of", "num_inputs"
"""Constants of a class that passes `**kwargs` to a function named in the recipe: the argument that names it, and how
many arguments the class passes to the function."""
MAX_DEPTH = 16
"""Most re-exports and bases to follow, so that a cycle of imports does not hang the check."""


@dataclass(frozen=True)
class Module:
    """A parsed module and its top-level names."""

    name: str
    definitions: dict[str, ast.stmt]
    """Classes, functions, assignments and import statements by the name they bind."""
    is_package: bool


@dataclass(frozen=True)
class Parameter:
    """One keyword of a target."""

    name: str
    annotation: ast.expr | None
    has_default: bool
    module: Module
    """Module in which the annotation's names are looked up."""
    default: object = None
    """The default if it is a literal; None otherwise."""


@dataclass(frozen=True)
class Target:
    """What is known about an import path without importing it."""

    path: str
    parameters: dict[str, Parameter] = field(default_factory=dict)
    accepts_any: bool = False
    """True if further keywords cannot be checked: `**kwargs` that are not passed to a base, or a base without readable
    source."""
    constants: dict[str, object] = field(default_factory=dict)
    """Literal class attributes, inherited ones included; for a function, those of the class that it returns."""
    lineage: tuple[str, ...] = ()
    """Import paths of the class and its bases, nearest first, as far as source is readable."""
    rules: tuple[str, ...] = ()
    """Modules that the class and its bases name in RULES_OF, those of bases first."""
    is_function: bool = False
    """True if it is a function without a class as return annotation."""


@dataclass(frozen=True)
class _Found:
    node: Definition | None
    module: Module


@lru_cache(maxsize=512)
def read_target(path: str, num_inputs: int = 0) -> Target:
    """The signature at an import path. Raises ConfigError with the nearest names if there is none.

    num_inputs: positional arguments that a function gets from its caller, so that a recipe cannot set them.
    """
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{path!r} must be an import path such as package.module.Class.")
    if parts[0] in sys.builtin_module_names:
        return Target(path, accepts_any=True)
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        if not _exists(module_name):
            continue
        module = read_module(module_name)
        if module is None:
            return Target(path, accepts_any=True)
        if length == len(parts) - 1:
            return _target(_find(module, parts[-1], path), path, num_inputs)
        name = parts[length]
        if name in module.definitions:
            return Target(path, accepts_any=True)  # an attribute of a class or an imported object
        raise ConfigError(f"{path}: {module_name} has no module {name!r}. {did_you_mean(name, _children(module_name))}")
    raise ConfigError(f"{path}: there is no module {parts[0]!r}. {did_you_mean(parts[0], ['unirl'])}")


@lru_cache(maxsize=512)
def read_module(name: str) -> Module | None:
    """The parsed module, or None if it has no Python source (a namespace or an extension module).

    Raises ConfigError naming file and line if the source is not valid Python.
    """
    spec = _spec(name)
    origin = None if spec is None else spec.origin
    if origin is None or not origin.endswith(".py"):
        return Module(name, {}, True) if spec is not None and spec.submodule_search_locations else None
    try:
        tree = ast.parse(Path(origin).read_bytes())  # as bytes, since the source may declare an encoding
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno is not None else ""
        raise ConfigError(f"{origin}{line} is not Python: {error.args[0]}. Fix the file.") from error
    definitions: dict[str, ast.stmt] = {}
    for statement in _statements(tree.body):
        for bound in _bound_names(statement):
            definitions.setdefault(bound, statement)
    return Module(name, definitions, origin.endswith("__init__.py"))


def resolve_annotation(name: str, module: Module, depth: int = 0) -> tuple[ast.expr | ast.ClassDef | None, Module]:
    """Meaning of a name in an annotation: an alias's expression, a class, or None if unknown."""
    statement = module.definitions.get(name)
    if isinstance(statement, ast.ClassDef):
        return statement, module
    if isinstance(statement, ast.Assign):
        return statement.value, module
    if isinstance(statement, ast.AnnAssign):
        return statement.value, module
    if isinstance(statement, ast.ImportFrom) and depth < MAX_DEPTH:
        source = _imported_module(statement, module)
        other = read_module(source) if _exists(source) else None
        if other is not None:
            return resolve_annotation(_original_name(statement, name), other, depth + 1)
    return None, module


def _target(found: _Found, path: str, num_inputs: int) -> Target:
    if found.node is None:
        return Target(path, accepts_any=True)
    if not isinstance(found.node, ast.ClassDef):
        if found.node.decorator_list and num_inputs:
            return Target(path, accepts_any=True)  # the decorator may pass further arguments
        taken = len(found.node.args.posonlyargs) + len(found.node.args.args)
        if taken < num_inputs and found.node.args.vararg is None:
            raise ConfigError(
                f"{path} takes {taken} arguments by place; it is called with {num_inputs}. Add the others."
            )
        parameters, accepts_any = _function_parameters(found.node, found.module, skip=num_inputs)
        made = _returned_class(found.node, found.module)
        if made is None:
            return Target(path, parameters, accepts_any, is_function=True)
        return _declared(Target(path, parameters, accepts_any), *made)
    parameters, accepts_any = _constructor(found.node, found.module, 0)
    return _declared(Target(path, parameters, accepts_any), found.node, found.module)


def _declared(target: Target, owner: ast.ClassDef, module: Module) -> Target:
    """The target with the declarations of a class and its bases added."""
    constants: dict[str, object] = {}
    rules: list[str] = []
    lineage = _in_order(_lineage(owner, module, 0))
    for node, where in reversed(lineage):
        own = _constants(node, where)
        constants.update(own)
        named = own.get(RULES_OF)
        if isinstance(named, str) and named not in rules:
            rules.append(named)
    names = tuple(f"{where.name}.{node.name}" for node, where in lineage)
    return dataclasses.replace(target, constants=constants, lineage=names, rules=tuple(rules))


def _returned_class(node: ast.FunctionDef | ast.AsyncFunctionDef, module: Module) -> tuple[ast.ClassDef, Module] | None:
    """The class in a function's return annotation, if its source is readable."""
    if not isinstance(node.returns, ast.Name):
        return None
    found, where = resolve_annotation(node.returns.id, module)
    return (found, where) if isinstance(found, ast.ClassDef) else None


def _find(module: Module, name: str, path: str, depth: int = 0) -> _Found:
    """The definition of a top-level name, through re-exports."""
    statement = module.definitions.get(name)
    if statement is None:
        if "__getattr__" in module.definitions or _exists(f"{module.name}.{name}"):
            return _Found(None, module)
        hint = did_you_mean(name, (n for n in _own_names(module) if not n.startswith("_")))
        raise ConfigError(f"{path}: {module.name} has no {name!r}. {hint}")
    if isinstance(statement, Definition):
        return _Found(statement, module)
    if isinstance(statement, ast.ImportFrom) and depth < MAX_DEPTH:
        source = _imported_module(statement, module)
        other = read_module(source) if _exists(source) else None
        if other is not None:
            return _find(other, _original_name(statement, name), path, depth + 1)
    return _Found(None, module)


def _constructor(node: ast.ClassDef, module: Module, depth: int) -> tuple[dict[str, Parameter], bool]:
    """Keywords of the class, from its or its bases' `__init__` or dataclass fields.

    An `__init__` that passes its `**options` to `super().__init__` or to another class takes the keywords of that too;
    one that keeps them takes any keyword.
    """
    own = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if own is not None:
        parameters, has_options = _function_parameters(own, module, skip=1)
        call = _passing_on(own) if has_options else None
        if call is None:
            return parameters, has_options
        if isinstance(call.func, ast.Name):
            other, where = resolve_annotation(call.func.id, module)
            if not isinstance(other, ast.ClassDef) or depth >= MAX_DEPTH:
                return parameters, True
            inherited, loose = _constructor(other, where, depth + 1)
        else:
            inherited, loose = _inherited_parameters(node, module, depth)
        set_here = {*list(inherited)[: len(call.args)], *(keyword.arg for keyword in call.keywords)}
        passed_on = {name: item for name, item in inherited.items() if name not in {*parameters, *set_here}}
        return {**parameters, **passed_on}, loose
    if _is_dataclass(node):
        return _dataclass_parameters(node, module, depth)
    return _inherited_parameters(node, module, depth)


def _passing_on(init: ast.FunctionDef) -> ast.Call | None:
    """The call that passes on the `**options` of `init`, to `super().__init__` or a name; None if there is none."""
    options = init.args.kwarg.arg if init.args.kwarg is not None else None
    for node in ast.walk(init):
        if not isinstance(node, ast.Call):
            continue
        if not isinstance(node.func, ast.Name) and ast.unparse(node.func) != "super().__init__":
            continue
        if any(
            item.arg is None and isinstance(item.value, ast.Name) and item.value.id == options for item in node.keywords
        ):
            return node
    return None


def _inherited_parameters(node: ast.ClassDef, module: Module, depth: int) -> tuple[dict[str, Parameter], bool]:
    accepts_any = False
    for base, base_module in _bases(node, module):
        if base is None:
            accepts_any = True
            continue
        if depth < MAX_DEPTH:
            parameters, loose = _constructor(base, base_module, depth + 1)
            if parameters or loose:
                return parameters, loose
    return {}, accepts_any


def _dataclass_parameters(node: ast.ClassDef, module: Module, depth: int) -> tuple[dict[str, Parameter], bool]:
    parameters: dict[str, Parameter] = {}
    accepts_any = False
    for base, base_module in reversed(_bases(node, module)):
        if base is None:
            accepts_any = True
        elif _is_dataclass(base) and depth < MAX_DEPTH:
            inherited, loose = _dataclass_parameters(base, base_module, depth + 1)
            parameters.update(inherited)
            accepts_any = accepts_any or loose
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(item.annotation):
            continue
        name = item.target.id
        options = _field_options(item.value)
        if options is not None and _literal(options.get("init")) is False:
            parameters.pop(name, None)
            continue
        has_default = item.value is not None if options is None else bool({"default", "default_factory"} & set(options))
        parameters[name] = Parameter(name, item.annotation, has_default, module, _literal(item.value))
    return parameters, accepts_any


def _function_parameters(
    node: ast.FunctionDef | ast.AsyncFunctionDef, module: Module, *, skip: int
) -> tuple[dict[str, Parameter], bool]:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = list(zip(positional, defaults, strict=True))[skip:]
    pairs += list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    parameters = {
        item.arg: Parameter(item.arg, item.annotation, default is not None, module, _literal(default))
        for item, default in pairs
        if item not in arguments.posonlyargs
    }
    return parameters, arguments.kwarg is not None


def _in_order(lineage: Iterable[tuple[ast.ClassDef, Module]]) -> list[tuple[ast.ClassDef, Module]]:
    """The same, a base of several only after the last of them, as Python looks attributes up."""
    found: dict[str, tuple[ast.ClassDef, Module]] = {}
    for node, where in lineage:
        name = f"{where.name}.{node.name}"
        found.pop(name, None)
        found[name] = (node, where)
    return list(found.values())


def _lineage(node: ast.ClassDef, module: Module, depth: int) -> Iterator[tuple[ast.ClassDef, Module]]:
    """The class and its bases, nearest first; a base of several once for each."""
    yield node, module
    for base, base_module in _bases(node, module):
        if base is not None and depth < MAX_DEPTH:
            yield from _lineage(base, base_module, depth + 1)


_PLAIN_BASES = {"object", "ABC", "Protocol", "Generic"}


def _bases(node: ast.ClassDef, module: Module) -> list[tuple[ast.ClassDef | None, Module]]:
    """Relevant bases; None for bases without readable source."""
    found: list[tuple[ast.ClassDef | None, Module]] = []
    for base in node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        name = ast.unparse(plain).rsplit(".", 1)[-1]
        if name in _PLAIN_BASES:
            continue
        resolved, where = resolve_annotation(name, module) if isinstance(plain, ast.Name) else (None, module)
        found.append((resolved, where) if isinstance(resolved, ast.ClassDef) else (None, module))
    return found


def may_be_mapping(node: ast.ClassDef, module: Module, depth: int = 0) -> bool:
    """True if instances of the class may be mappings: one of its bases is a mapping or cannot be read."""
    return depth > MAX_DEPTH or any(
        base is None or base.name in ("Mapping", "MutableMapping", "dict") or may_be_mapping(base, where, depth + 1)
        for base, where in _bases(node, module)
    )


def _constants(node: ast.ClassDef, module: Module) -> dict[str, object]:
    """Class attributes whose value is a literal, or a constant with a literal value, defined in this module or
    imported."""
    found: dict[str, object] = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value is not None:
            names, value = [item.target.id], item.value
        elif isinstance(item, ast.Assign):
            names, value = [name.id for name in item.targets if isinstance(name, ast.Name)], item.value
        else:
            continue
        if isinstance(value, ast.Name):
            constant, _ = resolve_annotation(value.id, module)
            value = constant if isinstance(constant, ast.expr) else value
        if _is_literal(value):
            found.update(dict.fromkeys(names, _literal(value)))
    return found


def _literal(node: ast.expr | None) -> object:
    """The value of a literal expression; None for others."""
    return None if node is None or not _is_literal(node) else ast.literal_eval(node)


def _is_literal(node: ast.expr) -> bool:
    return all(isinstance(part, _LITERAL) for part in ast.walk(node))


_LITERAL = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.UnaryOp, ast.USub, ast.Load)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list)


def _field_options(value: ast.expr | None) -> dict[str, ast.expr] | None:
    """Keywords of a `field(...)` call, or None for another default."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).rsplit(".", 1)[-1] == "field":
        return {keyword.arg: keyword.value for keyword in value.keywords if keyword.arg is not None}
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Top-level statements, those inside `try`, `with` and `if` included."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.Try | ast.With):
            yield from _statements(statement.body)
        elif isinstance(statement, ast.If):
            yield from _statements([*statement.body, *statement.orelse])


def _bound_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, Definition):
        return [statement.name]
    if isinstance(statement, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name.split(".")[0] for alias in statement.names]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


def _own_names(module: Module) -> list[str]:
    """Names that a module defines or re-exports: in a package every import, in other modules those written `X as X`."""
    return [
        name
        for name, statement in module.definitions.items()
        if module.is_package or isinstance(statement, Definition) or _is_reexport(statement, name)
    ]


def _is_reexport(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.ImportFrom) and any(
        alias.name == alias.asname == name for alias in statement.names
    )


def _imported_module(statement: ast.ImportFrom, module: Module) -> str:
    if statement.level == 0:
        return statement.module or ""
    parts = module.name.split(".")
    keep = len(parts) - statement.level + (1 if module.is_package else 0)
    return ".".join([*parts[:keep], *([statement.module] if statement.module else [])])


def _original_name(statement: ast.ImportFrom, name: str) -> str:
    return next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)


def _exists(name: str) -> bool:
    return _spec(name) is not None


def lies_in(name: str, folder: Path) -> bool:
    """True if a module is found through the import path entry `folder`, and not through an entry inside it."""
    spec = _spec(name)
    if spec is None or spec.origin is None:
        return False
    origin = _resolved(os.path.abspath(spec.origin))
    entries = [_resolved(os.path.abspath(entry)) for entry in sys.path]
    through = [entry for entry in entries if origin.is_relative_to(entry)]
    return bool(through) and max(through, key=lambda entry: len(entry.parts)) == folder.resolve()


@cache
def _resolved(path: str) -> Path:
    """A path without symlinks. Cached, since a check of all recipes calls it 250,000 times for few paths."""
    return Path(path).resolve()


def _spec(name: str) -> ModuleSpec | None:
    """The module's spec, searched folder by folder so that no package is imported."""
    parts = name.split(".")
    # Finders of installed packages return the spec of a top-level name without importing it.
    try:
        spec = importlib.util.find_spec(parts[0])
    except ValueError:
        return None  # a module that was not imported from anywhere, such as __main__
    for index in range(1, len(parts)):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = _spec_in(".".join(parts[: index + 1]), list(spec.submodule_search_locations))
    return spec


def _spec_in(name: str, folders: list[str]) -> ModuleSpec | None:
    """The spec of a module in the given folders; a namespace over all matching folders if none has a package."""
    portions: list[str] = []
    for folder in folders:
        finder = pkgutil.get_importer(folder)
        spec = None if finder is None else finder.find_spec(name)
        if spec is None:
            continue
        if spec.loader is not None:
            return spec
        portions.extend(spec.submodule_search_locations or [])
    if not portions:
        return None
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace


def _children(name: str) -> list[str]:
    spec = _spec(name)
    locations = [] if spec is None else list(spec.submodule_search_locations or [])
    return [info.name for info in pkgutil.iter_modules(locations)]
