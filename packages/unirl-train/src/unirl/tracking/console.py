"""Progress on the terminal: one line that stays up to date, or plain lines where the output is no terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from unirl.tracking.base import Config, Summary, TableRow
from unirl.tracking.tables import columns, shown

if TYPE_CHECKING:
    from pathlib import Path

    from PIL import Image
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

FINE_BLOCKS = "".join(chr(code) for code in range(0x2581, 0x2589))
SPARKLINE_WIDTH = 32
PHASES = ("sync", "rollout", "reward", "train", "eval", "checkpoint", "other")
SHOWN_ROWS = 4
"""Rows of a table that the terminal shows; the run directory has all."""
MAX_CELL = 120
"""Characters of a cell before it is cut."""
SHORTEST_S = 0.05
"""Seconds below which a line of plain output leaves a phase out."""
SHOWN = ("reward/mean", "group/zero_std_ratio", "train/loss", "train/grad_norm", "train/lr", "policy/clipfrac_high")


def sparkline(values: list[float], width: int = SPARKLINE_WIDTH, *, blocks: str = FINE_BLOCKS) -> str:
    """The last values as one line of bars, averaged into `width` bins, scaled from their minimum to their maximum."""
    finite = [value for value in values if value - value == 0]
    if not finite:
        return ""
    num_bins = min(width, len(finite))
    edges = [len(finite) * i // num_bins for i in range(num_bins + 1)]
    bins = [sum(finite[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(bins), max(bins)
    if high == low:
        return blocks[len(blocks) // 2] * num_bins
    return "".join(blocks[round((value - low) / (high - low) * (len(blocks) - 1))] for value in bins)


def folded(head: str, parts: Sequence[str], width: int) -> str:
    """Parts two spaces apart on lines of at most `width` characters, each after the head or below what follows it."""
    rows: list[list[str]] = [[]]
    for part in parts:
        if rows[-1] and len(head) + len("  ".join([*rows[-1], part])) > width:
            rows.append([])
        rows[-1].append(part)
    starts = [head, *[" " * len(head)] * (len(rows) - 1)]
    return "\n".join(start + "  ".join(row) for start, row in zip(starts, rows, strict=True))


def scorer_weights(reward: Config) -> dict[str, float]:
    """Scorers of a recipe's `reward` section and their weights; 0 where one only reports.

    Scorers of a list are called by their `name`, or by their class where the recipe gives none.
    """
    scorers, weights = reward["scorers"], reward.get("weights") or {}
    if isinstance(scorers, Mapping):
        names = [str(name) for name in scorers]
    else:
        names = [str(node.get("name", node["_target_"].rsplit(".", 1)[-1])) for node in scorers]
    return {name: weights.get(name, 1) for name in names}


def reward_formula(reward: Config) -> str:
    """What a recipe's `reward` section trains on: "shapes + 0.1 * smooth; only reported: strict"."""
    weight_of = scorer_weights(reward)
    terms = [name if weight == 1 else f"{weight:g} * {name}" for name, weight in weight_of.items() if weight]
    formula = " + ".join(terms)
    if reward.get("aggregation") == "weighted_mean":
        formula = f"({formula}) / {sum(weight_of.values()):g}"
    reported = [name for name, weight in weight_of.items() if not weight]
    return f"{formula}; only reported: {', '.join(reported)}" if reported else formula


class ConsoleTracker:
    """Progress, seconds by phase, and the reward with a sparkline.

    every: steps between lines where the output is no terminal. console: a rich console to write to; None makes one for
    standard error, which leaves standard output to results.
    """

    def __init__(self, every: int = 1, console: Console | None = None) -> None:
        try:
            from rich.console import Console as RichConsole
        except ImportError as error:
            raise ImportError("the console tracker needs rich: pip install 'unirl-train[console]'") from error
        self._console = console if console is not None else RichConsole(stderr=True, highlight=False)
        self._every = max(1, every)
        self._live: Live | None = None
        self._total = 0
        self._first_step = 0
        self._started = time.perf_counter()
        self._step = 0
        self._logged_at = self._started
        self._metrics: Mapping[str, float] = {}
        self._name = ""
        self._best_metric = "reward"
        self._rewards: list[float] = []
        self._evaluations: dict[int, dict[str, float]] = {}
        self._seconds: dict[str, float] = {}
        self._alarm = ""

    def start(self, config: Config, run_dir: Path, step: int) -> None:
        """Say what runs and where; begin the live display on a terminal."""
        self._name, self._total, self._first_step = str(config["recipe"]), int(config["num_rollouts"]), step
        self._best_metric = str((config.get("save") or {}).get("best_metric", "reward"))
        self._started = self._logged_at = time.perf_counter()
        self._step = step
        resumed = f", resumed after {step}" if step else ""
        rollouts = f"{self._total} rollouts{resumed}"
        if 0 < self._total <= step:
            rollouts = f"nothing to do: {step} rollouts are done and num_rollouts is {self._total}; set a larger one"
        self._console.print(f"[bold]{self._name}[/bold]  {rollouts}  {run_dir}", soft_wrap=True)
        if config.get("reward"):
            self._console.print(f"reward: {reward_formula(config['reward'])}", soft_wrap=True, markup=False)
        old_logp = (config.get("resolved") or {}).get("old_logp")
        if old_logp is not None:
            self._console.print(f"old log-probs: {old_logp}", soft_wrap=True)
        if self._console.is_terminal:
            from rich.live import Live as RichLive

            # Asked for anew at every refresh, so that the clock runs between rollouts too.
            self._live = RichLive(get_renderable=self._table, console=self._console, refresh_per_second=2)
            self._live.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Show a step."""
        self._step, self._metrics, self._logged_at = step, metrics, time.perf_counter()
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        for name, value in metrics.items():
            if name.startswith("timing_s/"):
                phase = name.removeprefix("timing_s/")
                self._seconds[phase] = self._seconds.get(phase, 0.0) + value
        evaluation = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if evaluation:
            self._evaluations[step] = evaluation
        if self._live is not None:
            self._live.refresh()
        elif evaluation or step % self._every == 0 or step == self._total:
            self._console.print(self._lines(step, metrics), soft_wrap=True)

    def image(self, name: str, picture: Image.Image, step: int, captions: Sequence[str]) -> None:
        """Images are written to the run directory; a terminal shows none."""

    def video(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Files are not for a terminal."""

    def sound(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Files are not for a terminal."""

    def table(self, name: str, rows: Sequence[TableRow], step: int) -> None:
        """The first rows, above the live display."""
        from rich.table import Table as RichTable
        from rich.text import Text

        names = columns(rows)
        table = RichTable(*names, title=f"{name} at {step}")
        for row in rows[:SHOWN_ROWS]:
            # Text, because a completion may hold what rich takes for markup.
            table.add_row(*(Text(shown(row.get(name, ""), MAX_CELL)) for name in names))
        self._console.print(table)

    def alert(self, name: str, text: str, step: int) -> None:
        """Kept in sight by the live display; plain output has the line of the log."""
        self._alarm = f"{name} at {step}: {text}"

    def finish(self, summary: Summary) -> None:
        """End the live display."""
        self.close()

    def close(self) -> None:
        """End the live display, which gives the cursor back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _lines(self, step: int, metrics: Mapping[str, float]) -> str:
        """A step as text, folded between values at the width of the output."""
        parts = [f"{name} {metrics[name]:.4g}" for name in SHOWN if name in metrics]
        parts += [f"eval/{name} {value:.3f}" for name, value in self._scores(metrics)]
        seconds = {phase: metrics.get(f"timing_s/{phase}", 0.0) for phase in PHASES}
        parts += [f"{phase} {value:.1f}s" for phase, value in seconds.items() if value >= SHORTEST_S]
        head = f"{step}/{self._total}  "
        return folded(head, parts, self._console.width)

    def _scores(self, metrics: Mapping[str, float]) -> list[tuple[str, float]]:
        """The held-out means worth a line: the one that the best checkpoint is chosen by, and the reward."""
        names = dict.fromkeys((self._best_metric, "reward"))
        return [(name, metrics[f"eval/{name}"]) for name in names if f"eval/{name}" in metrics]

    def _table(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table as RichTable

        table = RichTable.grid(padding=(0, 2))
        step, metrics, now = self._step, self._metrics, time.perf_counter()
        done = step - self._first_step
        elapsed = now - self._started
        a_rollout = (self._logged_at - self._started) / done if done > 0 else 0.0
        remaining = max(a_rollout * (self._total - step) - (now - self._logged_at), 0.0)
        left = f", {_duration(remaining)} left" if done > 0 else ""
        table.add_row("rollout", f"{step} of {self._total}   {_duration(elapsed)}{left}")
        table.add_row("", ProgressBar(total=max(1, self._total), completed=step, width=40))
        if self._rewards:
            table.add_row("reward", f"{self._rewards[-1]:.4f}  {sparkline(self._rewards)}")
        for name in SHOWN[1:]:
            if name in metrics:
                table.add_row(name, f"{metrics[name]:.4g}")
        if self._alarm:
            from rich.text import Text

            table.add_row("last alarm", Text(self._alarm, style="bold red"))
        if self._evaluations:
            at, latest = max(self._evaluations.items())
            scores = "  ".join(f"{name} {value:.3f}" for name, value in self._scores(latest))
            table.add_row(f"held out at {at}", scores)
        total = sum(self._seconds.values())
        if total > 0:
            shares = [f"{name} {100 * self._seconds[name] / total:.0f}%" for name in PHASES if name in self._seconds]
            table.add_row("time", "  ".join(shares))
        return table


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
