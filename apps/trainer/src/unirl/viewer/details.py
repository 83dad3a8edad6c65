"""What is known of a run besides curves and samples: recipe, alarms, log, checkpoints with commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.app.export_commands import exports
from unirl.app.run_directory import CHECKPOINTS, LOG_FILE
from unirl.tracking.keys import flat
from unirl.viewer.run_files import ALERTS, SUMMARY, RunFolder

Json = dict[str, Any]  # Any: JSON values
MAX_LOG_BYTES = 256 << 10
OUTPUT_LOG = "output.log"
"""What `trainer compare` keeps of a run's output."""


def recipes(runs: Sequence[RunFolder]) -> Json:
    """Every key of the recipes with its value in each run; `differs` where they are not all equal."""
    values = [dict(flat(run.recipe())) for run in runs]
    keys = sorted({key for own in values for key in own})
    rows = []
    for key in keys:
        shown = [json.dumps(own[key], default=str) if key in own else None for own in values]
        rows.append({"key": key, "values": shown, "differs": len(set(shown)) > 1})
    return {"runs": [run.name for run in runs], "rows": rows}


def alerts(run: RunFolder) -> list[Json]:
    """Alarms that began, the newest first. Lines that are cut off are left out."""
    found = []
    for line in (run.text(ALERTS) or "").splitlines():
        try:
            alert = json.loads(line)
        except ValueError:
            continue
        if isinstance(alert, dict):
            found.append(alert)
    return found[::-1]


def log(run: RunFolder) -> Json:
    """The end of the run's log, or of the output that a comparison kept."""
    for name in (LOG_FILE, OUTPUT_LOG):
        path = run.path / name
        if path.is_file():
            with run.file(name).open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - MAX_LOG_BYTES))
                text = file.read().decode("utf-8", errors="replace")
            return {"file": name, "text": text, "is_cut": size > MAX_LOG_BYTES}
    return {"file": None, "text": "", "is_cut": False}


def checkpoints(run: RunFolder) -> Json:
    """Checkpoints of the run, and commands that use them, each to be copied as it stands."""
    try:
        paths = sorted(path for path in (run.path / CHECKPOINTS).glob("step-*") if ".tmp-" not in path.name)
    except OSError:
        paths = []
    best = run.mapping(f"{CHECKPOINTS}/best.json") or {}
    steps = [int(path.name[5:]) for path in paths if path.name[5:].isdecimal()]
    rows = [
        {
            "step": step,
            "folder": str(run.path / CHECKPOINTS / f"step-{step:06d}"),
            "is_best": step == best.get("step"),
            "is_newest": step == steps[-1],
            "score": best.get("score") if step == best.get("step") else None,
            "commands": commands(run, str(step)),
        }
        for step in reversed(steps)
    ]
    return {"checkpoints": rows, "continue": f"uv run trainer {_quoted(run.path)} resume=auto"}


def commands(run: RunFolder, which: str) -> list[tuple[str, str]]:
    """(what it does, command) for a checkpoint."""
    trainer, folder = ["uv", "run", "trainer"], _quoted(run.path)
    export = [*trainer, "export", folder, "--checkpoint", which]
    return [
        ("evaluate", f"uv run trainer eval {folder} --checkpoint {which}"),
        *[(label, " ".join(words)) for label, words in exports(export, _trains_lora(run.recipe()))],
    ]


def _trains_lora(recipe: Mapping[str, Any]) -> dict[str, bool]:  # Any: values of a recipe
    """By trained policy: True if only a LoRA trains."""
    policies = recipe.get("policies")
    own = policies if isinstance(policies, dict) and policies else {"default": recipe}
    sections = {name: section for name, section in own.items() if isinstance(section, dict)}
    return {
        name: isinstance(section.get("backend"), dict) and section["backend"].get("lora") is not None
        for name, section in sections.items()
        if section.get("trains", True)
    }


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def summary(run: RunFolder) -> Mapping[str, Any] | None:  # Any: JSON values
    """What the run wrote at its end."""
    return run.mapping(SUMMARY)
