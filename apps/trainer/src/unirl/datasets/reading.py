"""Rows of files as they are published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.data.datasets import file_values
from unirl.types.errors import DataError, as_sentence


def read_published(path: Path, columns: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:  # Any: a decoded value
    """(place, value) of every row: text of `.txt`, else what the row holds.

    columns: that every row must have; of a `.parquet` table only these are read. Raises DataError naming the file, and
    the row if one is to blame.
    """
    if path.is_dir():
        raise DataError(f"{path}: is a folder, a file is needed. Give the file itself.")
    if path.suffix == ".parquet":
        yield from _parquet(path, columns)
        return
    for where, value in file_values(path):
        if columns:
            require_columns(value, columns, where)
        yield where, value


def require_columns(value: Any, columns: Sequence[str], where: str) -> None:  # Any: a decoded value
    """Raises DataError if a row lacks a column."""
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: the row is a {type(value).__name__}, not a mapping with {', '.join(columns)}.")
    missing = [name for name in columns if name not in value]
    if missing:
        raise DataError(f"{where}: the row has no {', '.join(missing)}; it has {', '.join(map(str, value))}.")


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """As many rows at a time as one batch has, so a table may be larger than memory."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("parquet files need pyarrow: pip install 'unirl-train[data]'") from error
    try:
        with parquet.ParquetFile(path) as table:
            present = table.schema_arrow.names
            missing = [name for name in columns if name not in present]
            if missing:
                raise DataError(
                    f"{path}: has no column {', '.join(missing)}; its columns are {', '.join(present)}. "
                    "Give the file that the set names."
                )
            number = 0
            for batch in table.iter_batches(columns=list(columns) or None, batch_size=4096):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as parquet: {as_sentence(error)} Fetch the file again.") from error
