"""The table as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unirl.app.conformance.cases import MODELS
from unirl.types.errors import as_sentence

Row = Mapping[str, Any]  # Any: JSON

INTRODUCTION = """# Conformance: what every engine does with every model

Written by `trainer conformance --output docs/reference/conformance.json`, which measures each cell on the small
models that come with the trainer, in float32 on a CPU; qwen_image is the small Qwen-Image-Edit without images;
flux1, flux1_kontext, flux1_fill, z_image, wan21_i2v, wan22, wan22_ti2v, hunyuan_video, hunyuan_video15,
hunyuan_video15_i2v and ltx2 have random weights.
`trainer conformance --against docs/reference/conformance.json` ends with status 1 where a cell got worse: a claim that
held and does not, or a number that grew tenfold.

- learns: two steps change what trains, with finite metrics and a first ratio of 1.
- full push, adapter push, log-prob gap: largest difference of the engine's log-probs and a replay's by the model that
  trains, after its weights have moved; in nats, of a latent's element or of a token.
- named policy: largest difference of final latents, the algorithm's own named copy of the weights sampled by both.
- sigmas, latents, initial latents, step subsets: the engine stepped on the request's sigmas, gave the latents around
  each stochastic step, began from the given noise, and made only the asked steps stochastic.
- media: another image gives other samples.
- rewards: those of 64 samples of the engine (256 of texts) are distributed as those of the trainer's model, of the
  same requests, by tests of Mann and Whitney and of Kolmogorov and Smirnov at a level of .001.

A whole number says below the table why there is nothing to measure; an empty cell has not been measured.
"""


def page(table: Mapping[str, Any]) -> str:
    """The page of a table."""
    lines = [INTRODUCTION]
    for kind, title in (("latents", "Images and videos"), ("text", "Texts")):
        rows = {
            (model, engine): row
            for model, engines in table["cells"].items()
            if MODELS[model].kind == kind
            for engine, row in engines.items()
        }
        if rows:
            lines += [f"## {title}", "", *_table(rows), ""]
    missing = [f"{name} was not measured: {as_sentence(reason)}" for name, reason in table["not measured"].items()]
    served_by = [f"Versions of {name}: {_told(own)}." for name, own in table.get("engine versions", {}).items()]
    return "\n".join([*lines, *missing, f"Versions: {_told(table['versions'])}.", *served_by]) + "\n"


def _told(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _table(rows: Mapping[tuple[str, str], Row]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    reasons: list[str] = []
    lines = [
        "| model | engine | " + " | ".join(names) + " |",
        "|---" * (len(names) + 2) + "|",
    ]
    for (model, engine), row in rows.items():
        cells = [_shown(row.get(name), reasons) for name in names]
        lines.append(f"| {model} | {engine} | " + " | ".join(cells) + " |")
    return [*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]


def _shown(cell: Any, reasons: list[str]) -> str:  # Any: JSON
    """What a cell of the table says; a reason is numbered once."""
    if cell is None:
        return ""
    if isinstance(cell, dict):
        if "failed" in cell:
            return f"**failed**: {cell['failed']}".replace("|", "\\|")
        return str(_number(cell["n/a"], reasons))
    if isinstance(cell, bool):
        return "yes" if cell else "**no**"
    return "0" if cell == 0 else f"{cell:.1e}"


def _number(reason: str, reasons: list[str]) -> int:
    if reason not in reasons:
        reasons.append(reason)
    return reasons.index(reason) + 1
