"""What the trainer asks of a tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from PIL import Image

Summary = Mapping[str, Any]  # Any: JSON values
Config = Mapping[str, Any]  # Any: JSON values
TableRow = dict[str, str | float]
"""Column -> value; rows of one table may have different columns."""


class Tracker(Protocol):
    """Receives what a run reports, on the driver only. Steps count finished rollouts; step 0 is before training."""

    def start(self, config: Config, run_dir: Path, step: int) -> None:
        """Called before anything else, and again after `close` where a run starts its workers again. step: rollouts
        already done. config: the recipe, whose `resume` is None for a new run; one that is resumed may have been
        stopped before its first rollout, and has a step of 0 too."""
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics of one step; names and units are listed in docs/reference/metrics.md."""
        ...

    def image(self, name: str, picture: Image.Image, step: int, captions: Sequence[str]) -> None:
        """A finished image, such as a labelled grid of samples. captions: what each sample in it is, as text."""
        ...

    def video(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Samples that play, as files of the run directory. A grid of their frames comes as an `image` of this name.
        captions: what each is, as text. Called by runs of video models alone."""
        ...

    def sound(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Samples that are heard, as WAV files of the run directory. captions: what each is, as text. Called by runs of
        sounds alone; those of videos are in their files."""
        ...

    def table(self, name: str, rows: Sequence[TableRow], step: int) -> None:
        """Samples of text with their prompts and scores; they also lie in the run directory."""
        ...

    def alert(self, name: str, text: str, step: int) -> None:
        """An alarm that begins, already in the run's log. name: see docs/reference/metrics.md, without `alarm/`."""
        ...

    def finish(self, summary: Summary) -> None:
        """Called once at the end with what `summary.json` holds."""
        ...

    def close(self) -> None:
        """Called last, however the run ended, and before workers are started again: give back the terminal, files and
        connections. Harmless twice."""
        ...


@runtime_checkable
class TakesTimeline(Protocol):
    """A tracker that also receives what worked when."""

    def timeline(self, lines: Sequence[Mapping[str, Any]], step: int) -> None:
        """Lines of `timeline.jsonl`, see docs/reference/run_directory.md; Any: JSON values."""
        ...


class WithoutSamples:
    """The part of a tracker that keeps no samples: they lie in the run directory."""

    def image(self, name: str, picture: Image.Image, step: int, captions: Sequence[str]) -> None:
        """Not kept."""

    def video(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Not kept."""

    def sound(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Not kept."""

    def table(self, name: str, rows: Sequence[TableRow], step: int) -> None:
        """Not kept."""
