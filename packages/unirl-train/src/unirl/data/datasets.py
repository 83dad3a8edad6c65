"""Prompt files of every supported format, read into rows. Every error names the file and the line.

`.txt` has one prompt a line; `.jsonl` one row (or bare string) a line; `.json` is a list of those, or a mapping with
the list under `prompts`, `prompt` or `caption`; a folder is a Hugging Face dataset written by `save_to_disk`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unirl.types.errors import DataError

TEXT_KEYS = ("prompt", "caption")
MEDIA_KEYS = ("media", "media_refs")
LIST_KEYS = ("prompts", *TEXT_KEYS)
MEDIA_FIELDS = ("modality", "role", "uri")
SUFFIXES = (".txt", ".jsonl", ".json")

_EMBEDDING_KEY = re.compile(r"embed(s|ding|dings)?(_path)?$")

Row = Any  # Any: a decoded JSON value, told apart in `parse_row`


@dataclass(frozen=True)
class MediaRef:
    """A picture that conditions a prompt (editing)."""

    modality: str
    role: str
    uri: str
    """As written in the file; a path is relative to the file's folder."""


@dataclass(frozen=True)
class PromptRow:
    """One prompt and what scorers and models may need with it."""

    prompt: str
    prompt_id: str
    """Unique in its file; `<file name>:<index>` where the file gives none."""
    metadata: dict[str, Any] = field(default_factory=dict)  # Any: JSON values of the file
    media: tuple[MediaRef, ...] = ()


def read_rows(path: str | Path, split: str | None = None) -> list[PromptRow]:
    """All rows of a prompt file or dataset folder, in file order.

    split: of a dataset folder that has several. Raises DataError (file, line, what to change) where anything is
    missing, empty or malformed, where ids repeat, or where only some rows have media.
    """
    return [row for _, row in read_numbered_rows(path, split)]


def read_numbered_rows(path: str | Path, split: str | None = None) -> list[tuple[str, PromptRow]]:
    """As `read_rows`, each row with its place "file:line" for messages."""
    path = Path(path).expanduser()
    if not path.exists():
        raise DataError(f"{path}: no such prompt file or dataset folder. Set data.path to one ({_formats()}).")
    if path.is_dir():
        numbered = _dataset_rows(path, split)
    elif split is not None:
        raise DataError(f"{path}: split = {split!r} means something for a dataset folder only. Remove data.split.")
    else:
        numbered = _file_rows(path)
    places = [(where, parse_row(value, index, path, where)) for index, (where, value) in enumerate(numbered)]
    rows = [row for _, row in places]
    if not rows:
        raise DataError(f"{path}: holds no prompt. Write at least one ({_formats()}).")
    _check_ids(rows, path)
    _check_media(rows, path)
    return places


def parse_row(value: Row, index: int, path: Path, where: str) -> PromptRow:
    """One row from a decoded value: a string, or a mapping with `prompt` (or `caption`).

    index: place in the file, for the automatic id. where: "file:line" for messages. Raises DataError.
    """
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: a row is a {type(value).__name__}; write a string or a mapping with `prompt`.")
    present = [key for key in TEXT_KEYS if value.get(key) is not None]
    if len(present) != 1:
        found = "both `prompt` and `caption`" if present else f"neither `prompt` nor `caption` among {sorted(value)}"
        raise DataError(f"{where}: the row has {found}; give exactly one.")
    prompt = value[present[0]]
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{where}: {present[0]} = {prompt!r} must be a non-empty string.")
    embeddings = sorted(key for key in value if _EMBEDDING_KEY.search(key))
    if embeddings:
        raise DataError(
            f"{where}: {embeddings} hold embeddings, which are computed by the model and cached. Remove these keys."
        )
    return PromptRow(prompt, _prompt_id(value, index, path, where), _metadata(value, where), _media(value, where))


def _prompt_id(value: Mapping[str, Row], index: int, path: Path, where: str) -> str:
    given = value.get("prompt_id")
    if given is None:
        return f"{path.name}:{index}"
    if isinstance(given, bool) or not isinstance(given, (str, int)) or str(given) == "":
        raise DataError(f"{where}: prompt_id = {given!r} must be a non-empty string or an integer.")
    return str(given)


def _metadata(value: Mapping[str, Row], where: str) -> dict[str, Row]:
    extra = {key: item for key, item in value.items() if key not in (*TEXT_KEYS, *MEDIA_KEYS, "prompt_id", "metadata")}
    given = value.get("metadata")
    if given is None:
        return extra
    if not isinstance(given, Mapping):
        raise DataError(f"{where}: metadata is a {type(given).__name__}; write a mapping.")
    if extra:
        raise DataError(f"{where}: the row has metadata and also the keys {sorted(extra)}; move them into metadata.")
    return dict(given)


def _media(value: Mapping[str, Row], where: str) -> tuple[MediaRef, ...]:
    present = [key for key in MEDIA_KEYS if value.get(key) is not None]
    if not present:
        return ()
    if len(present) == 2:
        raise DataError(f"{where}: the row has both `media` and `media_refs`; give one.")
    items = value[present[0]]
    if not isinstance(items, list) or len(items) != 1:
        raise DataError(f"{where}: {present[0]} must be a list of exactly one item with {', '.join(MEDIA_FIELDS)}.")
    item = items[0]
    if not isinstance(item, Mapping) or set(item) != set(MEDIA_FIELDS):
        raise DataError(f"{where}: an item of {present[0]} needs exactly {', '.join(MEDIA_FIELDS)}; got {item!r}.")
    ref = MediaRef(str(item["modality"]), str(item["role"]), str(item["uri"]))
    if (ref.modality, ref.role) != ("image", "condition"):
        raise DataError(f"{where}: media is ({ref.modality}, {ref.role}); only (image, condition) is supported.")
    return (ref,)


def _file_rows(path: Path) -> Iterator[tuple[str, Row]]:
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: unknown format {path.suffix!r}. Use {_formats()}.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}. Fix the file or its permissions.") from error
    if path.suffix == ".json":
        yield from _json_rows(path, text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped:
            where = f"{path}:{number}"
            yield where, stripped if path.suffix == ".txt" else _decoded(stripped, where)


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, Row]]:
    if not text.strip():
        return
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno}). Fix the file."
        ) from error
    if isinstance(value, Mapping):
        present = [key for key in LIST_KEYS if isinstance(value.get(key), list)]
        if len(present) != 1:
            raise DataError(
                f"{path}:1: a mapping needs its prompts as one list under one of {', '.join(LIST_KEYS)}; it has "
                f"{sorted(value)}."
            )
        value = value[present[0]]
    if not isinstance(value, list):
        raise DataError(f"{path}:1: holds a {type(value).__name__}; write a list of rows.")
    for index, item in enumerate(value):
        # The decoder keeps no line numbers; the row's place in the list says the same.
        yield f"{path}:row {index + 1}", item


def _decoded(line: str, where: str) -> Row:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} (column {error.colno}). Fix or remove the line.") from error


def _dataset_rows(path: Path, split: str | None) -> Iterable[tuple[str, Row]]:
    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise DataError(
            f"{path}: not a Hugging Face dataset folder (no state.json or dataset_dict.json). Write it with "
            "dataset.save_to_disk(folder), or give a prompt file."
        )
    try:
        import datasets
    except ImportError as error:
        raise ImportError("dataset folders need datasets: pip install 'unirl-train[data]'") from error
    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        if split is None and len(loaded) == 1:
            split = str(next(iter(loaded)))
        if split not in loaded:
            raise DataError(f"{path}: has the splits {sorted(loaded)}, not {split!r}. Set data.split to one of them.")
        loaded = loaded[split]
    elif split is not None:
        raise DataError(f"{path}: has no splits, but split = {split!r} was asked for. Remove data.split.")
    # Columns absent in a row come as None.
    return [
        (f"{path}:row {index + 1}", {key: item for key, item in row.items() if item is not None})
        for index, row in enumerate(loaded)
    ]


def _check_ids(rows: list[PromptRow], path: Path) -> None:
    seen: dict[str, int] = {}
    for index, row in enumerate(rows):
        first = seen.setdefault(row.prompt_id, index)
        if first != index:
            raise DataError(
                f"{path}: rows {first + 1} and {index + 1} both have prompt_id {row.prompt_id!r}. Make ids unique or "
                "leave them out."
            )


def _check_media(rows: list[PromptRow], path: Path) -> None:
    without = [index for index, row in enumerate(rows) if not row.media]
    if without and len(without) != len(rows):
        raise DataError(
            f"{path}: row {without[0] + 1} has no media while {len(rows) - len(without)} other rows do. "
            "Split the file: a batch is either all with pictures or all without."
        )


def _formats() -> str:
    return f"{', '.join(SUFFIXES)} or a folder of dataset.save_to_disk"
