"""The list of runs: what each is and where it stands, from the first and last line of its metrics."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from unirl.viewer.metrics import first_line, last_line, parsed
from unirl.viewer.run_files import ALERTS, METRICS, REQUESTS, SAMPLES, SUMMARY, TIMELINE, RunFolder

Json = dict[str, Any]  # Any: JSON values


class Overview:
    """Rows of the list, kept as long as a run's files stay as they are."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[object, Json]] = {}
        self._recipes: dict[str, tuple[object, Json]] = {}

    def row(self, run: RunFolder) -> Json:
        """What the list says of a run."""
        signature = (run.signature(), run.is_running())
        known = self._rows.get(run.name)
        if known is None or known[0] != signature:
            known = self._rows[run.name] = (signature, {"name": run.name, **self._facts(run)})
        return known[1]

    def _facts(self, run: RunFolder) -> Json:
        signature = run.signature()
        last = parsed(last_line(run.path / METRICS) or b"") or {}
        first = parsed(first_line(run.path / METRICS) or b"") or {}
        recipe = self._recipe(run)
        times = {name: time / 1e9 for name, _, time in signature}
        return {
            **recipe,
            "step": last.get("step"),
            "state": state(run),
            "changed": max((time for name, time in times.items() if name != SAMPLES), default=None),
            "reward": last.get("reward/mean"),
            "eval_before": first.get("eval/reward") if first.get("step") == 0 else None,
            "eval": last.get("eval/reward"),
            "num_alarms": sum(1 for name, value in last.items() if name.startswith("alarm/") and value == 1.0),
            "has": sorted(times.keys() & {ALERTS, REQUESTS, SAMPLES, TIMELINE}),
        }

    def _recipe(self, run: RunFolder) -> Json:
        # YAML is slow, and recipes of 50 runs would be half of the first page; it is written once.
        stamp = next((entry for entry in run.signature() if entry[0] == "config.yaml"), None)
        known = self._recipes.get(run.name)
        if known is None or known[0] != stamp:
            recipe = run.recipe()
            facts = {key: recipe.get(key) for key in ("recipe", "seed", "num_rollouts")}
            same = {key: value for key, value in recipe.items() if key not in ("seed", "run_dir")}
            known = (stamp, {**facts, "kin": kin(same)})
            self._recipes[run.name] = known
        return known[1]


def kin(recipe: object) -> str:
    """Equal for runs that differ in their seed alone."""
    return hashlib.sha256(msgspec.json.encode(recipe, order="sorted")).hexdigest()[:12]


def state(run: RunFolder) -> str:
    """`running`, `finished`, `stopped` (its summary says so), `ended` (without a summary), or `unknown`: another
    machine's."""
    is_running = run.is_running()
    if is_running:
        return "running"
    if is_running is None:
        return "unknown"
    summary = run.mapping(SUMMARY)
    if summary is None:
        return "ended"
    return "finished" if summary.get("is_complete") is True else "stopped"
