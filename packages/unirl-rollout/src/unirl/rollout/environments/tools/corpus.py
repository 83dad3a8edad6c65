"""A corpus that is searched: its documents, from JSON lines or a folder of texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unirl.types.errors import DataError

_TEXTS = (".md", ".txt")
_KEYS = ("id", "title", "text")


@dataclass(frozen=True)
class Document:
    """What is found as a whole."""

    id: str
    title: str
    text: str


def read_corpus(path: Path) -> list[Document]:
    """The documents of a file of JSON lines {"id", "title", "text"}, of which other keys are left out, or of the .txt
    and .md files at any depth of a folder, by their paths.

    Raises DataError with file and line for what is missing, is no such row, has an id a second time, or is empty.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder. Give JSON lines or a folder of {' and '.join(_TEXTS)} files.")
    found: dict[str, Document] = {}
    for where, document in _of_folder(path) if path.is_dir() else _of_lines(path):
        if document.id in found:
            raise DataError(f"{where}: the id {document.id!r} is there a second time. Give each document its own.")
        found[document.id] = document
    if not found:
        kind = f"no {' or '.join(_TEXTS)} file" if path.is_dir() else "no line"
        raise DataError(f"{path}: {kind}. A corpus needs a document at least.")
    return list(found.values())


def _of_lines(path: Path) -> Iterator[tuple[str, Document]]:
    for number, line in enumerate(_text(path).split("\n"), 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON: {error.msg}. Write one object per line.") from error
        except RecursionError as error:
            raise DataError(f"{where}: nested too deeply. Write an object with {', '.join(_KEYS)}.") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: a {type(row).__name__}. Write an object with {', '.join(_KEYS)}.")
        for key in _KEYS:
            if not isinstance(row.get(key), str):
                was = f"is a {type(row[key]).__name__}" if key in row else "is missing"
                raise DataError(f"{where}: {key!r} {was}. Write a text.")
        yield where, Document(*(row[key] for key in _KEYS))


def _of_folder(folder: Path) -> Iterator[tuple[str, Document]]:
    for file in sorted(folder.rglob("*")):
        if file.suffix in _TEXTS and file.is_file():
            name = file.relative_to(folder).as_posix()
            yield str(file), Document(name, file.stem.replace("_", " "), _text(file))


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Fix its permissions.") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 text: byte 0x{data[error.start]:02x}. Save it as UTF-8.") from error
