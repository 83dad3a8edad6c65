"""The recipes of a run directory: `config.yaml` is the one that runs, numbered copies are those before and itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.app.run_directory import CONFIG_FILE

if TYPE_CHECKING:
    from PIL import Image

    from unirl.tracking.base import TableRow


class KeptRecipes:
    """A tracker that keeps the recipe of a resumed run where it differs from the one before.

    rendered: the recipe as YAML. The first difference names the recipe of the beginning `config-1.yaml`; every other
    recipe gets the next number. Nothing is written before `start`, when the checkpoint has accepted the recipe.
    """

    def __init__(self, rendered: str) -> None:
        self._rendered = rendered

    def start(self, config: Mapping[str, Any], run_dir: Path, step: int) -> None:
        """Write the recipe where it is another one than `config.yaml`."""
        current = run_dir / CONFIG_FILE
        before = current.read_text(encoding="utf-8") if current.is_file() else None
        if before == self._rendered:
            return
        numbers = [int(path.stem.partition("-")[2]) for path in run_dir.glob("config-[0-9]*.yaml")]
        if not numbers and before is not None:
            (run_dir / "config-1.yaml").write_text(before, encoding="utf-8")
            numbers = [1]
        (run_dir / f"config-{max(numbers, default=0) + 1}.yaml").write_text(self._rendered, encoding="utf-8")
        aside = run_dir / f"{CONFIG_FILE}.new"
        aside.write_text(self._rendered, encoding="utf-8")
        os.replace(aside, current)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics are for others."""

    def image(self, name: str, picture: Image.Image, step: int, captions: Sequence[str]) -> None:
        """Images are for others."""

    def video(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Samples are elsewhere."""

    def sound(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Samples are elsewhere."""

    def table(self, name: str, rows: Sequence[TableRow], step: int) -> None:
        """Tables are for others."""

    def alert(self, name: str, text: str, step: int) -> None:
        """Alarms are for others."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Nothing is open."""

    def close(self) -> None:
        """Nothing is open."""
