"""Writes docs/reference/recipes.md, every packaged recipe with what is known of it, and the same as
`unirl/recipes/evidence.json`, which `trainer list` reads:

    uv run --no-sync python docs/reference/recipes.py             # from the recipes, minutes
    uv run --no-sync python docs/reference/recipes.py --page-only # new descriptions and figures, a second

What is known is read off the pages of results, never written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unirl.app.evidence import FILE, LEVELS
from unirl.config.catalog import available

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = Path(__file__).with_suffix(".md")
EVIDENCE = ROOT / "apps" / "trainer" / "src" / "unirl" / "recipes" / FILE
INTRODUCTION = """# Recipes

{count} recipes come with the trainer. `uv run trainer RECIPE` runs one, `trainer show RECIPE` prints it whole,
`trainer check RECIPE` says what it needs, and any value can be changed on the command line: how it is trained and what
samples it, too ([combining parts](../guides/engines_and_layouts.md)). Written by `docs/reference/recipes.py` from the
recipes and the pages of results; `trainer list` prints the first sentence of each.

"Known" says what stands behind a recipe:

{levels}

A world is a small task that a CPU learns in minutes. No recipe of a released model has a full learning curve here yet.
"""
CURVES = (DOCS / "results" / "algorithms.md", DOCS / "guides" / "stages.md", *sorted((DOCS / "worlds").glob("*.md")))
FAMILY_OF = {
    "anyflow": "anyflow_far",
    "flux": "flux_dev",
    "flux2": "flux2_dev",
    "wan": "wan21_t2v",
    "hunyuan_image": "hunyuan_image21",
    "ltx2": "ltx2_t2v",
    "ltx23": "ltx23_t2v",
    "minimax_h3": "minimax_h3_t2v",
}
"""Folder of a model's code -> its row in docs/models/README.md, where they differ."""
VARIANTS = {"wan22": "wan22_t2v", "hunyuan_video15": "hunyuan_video15_t2v"}
"""Folder of recipes -> the row, where the folder of the code has several."""


def composed(name: str) -> dict[str, Any]:
    """Algorithms and model families of a recipe."""
    from omegaconf import OmegaConf

    from unirl.config.recipes import compose

    targets = list(_targets(OmegaConf.to_container(compose(name), resolve=False)))
    return {
        "algorithms": sorted({path.rsplit(".", 1)[1] for path in targets if path.startswith("unirl.algorithms.")}),
        "models": sorted({path.split(".")[2] for path in targets if path.startswith("unirl.models.")}),
    }


def _targets(node: Any, key: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        if key in ("bundle", "algorithm") and "_target_" in node:
            yield node["_target_"]
        for name, value in node.items():
            yield from _targets(value, key[:-1] if key in ("bundles", "algorithms") else name)


def evidence(name: str, parts: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The levels of a recipe. known: all recipes with their parts."""
    levels = []
    if name in CURVED:
        levels.append("curve")
    learned = {algorithm for world in CURVED if world in known for algorithm in known[world]["algorithms"]}
    if parts["algorithms"] and learned.issuperset(parts["algorithms"]):
        levels.append("algorithm")
    if parts["models"] and all(_row(name, model) in EQUAL for model in parts["models"]):
        levels.append("pipeline")
    if name in REHEARSED:
        levels.append("memory")
    if name in ON_GPU:
        levels.append("GPU")
    return levels


def _row(name: str, model: str) -> str:
    return VARIANTS.get(name.split("/")[0]) or FAMILY_OF.get(model, model)


def curves() -> set[str]:
    """Worlds whose learning a page tabulates: a row or a sentence that names the recipe and an accuracy."""
    found = set()
    for page in CURVES:
        for line in page.read_text(encoding="utf-8").splitlines():
            if re.search(r"(?<!\d)\.\d{2,3}\b", line) or "held-out" in line:
                found |= set(re.findall(r"(?:worlds/\w+|vla)/\w+(?=`)", line))
    return found


def rows(page: Path, *, after: str = "") -> set[str]:
    """The first cells of a page's tables below a heading."""
    text = page.read_text(encoding="utf-8")
    text = text[text.index(after) :] if after else text
    text = re.split(r"^## ", text.removeprefix(after), maxsplit=1, flags=re.MULTILINE)[0]
    return set(re.findall(r"^\| `?([\w/]+)`?(?=[ ,`|])", text, re.MULTILINE))


CURVED = curves()
EQUAL = rows(DOCS / "models" / "README.md", after="## Against the stock pipeline\n")
REHEARSED = rows(DOCS / "results" / "rehearsals.md")
ON_GPU = {
    name
    for gpu in ("H100", "H200")
    for name in rows(DOCS / "results" / "performance.md", after=f"## On one {gpu}\n")
    if "/" in name
}


def page(known: Mapping[str, Mapping[str, Any]]) -> str:
    """docs/reference/recipes.md."""
    levels = "\n".join(f"- `{level}`: {text}." for level, text in LEVELS.items())
    lines = [INTRODUCTION.format(count=len(known), levels=levels)]
    groups = defaultdict(list)
    for name, text in available().items():
        groups[name.rsplit("/", 1)[0]].append((name, text))
    for group, recipes in groups.items():
        lines += [f"## {group}", "", "| recipe | what it is | known |", "|---|---|---|"]
        for name, text in recipes:
            lines.append(f"| `{name}` | {text.replace('|', chr(92) + '|')} | {', '.join(known[name]['levels'])} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Write both files."""
    if "--page-only" in sys.argv[1:]:
        known = json.loads(EVIDENCE.read_text(encoding="utf-8"))
    else:
        known = {name: composed(name) for name in available()}
    for name, parts in known.items():
        parts["levels"] = evidence(name, parts, known)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(parts)}" for name, parts in known.items())
    EVIDENCE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    PAGE.write_text(page(known), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
