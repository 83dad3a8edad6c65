"""What a person sees at the end of a run: before and after by category, where things lie, what to try next."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from unirl.app.export_commands import exports
from unirl.trainer.resuming import described

Summary = Mapping[str, Any]  # Any: JSON values, see docs/reference/metrics.md
MAX_METRICS = 2
OVERALL = "all"


@dataclass(frozen=True)
class After:
    """What can be done with a finished run, as its recipe says."""

    trains_lora: Mapping[str, bool] = dataclasses.field(default_factory=lambda: {"default": False})
    """By trained policy: True if only a LoRA trains."""
    evaluates: bool = True
    """True if the recipe has a held-out evaluation."""
    needs_trust: bool = False
    """True if it names code that does not come with UniRL."""


def final_screen(summary: Summary, after: After) -> Group:
    """The end screen of a run, from its summary."""
    head = "finished" if summary["is_complete"] else "stopped early"
    line = (
        f"{summary['recipe']} {head}: {summary['num_rollouts']} rollouts, {summary['num_samples']} samples, "
        f"{summary['wall_s']:.0f} s"
    )
    parts: list[Any] = [Text(line, style="bold")]  # Any: rich renderables have no common base
    first, last = summary.get("eval_before"), summary.get("eval_after")
    if first or last:
        parts.append(evaluation_table(first, last, _preferred(summary)))
    if changes := resume_changes(summary):
        # Below the table and not its caption, which would be wrapped to the table's width.
        parts.append(Text("\n".join(changes), style="yellow"))
    parts.append(Text(next_steps(summary, after), no_wrap=True, overflow="ignore"))
    return Group(*parts)


def resume_changes(summary: Summary) -> list[str]:
    """What other settings the run was resumed with, a line each; empty for a run of one recipe."""
    lines = []
    for change in summary.get("resume_changes") or []:
        lines.append(f"resumed after rollout {change['rollout']} with other settings (config-*.yaml):")
        lines += [f"  {line}" for line in described(change["settings"])]
    return lines


def evaluation_table(before: Summary | None, after: Summary | None, preferred: str = "reward") -> Table:
    """Held-out means by category; a pair of columns (before, after) for each of the first metrics.

    before, after: records with `overall` and `categories`; either may be None. preferred: the metric shown first.
    """
    present = [record for record in (before, after) if record]
    metrics = _distinct_metrics(present[-1], preferred) if present else []
    since = "" if after or not before else " before training; there was none since"
    table = Table(title=f"held-out evaluation{since}", title_justify="left")
    table.add_column("category")
    for metric in metrics:
        for record, word in ((before, "before"), (after, "after")):
            if record:
                table.add_column(f"{metric}\n{word}" if before and after else metric, justify="right")
        if before and after:
            table.add_column("change", justify="right")
    names = list(dict.fromkeys(name for record in present for name in record["categories"]))
    for name in [*(n for n in names if n != OVERALL), OVERALL]:
        table.add_row(name, *(cell for metric in metrics for cell in _cells(before, after, name, metric)))
    return table


def next_steps(summary: Summary, after: After) -> str:
    """Where the run lies and commands to go on with, each on one line however long, to be copied as it stands."""
    run_dir = str(summary["run_dir"])
    picture = Path(run_dir) / "samples" / "before_after.png"
    trainer, run = ["uv", "run", "trainer"], shlex.quote(run_dir)
    trust = ["--trust"] if after.needs_trust else []
    commands = [
        ("view", [*trainer, "view", run]),
        *([("evaluate", [*trainer, "eval", run, *trust])] if after.evaluates else []),
        *[(label, [*words, *trust]) for label, words in exports([*trainer, "export", run], after.trains_lora)],
        *([] if summary["is_complete"] else [("continue", [*trainer, run, "resume=auto", *trust])]),
        ("more", [*trainer, "list"]),
    ]
    lines = [_labelled("run", run_dir), _labelled("look", str(picture if picture.is_file() else picture.parent))]
    return "\n".join([*lines, *(_labelled(label, " ".join(words)) for label, words in commands)])


def _labelled(label: str, text: str) -> str:
    return f"{label:11}{text}"


def _preferred(summary: Summary) -> str:
    return str((summary.get("settings") or {}).get("best_metric", "reward"))


def _distinct_metrics(record: Summary, preferred: str) -> list[str]:
    """The preferred metric and others, leaving out those that repeat the values of one already there."""
    overall = record["overall"]
    ordered = [name for name in (preferred, "reward", *overall) if name in overall]
    chosen: list[str] = []
    for name in dict.fromkeys(ordered):
        if all(overall[name] != overall[other] for other in chosen):
            chosen.append(name)
    return chosen[:MAX_METRICS]


def _cells(before: Summary | None, after: Summary | None, category: str, metric: str) -> list[str]:
    values = [_value(record, category, metric) for record in (before, after) if record]
    cells = [f"{value:.3f}" if value is not None else "-" for value in values]
    if before and after:
        first, last = values
        cells.append(f"{last - first:+.3f}" if first is not None and last is not None else "-")
    return cells


def _value(record: Summary, category: str, metric: str) -> float | None:
    values = record["overall"] if category == OVERALL else record["categories"].get(category, {})
    return values.get(metric)
