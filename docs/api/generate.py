"""Writes the API reference, one page per package, next to this file: `uv run python docs/api/generate.py`.

A page lists public modules, their public classes and functions, the public methods and fields of these, and documented
constants, with their docstrings. Sources are only parsed, not imported. The pages are not kept in the repository.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {path.name: path / "src" / "unirl" for path in sorted((ROOT / "packages").iterdir()) if path.is_dir()}
"""Name of a package -> its folder of the namespace `unirl`."""
WIDTH = 110
Function = ast.FunctionDef | ast.AsyncFunctionDef


def page(package: str, namespace: Path) -> str:
    """The reference of a package. namespace: its folder that stands for `unirl`."""
    parts = [
        f"# API reference: {package}",
        "Generated from the docstrings by `uv run python docs/api/generate.py`; change those, not this file.",
    ]
    for path in sorted(namespace.rglob("*.py")):
        names = [*path.relative_to(namespace).parts[:-1], *([] if path.stem == "__init__" else [path.stem])]
        if not any(name.startswith("_") for name in names):
            parts += _module(".".join(["unirl", *names]), ast.parse(path.read_text(encoding="utf-8")))
    return "\n\n".join(parts) + "\n"


def _module(name: str, tree: ast.Module) -> Iterator[str]:
    yield f"## {name}"
    if text := ast.get_docstring(tree):
        yield text
    yield from _constants(tree.body)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _is_public(node.name):
            yield from _class(node)
        elif isinstance(node, Function) and _is_public(node.name):
            yield f"### {node.name}\n\n{_code(_signature(node))}"
            if text := ast.get_docstring(node):
                yield text


def _class(node: ast.ClassDef) -> Iterator[str]:
    yield f"### {node.name}"
    init = next((item for item in node.body if isinstance(item, Function) and item.name == "__init__"), None)
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    head = f"class {node.name}({bases})" if bases else f"class {node.name}"
    yield _code(head if init is None else f"{head}\n{_signature(init, node.name)}")
    if text := ast.get_docstring(node):
        yield text
    yield from _fields(node)
    for item in node.body:
        text = ast.get_docstring(item) if isinstance(item, Function) else None
        if isinstance(item, Function) and _is_public(item.name) and text and not text.startswith("See "):
            kinds = [ast.unparse(decorator) for decorator in item.decorator_list]
            is_property = any(kind.endswith("property") for kind in kinds)
            call = f"({', '.join(_parameters(item.args))}){_returns(item, ' -> ')}"
            yield f"- `{item.name}{_returns(item, ': ') if is_property else call}`: {_indented(text)}"


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for item, text in _documented(node.body):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and _is_public(item.target.id):
            value = "" if item.value is None else f" = {ast.unparse(item.value)}"
            field = f"- `{item.target.id}: {ast.unparse(item.annotation)}{value}`"
            yield f"{field}: {_indented(text)}" if text else field


def _constants(body: list[ast.stmt]) -> Iterator[str]:
    for item, text in _documented(body):
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            target = item.targets[0].id
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            target = item.target.id
        else:
            continue
        if text and _is_public(target):
            yield f"- `{target}`: {_indented(text)}"


def _documented(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Statements with the string that stands below each, "" where there is none."""
    for item, below in zip(body, [*body[1:], None], strict=True):
        found = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
        yield item, found if isinstance(found, str) else ""


def _signature(node: Function, name: str | None = None) -> str:
    """The call on one line, or with one parameter per line where that is too long."""
    parameters = list(_parameters(node.args))
    name, result = (node.name, _returns(node, " -> ")) if name is None else (name, "")
    call = f"{name}({', '.join(parameters)}){result}"
    if len(call) <= WIDTH:
        return call
    return f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f"){result}"


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults]
    for argument, default in zip(plain, defaults, strict=True):
        if argument.arg not in ("self", "cls"):
            yield _parameter(argument, default)
    if arguments.vararg:
        yield f"*{_parameter(arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(argument, default)
    if arguments.kwarg:
        yield f"**{_parameter(arguments.kwarg, None)}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    kind = "" if argument.annotation is None else f": {ast.unparse(argument.annotation)}"
    return argument.arg + kind + ("" if default is None else f" = {ast.unparse(default)}")


def _returns(node: Function, mark: str) -> str:
    return "" if node.returns is None else f"{mark}{ast.unparse(node.returns)}"


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _indented(text: str) -> str:
    """As the rest of a list item."""
    return "\n".join(f"  {line.strip()}".rstrip() for line in text.strip().splitlines()).lstrip()


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def main() -> None:
    """Write every page."""
    for package, namespace in PACKAGES.items():
        Path(__file__).with_name(f"{package}.md").write_text(page(package, namespace), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
