"""Results for people: a table by category, and a sheet of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image as PillowImage

from unirl.suites.results import Document
from unirl.suites.suite import Judged
from unirl.tracking.gallery import fitted, image_grid, sheet
from unirl.tracking.media import before_after, marks
from unirl.tracking.media_files import read_medium
from unirl.types.samples import Image, SampleRecord, Video

ON_SHEET = 24
"""Samples of a sheet."""
TEXT_LENGTH = 300
"""Characters of a text that a page shows."""


def results_page(found: Document, sheet_file: str | None, shown: Sequence[Judged]) -> str:
    """Markdown: the numbers by category with their intervals, and samples."""
    names = list(found["metrics"])
    lines = [f"# {found['suite']['name']}: {model_name(found['model'])}", "", _counts(found), ""]
    lines += [f"- {change}" for change in found["changes"]] + ([""] if found["changes"] else [])
    lines += [_row("category", "prompts", *names), "|---|---" + "|---" * len(names) + "|"]
    categories = list(found["metrics"][names[0]]["categories"])
    for category in categories if len(categories) > 1 else ():
        own = [found["metrics"][name]["categories"].get(category) for name in names]
        lines.append(_row(category, str(own[0]["num_prompts"]), *map(_cell, own)))
    overall = [found["metrics"][name]["overall"] for name in names]
    lines.append(_row("**all**", str(found["num_prompts"]), *map(_cell, overall)))
    how = "the mean of the categories" if found["suite"]["overall"] == "categories" else "the mean of all samples"
    lines += ["", f"In brackets: 95 % intervals over prompts. All: {how}. Source: {found['suite']['source']}."]
    lines += ["", f"![samples]({sheet_file})"] if sheet_file else []
    lines += [line for each in shown if each.media and each.media["kind"] == "text" for line in _text(each)]
    return "\n".join(lines) + "\n"


def comparison_page(found: Document, sheet_file: str | None, pairs: Sequence[tuple[Judged, Judged]]) -> str:
    """Markdown: differences by category with their intervals, and samples side by side."""
    before, after = model_name(found["before"]), model_name(found["after"])
    lines = [f"# {found['suite']['name']}: {before} and {after}", ""]
    lines.append(f"{after} less {before}, on the same prompts and noise; 95 % intervals over prompts.")
    if found["changes"]["before"] != found["changes"]["after"]:
        lines += ["", "The two were not measured alike:", ""]
        for name, changes in ((before, found["changes"]["before"]), (after, found["changes"]["after"])):
            lines.append(f"- {name}: {'; '.join(changes) or 'the suite unchanged'}")
    for name, own in found["metrics"].items():
        lines += ["", f"## {name}", "", _row("category", "prompts", "difference"), "|---|---|---|"]
        parts = own["categories"] if len(own["categories"]) > 1 else {}
        for category, part in [*parts.items(), ("**all**", own["overall"])]:
            lines.append(_row(category, str(part["num_prompts"]), _cell(part, signed=True)))
    lines += ["", f"![samples]({sheet_file})"] if sheet_file else []
    for first, second in pairs:
        if first.media and first.media["kind"] == "text":
            lines += [
                "",
                f"**{_short(first.prompt)}**",
                "",
                f"- {before}: {_said(first)}",
                f"- {after}: {_said(second)}",
            ]
    return "\n".join(lines) + "\n"


def samples_to_show(judged: Sequence[Judged]) -> list[Judged]:
    """The first sample of some prompts, categories in turn."""
    queues: dict[str, list[Judged]] = {}
    for each in judged:
        if each.index == 0:
            queues.setdefault(each.categories[0], []).append(each)
    turns = max(map(len, queues.values()), default=0)
    return [own[turn] for turn in range(turns) for own in queues.values() if turn < len(own)][:ON_SHEET]


def pairs_to_show(before: Sequence[Judged], after: Sequence[Judged]) -> list[tuple[Judged, Judged]]:
    """The samples of `samples_to_show` next to those of another model for the same prompt and index."""
    first = {(each.prompt_id, each.index): each for each in before}
    keyed = [((each.prompt_id, each.index), each) for each in samples_to_show(after)]
    return [(first[key], each) for key, each in keyed if key in first]


def sheet_of(shown: Sequence[Judged], samples: Path, metric: str) -> PillowImage.Image | None:
    """Images or videos with prompts and scores; None of texts."""
    records = [each for each in (_record(one, samples) for one in shown) if isinstance(each.media, (Image, Video))]
    return image_grid(records, metric) if records else None


def sheet_of_pairs(
    pairs: Sequence[tuple[Judged, Judged]], before: Path, after: Path, metric: str
) -> PillowImage.Image | None:
    """Images or videos of two models side by side; None of texts."""
    both = [(_record(first, before), _record(second, after)) for first, second in pairs]
    both = [pair for pair in both if all(isinstance(each.media, (Image, Video)) for each in pair)]
    if not both:
        return None
    sheets = [sheet(records) for records in zip(*both, strict=True)]
    height, width = (max(each.shape[side] for each in sheets) for side in (-2, -1))
    marked = [marks([each.scores or None for each in records], metric) for records in zip(*both, strict=True)]
    return before_after(
        fitted(sheets[0], height, width),
        fitted(sheets[1], height, width),
        [first.prompt for first, _ in both],
        marked=(marked[0], marked[1]),
    )


def model_name(model: Mapping[str, Any]) -> str:  # Any: JSON values
    """A model in a few words."""
    return str(model["name"])


def _record(judged: Judged, samples: Path) -> SampleRecord:
    return SampleRecord(
        sample_id=judged.prompt_id,
        track="",
        group_id=judged.prompt_id,
        prompt_id=judged.prompt_id,
        prompt=judged.prompt,
        media=read_medium(dict(judged.media), samples) if judged.media else None,
        scores={"reward": next(iter(judged.scores.values())), **judged.scores} if judged.scores else {},
    )


def _counts(found: Document) -> str:
    failed = f", {found['num_failed']} without a score ({found['first_error']})" if found["num_failed"] else ""
    return f"{found['num_samples']} samples of {found['num_prompts']} prompts{failed}."


def _cell(part: Mapping[str, Any] | None, *, signed: bool = False) -> str:  # Any: JSON values
    if part is None:
        return "-"
    form = "+.3f" if signed else ".3f"
    return f"{part['value']:{form}} [{part['low']:{form}}, {part['high']:{form}}]"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _text(judged: Judged) -> list[str]:
    return ["", f"**{_short(judged.prompt)}**", "", f"- {_said(judged)}"]


def _said(judged: Judged) -> str:
    scores = ", ".join(f"{name} {value:.3g}" for name, value in judged.scores.items())
    return f"{_short(str(judged.media['text']))} ({scores or judged.error})"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT_LENGTH else f"{line[:TEXT_LENGTH]} ..."
