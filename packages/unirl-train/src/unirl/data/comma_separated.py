"""Rows of a `.csv` file, as the values that the same rows would have in JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

from unirl.types.errors import DataError, as_sentence

JSON_COLUMNS = ("metadata", "media", "media_refs", "images", "scores", "choices")
"""Hold lists or mappings in the other formats; a cell of theirs that begins with [ or { is JSON."""
PATH_COLUMN = "images"
"""A cell of it that is not JSON is the path of one image."""


def read_csv(text: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:  # Any: JSON values of cells
    """(place, row) of each record below the header; empty cells are left out, all others are text.

    text: as RFC 4180 has it, with commas. name: of the file, for the place "file:line" where a record begins.
    Raises DataError for a header without names, a record of another length, quotes that do not close, bad JSON.
    """
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    header: list[str] | None = None
    begin = 1
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(
                f"{name}:{begin}: not CSV: {as_sentence(error)} Close the quotes, and write a quote inside quotes "
                "twice."
            ) from error
        where, begin = f"{name}:{begin}", reader.line_num + 1
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = _checked_header([cell.strip() for cell in cells], where)
        elif len(cells) != len(header):
            raise DataError(
                f"{where}: has {len(cells)} cells, the header has {len(header)} ({', '.join(header)}). Put a cell "
                "that has a comma or a line break into double quotes."
            )
        else:
            pairs = zip(header, cells, strict=True)
            yield where, {column: _value(column, cell.strip(), where) for column, cell in pairs if cell.strip()}


def _checked_header(header: list[str], where: str) -> list[str]:
    if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
        raise DataError(f"{where}: the header {header[0]!r} is one column. Separate the columns with commas.")
    if "" in header or len(set(header)) != len(header):
        raise DataError(f"{where}: the header {header} must name every column, each once.")
    return header


def _value(column: str, cell: str, where: str) -> Any:  # Any: a JSON value
    if column not in JSON_COLUMNS:
        return cell
    if cell[0] not in "[{":
        return [cell] if column == PATH_COLUMN else cell
    try:
        return json.loads(cell)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: {column} is not JSON: {error.msg} (column {error.colno} of the cell). In CSV every double "
            "quote of a cell is written twice."
        ) from error
