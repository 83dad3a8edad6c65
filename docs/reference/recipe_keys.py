"""The keys of recipes, a page of the site that is built with it and not kept. To print it:

    uv run python docs/reference/recipe_keys.py

Keys, types, defaults and meanings are those of `unirl.config.schema`, which `check` enforces.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "packages" / "unirl-train" / "src" / "unirl" / "config" / "schema.py"
SECTIONS = {
    "Recipe": "The top of a recipe",
    "PolicySections": "A policy",
    "NamedPolicySections": "Further keys of a policy in `policies`",
    "StageSections": "A stage of `stages`",
    "Pool": "A pool of `pools`",
    "Placement": "`placement`",
    "Cluster": "`cluster`",
    "Schedule": "`schedule`",
    "ExperienceReplay": "`schedule.experience`",
    "Residency": "`residency`",
    "Save": "`save`",
    "Samples": "`samples`",
    "Scouts": "`scouts`",
}
"""Plain sections, in the order of the page. Another one in the schema is an error."""
COMPONENT = re.compile(r"kind='([\w.]+)'")
DEFAULT = re.compile(r"default='([\w.]+)'")


def page() -> str:
    """The page as Markdown."""
    tree = ast.parse(SCHEMA.read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef) and node.name != "Component"}
    if set(classes) != set(SECTIONS):
        raise SystemExit(f"{SCHEMA.name} has {sorted(classes)}, this script knows {sorted(SECTIONS)}")
    shared = {
        target.id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    lines = [
        "# Keys of a recipe",
        "",
        "Built from the schema by which `trainer check` judges recipes. A key with `_target_` names a class; its other "
        "keys are the arguments of that class, which the API pages list. `trainer show RECIPE` prints a recipe with "
        "all its values.",
    ]
    for name, title in SECTIONS.items():
        about = re.sub(r"^Further keys.*", "", ast.get_docstring(classes[name]) or "")
        lines += [
            "",
            f"## {title}",
            "",
            " ".join(about.split()),
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += [f"| {' | '.join(cells)} |" for cells in _rows(classes[name], shared)]
    return "\n".join(lines) + "\n"


def _rows(section: ast.ClassDef, shared: dict[str, str]) -> Iterator[tuple[str, str, str, str]]:
    for node, after in zip(section.body, [*section.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        meaning = " ".join(str(after.value.value).split()) if is_text else ""
        kind, text = _kind(ast.unparse(node.annotation), shared)
        default = "required" if node.value is None else _default(ast.unparse(node.value))
        yield f"`{node.target.id}`", kind, default, _escaped(" ".join(part for part in (meaning, text) if part))


def _kind(annotation: str, shared: dict[str, str]) -> tuple[str, str]:
    """The type as a reader needs it, and what the class of a component must be."""
    if not annotation.startswith("Annotated["):
        return f"`{annotation.replace('|', chr(92) + '|')}`", ""
    component = re.sub(r"\b_[A-Z_]+\b", lambda name: shared.get(name[0], name[0]), annotation)
    base, default = COMPONENT.search(component), DEFAULT.search(component)
    text = f"A kind of `{base[1]}`." if base else ""
    if default:
        text += f" Without `_target_`: `{default[1]}`."
    return "class" if "Mapping[str, Node]" not in annotation else "classes by name", text.strip()


def _default(value: str) -> str:
    if "default_factory" in value:
        return "none"
    return "its own defaults" if re.fullmatch(r"[A-Z]\w+\(\)", value) else f"`{value.replace('None', 'null')}`"


def _escaped(text: str) -> str:
    return re.sub(r"(?<!`)([<>|])", r"\\\1", text)


if __name__ == "__main__":
    sys.stdout.write(page())
