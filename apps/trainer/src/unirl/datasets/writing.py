"""Rows written as a prompt file: `.txt`, `.jsonl` or `.parquet`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.data.datasets import MEDIA
from unirl.datasets.manifest import pictures_folder
from unirl.datasets.records import Medium, Picture, Row
from unirl.types.errors import DataError
from unirl.types.preference import IMAGES

ROWS_PER_GROUP = 256
"""Rows per group of a table: what is held in memory at a time."""
_NAME_LENGTH = 24
"""Characters in the name of a file or folder that is named by the sha256 of its content."""
_NEW_LINE = re.compile(r"\s*[\r\n]\s*")


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """Write a new file in the format of its suffix; returns the number of rows. Raises DataError if there is none.

    Images stand in a `.parquet` file itself, and next to a `.jsonl` file in `<stem>-pictures`, named by their content;
    a video is a folder of its frames there, and stands next to a `.jsonl` file only.
    """
    if path.suffix == ".parquet":
        num_rows = _write_table(path, rows)
    else:
        num_rows = 0
        with path.open("x", encoding="utf-8", newline="\n") as file:
            for row in rows:
                file.write(_line(row, path) + "\n")
                num_rows += 1
    if num_rows == 0:
        raise DataError(f"{path.name}: its sources give no row. Fetch them again.")
    return num_rows


def _line(row: Row, path: Path) -> str:
    if path.suffix == ".txt":
        return _NEW_LINE.sub(" ", str(row["prompt"])).strip()
    return json.dumps(_with_files(row, path), ensure_ascii=False)


def _with_files(row: Row, path: Path) -> Mapping[str, Any]:  # Any: JSON values
    """The row with paths, relative to its file, instead of images."""
    folder, found = pictures_folder(path), dict(row)
    if IMAGES in row:
        found[IMAGES] = [_file_of(picture, folder) for picture in row[IMAGES]]
    if MEDIA in row:
        found[MEDIA] = [_written(medium, folder) for medium in row[MEDIA]]
    return found


def _written(medium: Medium, folder: Path) -> Mapping[str, str]:
    content = medium.content
    uri = _file_of(content, folder) if isinstance(content, Picture) else _folder_of(content, folder)
    return {"modality": medium.modality, "role": medium.role, "uri": uri}


def _file_of(picture: Picture, folder: Path) -> str:
    name = _name(picture)
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(picture.data)
    return f"{folder.name}/{name}"


def _folder_of(frames: Sequence[Picture], folder: Path) -> str:
    """A video, written once however many rows have it."""
    name = hashlib.sha256("".join(map(_name, frames)).encode()).hexdigest()[:_NAME_LENGTH]
    if not (folder / name).exists():
        (folder / name).mkdir(parents=True)
        for number, frame in enumerate(frames):
            (folder / name / f"{number:04}{frame.suffix}").write_bytes(frame.data)
    return f"{folder.name}/{name}"


def _name(picture: Picture) -> str:
    """File name of an image, made from its content."""
    return f"{hashlib.sha256(picture.data).hexdigest()[:_NAME_LENGTH]}{picture.suffix}"


def _write_table(path: Path, rows: Iterable[Row]) -> int:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("parquet files need pyarrow: pip install 'unirl-train[data]'") from error
    writer: Any = None  # Any: pyarrow is optional
    group: list[Mapping[str, Any]] = []
    num_rows = 0

    def flush() -> None:
        nonlocal writer
        table = pyarrow.Table.from_pylist(group, schema=writer.schema if writer is not None else None)
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
        group.clear()

    try:
        for row in rows:
            group.append(_with_bytes(row))
            num_rows += 1
            if len(group) == ROWS_PER_GROUP:
                flush()
        if group:
            flush()
    finally:
        if writer is not None:
            writer.close()
    return num_rows


def _with_bytes(row: Row) -> Mapping[str, Any]:  # Any: values of a table
    images = row.get(IMAGES)
    if images is None:
        return row
    return {**row, IMAGES: [{"bytes": picture.data, "path": _name(picture)} for picture in images]}
