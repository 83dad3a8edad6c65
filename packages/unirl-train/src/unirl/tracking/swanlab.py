"""Metrics and images in SwanLab."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from unirl.tracking.base import Config, Summary, TableRow
from unirl.tracking.libraries import library_of
from unirl.tracking.tables import markdown, numbered
from unirl.tracking.video import as_gif
from unirl.tracking.wandb import run_id


class SwanLabTracker:
    """Logs to a project; a resumed run continues its own curve.

    project, workspace, name: as in swanlab.init; name None takes the recipe and the run directory's name.
    mode: "cloud", "local", "offline" or "disabled"; None leaves it to SwanLab's own settings.
    Needs the extra `swanlab`.
    """

    def __init__(
        self,
        project: str = "unirl",
        workspace: str | None = None,
        name: str | None = None,
        mode: str | None = None,
    ) -> None:
        self._swanlab: Any = library_of("unirl.tracking.swanlab.SwanLabTracker")  # Any: an optional module
        self._options = {"project": project, "workspace": workspace, "mode": mode}
        self._name = name
        self._run: Any = None  # Any: SwanLab's run

    def start(self, config: Config, run_dir: Path, step: int) -> None:
        """Open the run, the same one again when resuming."""
        name = self._name or f"{config['recipe']} {run_dir.name}"
        options = {key: value for key, value in self._options.items() if value is not None}
        self._run = self._swanlab.init(
            experiment_name=name,
            config=dict(config),
            log_dir=str(run_dir / "swanlab"),
            id=run_id(run_dir),
            resume="allow",
            **options,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One point a metric."""
        self._run.log(dict(metrics), step=step)

    def image(self, name: str, picture: Image.Image, step: int, captions: Sequence[str]) -> None:
        """One image."""
        self._run.log({f"samples/{name}": self._swanlab.Image(picture, caption=numbered(captions))}, step=step)

    def video(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Each file as a GIF, which is all that SwanLab plays; sounds of videos are lost there."""
        with tempfile.TemporaryDirectory() as folder:  # SwanLab copies what it is given
            gifs = [as_gif(file, Path(folder)) for file in files]
            videos = [self._swanlab.Video(str(gif), caption=text) for gif, text in zip(gifs, captions, strict=True)]
            self._run.log({f"samples/{name}/video": videos}, step=step)

    def sound(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Each file."""
        sounds = [self._swanlab.Audio(str(file), caption=text) for file, text in zip(files, captions, strict=True)]
        self._run.log({f"samples/{name}/sound": sounds}, step=step)

    def table(self, name: str, rows: Sequence[TableRow], step: int) -> None:
        """One text, a Markdown table."""
        self._run.log({f"samples/{name}": self._swanlab.Text(markdown(rows))}, step=step)

    def alert(self, name: str, text: str, step: int) -> None:
        """One text."""
        self._run.log({f"alerts/{name}": self._swanlab.Text(text)}, step=step)

    def finish(self, summary: Summary) -> None:
        """Close the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def close(self) -> None:
        """Close a run that did not finish, marked as failed."""
        if self._run is not None:
            self._run.finish(state="crashed", error="the run ended before its last rollout")
            self._run = None
