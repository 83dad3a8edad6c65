"""Sample records as files: `<name>-<step>.jsonl` with one line per record, media in a folder of the same name.

docs/reference/run_directory.md has the format. A file of lines appears whole, after its media, so readers need no lock.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import features

from unirl.tracking.media_files import Description, ImageFormat, digest, read_medium, write_medium
from unirl.types.errors import ConfigError, DataError
from unirl.types.samples import SampleRecord

logger = logging.getLogger(__name__)

VERSION = 1
"""Version of the format. Raised when a reader of the one before would misread a line; new fields leave it as it is."""
TRACES = "traces.jsonl"
"""File of traces in the folder of a step's media."""
_FILE = re.compile(r"(?P<name>[a-z]+)-(?P<step>\d{6,})\.jsonl")
_NO_NAME = re.compile(r"[^\w.-]")
_MEDIA = ("given", "media")


class SampleFiles:
    """The records of a run in its folder `samples`.

    max_mb: where records and media take more, those of the oldest rollouts go, then of the oldest evaluations; those
    of the newest step and of the evaluation before training stay. None sets no limit.
    """

    def __init__(self, folder: Path, *, image_format: ImageFormat = "png", max_mb: float | None = None) -> None:
        if image_format == "webp" and not features.check("webp"):
            raise ConfigError("samples.image_format = webp, which this Pillow was built without. Set it to png.")
        self._folder = folder
        self._image_format: ImageFormat = image_format
        self._max_bytes = math.inf if max_mb is None else max_mb * 1e6
        self._bytes: dict[Path, int] = {}
        self._has_failed = False

    def start(self, step: int | None) -> None:
        """Called once, before records are written. Removes those after `step`, from where a run is resumed, and what a
        killed run left half written; all of a folder that a new run (None) takes over."""
        for path in sorted(self._folder.glob("*-*")):
            found = _FILE.fullmatch(path.name if path.suffix else f"{path.name}.jsonl")
            if found is None:
                continue
            lines = path.with_suffix(".jsonl")
            if step is None or int(found["step"]) > step or not lines.exists():
                _remove(lines)
            elif path == lines:
                self._bytes[lines] = _size(lines)

    def write(self, name: str, step: int, records: Sequence[SampleRecord]) -> dict[str, Path]:
        """Write the records of a step, instead of those that it has; returns the files of its media by sample.

        Where that is impossible, such as on a full disk, it is said once and nothing of the step is left.
        """
        lines = self._folder / f"{name}-{step:06d}.jsonl"
        try:
            files = self._write(lines, name, step, records)
        except OSError as error:
            shutil.rmtree(lines.with_suffix(""), ignore_errors=True)
            if not self._has_failed:
                logger.error("samples cannot be kept: %s. The run continues without them.", error)
            self._has_failed = True
            return {}
        self._has_failed = False
        self._make_room(lines)
        return files

    def write_traces(self, name: str, step: int, traces: Sequence[Mapping[str, Any]]) -> None:  # Any: JSON values
        """Write what is known of samples of a step per token or denoising step, next to their media. Nothing where the
        step has no records (any more); where it cannot be written that is said once."""
        lines = self._folder / f"{name}-{step:06d}.jsonl"
        if lines not in self._bytes:
            return
        folder = lines.with_suffix("")
        try:
            folder.mkdir(exist_ok=True)
            partial = folder / "traces.tmp"
            with partial.open("w", encoding="utf-8", errors="backslashreplace") as out:
                out.writelines(
                    json.dumps({"version": VERSION, **trace}, ensure_ascii=False, allow_nan=False) + "\n"
                    for trace in traces
                )
            partial.replace(folder / TRACES)
        except OSError as error:
            if not self._has_failed:
                logger.error("traces of samples cannot be kept: %s. The run continues without them.", error)
            self._has_failed = True
            return
        self._bytes[lines] = _size(lines)
        self._make_room(lines)

    def _write(self, lines: Path, name: str, step: int, records: Sequence[SampleRecord]) -> dict[str, Path]:
        folder = lines.with_suffix("")
        _remove(lines)
        folder.mkdir(parents=True)
        files: dict[str, Path] = {}
        given: dict[str, Description] = {}
        partial = folder / "lines.tmp"
        # A lone surrogate becomes the escape that JSON has for it.
        with partial.open("w", encoding="utf-8", errors="backslashreplace") as out:
            for number, record in enumerate(records):
                line = self._line(record, folder, f"{_NO_NAME.sub('_', record.track)}-{number:04d}", given)
                if line["media"] is not None and "file" in line["media"]:
                    files[record.sample_id] = self._folder / line["media"]["file"]
                whole = {"version": VERSION, "kind": name, "step": step, **line}
                out.write(json.dumps(whole, ensure_ascii=False, allow_nan=False) + "\n")
        partial.replace(lines)
        if not any(folder.iterdir()):
            folder.rmdir()
        self._bytes[lines] = _size(lines)
        return files

    def _line(
        self, record: SampleRecord, folder: Path, stem: str, given: dict[str, Description]
    ) -> dict[str, Any]:  # Any: JSON values
        """given: what is described already, by digest. Samples of a prompt share its media."""
        keys = [digest(item) for item in record.given]
        for key, item in zip(keys, record.given, strict=True):
            if key not in given:
                given[key] = write_medium(item, folder, f"given-{key}", self._image_format)
        fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        return {
            **{name: _jsonable(value) for name, value in fields.items() if name not in _MEDIA},
            "given": [given[key] for key in keys],
            "media": None if record.media is None else write_medium(record.media, folder, stem, self._image_format),
        }

    def _make_room(self, newest: Path) -> None:
        def age(lines: Path) -> tuple[bool, int]:
            found = _FILE.fullmatch(lines.name)
            assert found is not None  # noqa: S101 - named in `write`
            return found["name"] != "rollout", int(found["step"])

        for lines in sorted(self._bytes, key=age):
            if sum(self._bytes.values()) <= self._max_bytes:
                return
            if lines != newest and age(lines) != (True, 0):
                _remove(lines)
                del self._bytes[lines]


def read_samples(path: Path) -> list[SampleRecord]:
    """The records of a file of lines, with their media. Raises DataError for another version of the format."""
    with path.open(encoding="utf-8") as file:
        return [_record(json.loads(line), path) for line in file]


def _record(line: Mapping[str, Any], path: Path) -> SampleRecord:  # Any: JSON values
    if line["version"] != VERSION:
        raise DataError(
            f"{path} has version {line['version']} of the format, this reads {VERSION}. Update unirl-train."
        )
    known = {field.name for field in dataclasses.fields(SampleRecord)}
    fields = {key: value for key, value in line.items() if key in known}
    for name in ("advantage", "group_reward_std"):
        fields[name] = None if line[name] is None else float(line[name])
    for name in ("scores", "counts"):
        fields[name] = {key: float(value) for key, value in line[name].items()}
    fields["given"] = tuple(read_medium(item, path.parent) for item in line["given"])
    fields["media"] = None if line["media"] is None else read_medium(line["media"], path.parent)
    return SampleRecord(**fields)


def _jsonable(value: Any) -> Any:  # Any: values of a record, and rows of a user's data
    """Numbers that are not finite become "nan", "inf" or "-inf"; of what JSON does not have, its text."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)


def _remove(lines: Path) -> None:
    """First the lines: they name the media."""
    lines.unlink(missing_ok=True)
    shutil.rmtree(lines.with_suffix(""), ignore_errors=True)


def _size(lines: Path) -> int:
    return lines.stat().st_size + sum(file.stat().st_size for file in lines.with_suffix("").glob("*"))
