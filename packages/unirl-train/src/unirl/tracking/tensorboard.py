"""Metrics, images and hyper-parameters as TensorBoard events under `<run_dir>/tensorboard/<recipe>`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from unirl.tracking.base import Config, Summary, TableRow
from unirl.tracking.keys import flat
from unirl.tracking.media_files import read_wav
from unirl.tracking.tables import markdown, numbered
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ContractError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
_NO_HYPER_PARAMETERS = ("recipe", "run_dir", "resume", "resume_changes", "trackers", "resolved")
"""Keys of a recipe that no result depends on."""


@bounded("trackers.tensorboard")
class TensorBoardTracker:
    """Writes event files. A resumed run hides the events past its checkpoint (TensorBoard's purge step).

    TensorBoard names a run after its folder, which is that of the recipe below `<run_dir>/tensorboard`. The
    hyper-parameters tab has every number and text of the recipe; captions of images are texts next to them.
    """

    def __init__(self, flush_s: PositiveInt = 10) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
            from torch.utils.tensorboard.summary import hparams
        except ImportError as error:
            raise ImportError("TensorBoard is not installed: pip install 'unirl-train[tensorboard]'") from error
        self._make_writer = SummaryWriter
        self._make_hparams = hparams
        self._flush_s = flush_s
        self._writer: SummaryWriter | None = None
        self._session_end: Any = None  # Any: a protocol buffer of TensorBoard

    def start(self, config: Config, run_dir: Path, step: int) -> None:
        """Open the event file and write the hyper-parameters."""
        # A new run hides what an attempt in the same directory has left that never came to a checkpoint.
        purge = step + 1 if config.get("resume") is not None else 0
        folder = run_dir / FOLDER / PurePosixPath(str(config["recipe"])).name
        self._writer = self._make_writer(str(folder), purge_step=purge, flush_secs=self._flush_s)
        judged = (config.get("save") or {}).get("best_metric", "reward")
        metrics = dict.fromkeys(("reward/mean", "eval/reward", f"eval/{judged}"), 0.0)
        # SummaryWriter.add_hparams would make another run of them.
        experiment, start, self._session_end = self._make_hparams(dict(_hyper_parameters(config)), metrics)
        self._add_summary(experiment, step)
        self._add_summary(start, step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One scalar a metric."""
        for name, value in metrics.items():
            self._open().add_scalar(name, value, step)

    def image(self, name: str, picture: Image.Image, step: int, captions: Sequence[str]) -> None:
        """One image, and its captions as a text of the same name."""
        self._open().add_image(name, np.asarray(picture.convert("RGB")), step, dataformats="HWC")
        if captions:
            self._open().add_text(f"{name}/captions", numbered(captions), step)

    def video(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """TensorBoard plays no files; it shows the frames (`image`)."""

    def sound(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Each sound, and its caption as a text of the same name."""
        for place, (file, text) in enumerate(zip(files, captions, strict=True)):
            sound = read_wav(file)
            self._open().add_audio(f"{name}/{place}", sound.waveform, step, sample_rate=sound.rate)
            self._open().add_text(f"{name}/{place}/caption", text, step)

    def table(self, name: str, rows: Sequence[TableRow], step: int) -> None:
        """One text, a Markdown table."""
        self._open().add_text(name, markdown(rows), step)

    def alert(self, name: str, text: str, step: int) -> None:
        """One text."""
        self._open().add_text(f"alerts/{name}", text, step)

    def finish(self, summary: Summary) -> None:
        """Mark the run as ended, flush and close."""
        self._add_summary(self._session_end, int(summary["num_rollouts"]))
        self.close()

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add_summary(self, summary: Any, step: int) -> None:  # Any: a protocol buffer of TensorBoard
        writer = self._open().file_writer
        if writer is None:
            raise ContractError("the event file is closed")
        writer.add_summary(summary, step)

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            raise ContractError("TensorBoardTracker was used before start")
        return self._writer


def _hyper_parameters(config: Config) -> Iterator[tuple[str, float | str]]:
    """Every value of the recipe by its dotted key; lists and truth values as text, absent ones left out."""
    for key, value in flat({key: config[key] for key in config if key not in _NO_HYPER_PARAMETERS}):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield key, value
        elif value is not None and not isinstance(value, Mapping):
            yield key, str(value)
