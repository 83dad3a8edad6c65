"""Metrics and pictures as TensorBoard events under `<run_dir>/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from unirl.tracking.base import Config, Summary, TableRow
from unirl.tracking.tables import markdown
from unirl.types.errors import ContractError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorBoardTracker:
    """Writes event files. A resumed run hides the events past its checkpoint (TensorBoard's purge step)."""

    def __init__(self, flush_s: int = 10) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard is not installed: pip install 'unirl-train[tensorboard]'") from error
        self._make_writer = SummaryWriter
        self._flush_s = flush_s
        self._writer: SummaryWriter | None = None

    def start(self, config: Config, run_dir: Path, step: int) -> None:
        """Open the event file."""
        # A new run hides what an attempt in the same directory has left that never came to a checkpoint.
        purge = step + 1 if config.get("resume") is not None else 0
        self._writer = self._make_writer(str(run_dir / FOLDER), purge_step=purge, flush_secs=self._flush_s)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One scalar a metric."""
        for name, value in metrics.items():
            self._open().add_scalar(name, value, step)

    def image(self, name: str, picture: Image.Image, step: int) -> None:
        """One picture."""
        self._open().add_image(name, np.asarray(picture.convert("RGB")), step, dataformats="HWC")

    def table(self, name: str, rows: Sequence[TableRow], step: int) -> None:
        """One text, a Markdown table."""
        self._open().add_text(name, markdown(rows), step)

    def finish(self, summary: Summary) -> None:
        """Flush and close."""
        self.close()

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            raise ContractError("TensorBoardTracker was used before start")
        return self._writer
