"""Metrics as lines of JSON, one object a step, whole after every step."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path

from unirl.tracking.base import Config, Summary, WithoutSamples
from unirl.types.errors import ContractError

logger = logging.getLogger(__name__)

ALERTS = "alerts.jsonl"


class JsonlTracker(WithoutSamples):
    """Writes `<run_dir>/<file_name>`, flushed after every line, and alerts to `alerts.jsonl` next to it. A resumed run
    drops the lines past its checkpoint."""

    def __init__(self, file_name: str = "metrics.jsonl") -> None:
        self._file_name = file_name
        self._file: TextIOWrapper | None = None
        self._alerts: Path | None = None

    def start(self, config: Config, run_dir: Path, step: int) -> None:
        """Open the file; keep its lines up to `step` when resuming, none for a new run."""
        self._alerts = run_dir / ALERTS
        if self._alerts.exists():
            known = lines_up_to(self._alerts, step) if config.get("resume") is not None else []
            self._alerts.write_text("".join(f"{line}\n" for line in known), encoding="utf-8")
        path = run_dir / self._file_name
        kept = lines_up_to(path, step) if config.get("resume") is not None and path.exists() else []
        self._file = path.open("w", encoding="utf-8")
        self._file.writelines(f"{line}\n" for line in kept)
        self._file.flush()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line: the step and every metric. Numbers that are not finite become strings ("nan", "inf")."""
        if self._file is None:
            raise ContractError("JsonlTracker.log was called before start")
        finite = {name: _jsonable(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._file.flush()

    def alert(self, name: str, text: str, step: int) -> None:
        """Append one line to the alerts: step, alarm and text."""
        if self._alerts is None:
            raise ContractError("JsonlTracker.alert was called before start")
        with self._alerts.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "alarm": name, "text": text}) + "\n")

    def finish(self, summary: Summary) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics file. A last line that was cut short by a crash is left out."""
    return [json.loads(line) for line in _whole_lines(path)]


def lines_up_to(path: Path, step: int) -> list[str]:
    """The lines of a file of steps that a run resumed after `step` keeps; one that was cut short is left out."""
    return [line for line in _whole_lines(path) if json.loads(line)["step"] <= step]


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    whole, cut = text[: text.rfind("\n") + 1], text[text.rfind("\n") + 1 :]
    if cut:
        logger.warning("%s: its last line was cut short by a crash and is left out: %s", path, cut[:60])
    return [line for line in whole.split("\n") if line]


def _jsonable(value: float) -> float | str:
    number = float(value)
    return number if number - number == 0 else str(number)
