"""Writes docs/reference/papers.md, every paper that code, recipes and pages name:

    uv run --no-sync python docs/reference/papers.py

What is known of a paper stands in papers.yaml. Where it is implemented is read off the arXiv numbers in the code, and
its recipes off the comments that recipes begin with.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from unirl.app.evidence import FILE
from unirl.config.catalog import available

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_suffix(".md")
ALGORITHMS = PAGE.with_name("algorithms.md")
RECIPES = ROOT / "apps" / "trainer" / "src" / "unirl" / "recipes"
NUMBER = re.compile(r"(?<![\d.])\d{4}\.\d{5}(?!\d)")
INTRODUCTION = """# Papers

What is implemented of which paper, which recipes have it, and what differs. Written by `docs/reference/papers.py` from
`papers.yaml`, from the arXiv numbers in the code and from the comments that recipes begin with.
[Algorithms](algorithms.md) has objectives, knobs and pitfalls, [recipes](recipes.md) what is known of each recipe.
Modules are named below `unirl`.

"Published" has the papers' own figures on their models and rewards; they were not reproduced here. Recipes in braces
share a folder.
"""
SECTIONS = {
    "Algorithms": ("unirl.algorithms",),
    "Sampling": ("unirl.sde", "unirl.models.guidance", "unirl.rollout"),
    "Rewards, benchmarks and data": ("unirl.reward", "unirl.datasets"),
    "Models": ("unirl.models",),
    "Training and evaluation": ("unirl",),
}
"""Heading -> packages. A paper stands under the first that names it; one that has published figures or that pages alone
name, under the first of all."""


class Paper(NamedTuple):
    """An entry of papers.yaml."""

    name: str
    called: Sequence[str] = ()
    section: str | None = None
    algorithm: str | None = None
    recipes: Sequence[str] = ()
    published: str = ""
    differs: str = ""


def papers() -> dict[str, Paper]:
    """arXiv number -> what is known of it."""
    entries: dict[str, dict[str, Any]] = yaml.safe_load(PAGE.with_suffix(".yaml").read_text(encoding="utf-8"))
    return {number: Paper(**entry) for number, entry in entries.items()}


def named() -> dict[str, list[Path]]:
    """arXiv number -> the files that name it, from the root: code, recipes and pages, without what is written here."""
    found = defaultdict(list)
    patterns = ("packages/*/src/**/*.py", "apps/*/src/**/*.py", "apps/*/src/**/*.yaml", "docs/**/*.md", "README.md")
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)} - {PAGE}):
        for number in set(NUMBER.findall(path.read_text(encoding="utf-8"))):
            found[number].append(path.relative_to(ROOT))
    return dict(found)


def module(path: Path) -> str:
    """Import path of a file below a folder `src`."""
    return ".".join(path.with_suffix("").parts[path.parts.index("src") + 1 :])


def recipes_of(known: Mapping[str, Paper]) -> dict[str, list[str]]:
    """arXiv number -> recipes whose first comment has the number or one of its names, and the class of its algorithm.

    Of names that overlap the longest counts: a recipe of Dr. GRPO is none of GRPO.
    """
    algorithms = json.loads((RECIPES / FILE).read_text(encoding="utf-8"))
    names = sorted({name for paper in known.values() for name in (paper.name, *paper.called)}, key=len, reverse=True)
    every = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, names))})(?![\w-])")
    found = defaultdict(list)
    for recipe, text in available().items():
        said = set(every.findall(text)) | set(NUMBER.findall(text))
        for number, paper in known.items():
            is_its_class = paper.algorithm is None or paper.algorithm in algorithms[recipe]["algorithms"]
            if is_its_class and said & {number, paper.name, *paper.called}:
                found[number].append(recipe)
    return dict(found)


def in_braces(recipes: Iterable[str]) -> str:
    """Names of recipes for a page, those of one folder together."""
    folders, others = defaultdict(list), []
    for recipe in dict.fromkeys(recipes):
        if recipe in available():
            folder, name = recipe.rsplit("/", 1)
            folders[folder].append(name)
        else:
            others.append(recipe)
    shown = []
    for folder, names in folders.items():
        several = "{" + ",".join(sorted(names)) + "}"
        shown.append(f"`{folder}/{several if len(names) > 1 else names[0]}`")
    return ", ".join([*sorted(shown), *others])


def section_of(paper: Paper, modules: Iterable[str]) -> str:
    """The heading under which a paper stands that these modules name."""
    for heading, packages in SECTIONS.items():
        if paper.published or any(name.startswith(packages) for name in modules):
            return heading
    return next(iter(SECTIONS))


def page() -> str:
    """docs/reference/papers.md."""
    known, files = papers(), named()
    found = recipes_of(known)
    anchors = {_anchor(line) for line in ALGORITHMS.read_text(encoding="utf-8").splitlines() if line.startswith("#")}
    rows: dict[str, list[dict[str, str]]] = {heading: [] for heading in SECTIONS}
    for number, paper in sorted(known.items(), reverse=True):
        modules = [module(path) for path in files.get(number, []) if path.suffix == ".py"]
        heading = section_of(paper, modules)
        is_method = heading == next(iter(SECTIONS))
        anchor = paper.section or _anchor(paper.name)
        title = f"[{paper.name}](algorithms.md#{anchor})" if is_method and anchor in anchors else paper.name
        rows[heading].append(
            {
                "paper": f"{title}, [{number}](https://arxiv.org/abs/{number}), 20{number[:2]}",
                "implemented in": ", ".join(
                    f"`{name.removeprefix('unirl.')}`"
                    for name in modules
                    if not (is_method and name.startswith("unirl.reward."))
                ),
                "recipes": in_braces([*(found.get(number, []) if is_method else []), *paper.recipes]),
                "published": paper.published,
                "what differs": paper.differs,
            }
        )
    lines = [INTRODUCTION]
    for heading, own in rows.items():
        columns = [name for name in own[0] if any(row[name] for row in own)]
        lines += [f"## {heading}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [*(f"| {' | '.join(row[name] for name in columns)} |" for row in own), ""]
    return "\n".join(lines)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
