"""Metrics and samples in trackio, which keeps them on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from unirl.tracking.base import Config, Summary, TableRow
from unirl.tracking.libraries import library_of
from unirl.tracking.tables import cells, columns, numbered


class TrackioTracker:
    """Logs to a project; a resumed run continues its own curve.

    project, name: as in trackio.init; name None takes the recipe and the run directory's name. space_id: a Space that
    shows the project too; None keeps it here. Needs the extra `trackio`.
    """

    def __init__(self, project: str = "unirl", name: str | None = None, space_id: str | None = None) -> None:
        self._trackio: Any = library_of("unirl.tracking.trackio.TrackioTracker")  # Any: an optional module
        self._project, self._name, self._space = project, name, space_id
        self._run: Any = None  # Any: trackio's run

    def start(self, config: Config, run_dir: Path, step: int) -> None:
        """Open the run, the same one again when resuming."""
        name = self._name or f"{config['recipe']} {run_dir.name}"
        self._run = self._trackio.init(
            project=self._project,
            name=name,
            space_id=self._space,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One point per metric."""
        self._run.log(dict(metrics), step=step)

    def image(self, name: str, picture: Image.Image, step: int, captions: Sequence[str]) -> None:
        """One image, on the axis of its step."""
        image = self._trackio.Image(picture.convert("RGB"), caption=numbered(captions))
        self._run.log({f"samples/{name}": image}, step=step)

    def video(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Each file, on the axis of its step."""
        for place, (file, text) in enumerate(zip(files, captions, strict=True)):
            video = self._trackio.Video(str(file), caption=text)
            self._run.log({f"samples/{name}/video/{place}": video}, step=step)

    def sound(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Each file, on the axis of its step."""
        for place, (file, text) in enumerate(zip(files, captions, strict=True)):
            sound = self._trackio.Audio(str(file), caption=text)
            self._run.log({f"samples/{name}/sound/{place}": sound}, step=step)

    def table(self, name: str, rows: Sequence[TableRow], step: int) -> None:
        """One table, on the axis of its step."""
        names = columns(rows)
        self._run.log({f"samples/{name}": self._trackio.Table(columns=names, data=cells(rows, names))}, step=step)

    def alert(self, name: str, text: str, step: int) -> None:
        """An alert of the run."""
        self._run.alert(title=f"{name} after rollout {step}", text=text)

    def finish(self, summary: Summary) -> None:
        """Close the run. Trackio keeps no summary; `summary.json` of the run directory has it."""
        self.close()

    def close(self) -> None:
        """Close the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None
