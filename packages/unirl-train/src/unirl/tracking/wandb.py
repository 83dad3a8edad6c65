"""Metrics and images in Weights & Biases."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from unirl.tracking.base import Config, Summary, TableRow
from unirl.tracking.libraries import library_of
from unirl.tracking.tables import cells, columns, numbered


def run_id(run_dir: Path) -> str:
    """An id that a resumed run of the same directory gets again."""
    return hashlib.blake2b(str(run_dir.absolute()).encode(), digest_size=8).hexdigest()


class WandbTracker:
    """Logs to a project; a resumed run continues its own curve.

    project, entity, name, tags: as in wandb.init; name None takes the recipe and the run directory's name.
    mode: "online", "offline" or "disabled"; None leaves it to wandb's own settings. Needs the extra `wandb`.
    """

    def __init__(
        self,
        project: str = "unirl",
        entity: str | None = None,
        name: str | None = None,
        tags: list[str] | None = None,
        mode: str | None = None,
    ) -> None:
        self._wandb: Any = library_of("unirl.tracking.wandb.WandbTracker")  # Any: an optional module
        self._options = {"project": project, "entity": entity, "tags": tags, "mode": mode}
        self._name = name
        self._run: Any = None  # Any: wandb's run

    def start(self, config: Config, run_dir: Path, step: int) -> None:
        """Open the run, the same one again when resuming."""
        name = self._name or f"{config['recipe']} {run_dir.name}"
        options = {key: value for key, value in self._options.items() if value is not None}
        self._run = self._wandb.init(
            name=name, config=dict(config), dir=str(run_dir), id=run_id(run_dir), resume="allow", **options
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One point a metric."""
        self._run.log(dict(metrics), step=step)

    def image(self, name: str, picture: Image.Image, step: int, captions: Sequence[str]) -> None:
        """One image, on the axis of its step."""
        self._run.log({f"samples/{name}": self._wandb.Image(picture, caption=numbered(captions))}, step=step)

    def video(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Each file, on the axis of its step."""
        videos = [self._wandb.Video(str(file), caption=text) for file, text in zip(files, captions, strict=True)]
        self._run.log({f"samples/{name}/video": videos}, step=step)

    def sound(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Each file, on the axis of its step."""
        sounds = [self._wandb.Audio(str(file), caption=text) for file, text in zip(files, captions, strict=True)]
        self._run.log({f"samples/{name}/sound": sounds}, step=step)

    def table(self, name: str, rows: Sequence[TableRow], step: int) -> None:
        """One table, on the axis of its step."""
        names = columns(rows)
        data = cells(rows, names, absent=None)
        self._run.log({f"samples/{name}": self._wandb.Table(columns=names, data=data)}, step=step)

    def alert(self, name: str, text: str, step: int) -> None:
        """An alert, which W&B sends by mail or Slack to those who asked for it."""
        self._run.alert(title=f"{name} after rollout {step}", text=text, level="WARN")

    def finish(self, summary: Summary) -> None:
        """Write the run's summary and close it."""
        if self._run is not None:
            self._run.summary.update(dict(summary))
            self._run.finish()
            self._run = None

    def close(self) -> None:
        """Close a run that did not finish, marked as failed."""
        if self._run is not None:
            self._run.finish(exit_code=1)
            self._run = None
