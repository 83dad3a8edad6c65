"""Prompt files of every supported format, read into rows. Every error names the file and the line.

`.txt` has one prompt per line; `.jsonl` one row (or bare string) a line; `.json` is a list of those, or a mapping with
the list under `prompts`, `prompt` or `caption`; `.csv` has a header and one row per prompt, see
`unirl.data.comma_separated`; `.parquet` is a table with one row per prompt; a folder is a Hugging Face dataset
written by `save_to_disk`.

The images of a prompt are `media`, or `images`: paths, or what tables hold in their place, {bytes, path}. A video
among `media` is a folder of images. The sound of a prompt is `audio`, a WAV file likewise.
A row with `choices` is a multiple-choice question, see `unirl.data.choices`; one with `messages` a conversation, see
`unirl.data.conversations`.
"""

from __future__ import annotations

import difflib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unirl.data.choices import multiple_choice
from unirl.data.comma_separated import read_csv
from unirl.data.conversations import with_prompt
from unirl.data.media import SLOTS, MediaRef, frames_of, picture_problem, sound_problem
from unirl.types.errors import DataError, as_sentence
from unirl.types.messages import brings_conversation
from unirl.types.preference import IMAGES, SCORES

TEXT_KEYS = ("prompt", "caption")
QUESTION_KEYS = ("problem", "question")
"""Stand for the prompt where a row has none."""
MEDIA = "media"
MEDIA_KEYS = (MEDIA, "media_refs")
LIST_KEYS = ("prompts", *TEXT_KEYS)
AUDIO = "audio"
MEDIA_FIELDS = ("modality", "role", "uri")
CHOICES, ANSWER = "choices", "answer"
MAX_TEXT_BYTES = 2**29
"""Largest size of a file of prompts that is read whole."""
SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet")

_EMBEDDING_KEY = re.compile(r"embed(s|ding|dings)?(_path)?$")

Row = Any  # Any: a decoded JSON value, told apart in `parse_row`


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
        numbered = file_values(path)
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
    value = with_prompt(value, where)
    present = [key for key in TEXT_KEYS if value.get(key) is not None]
    if not present:
        present = [key for key in QUESTION_KEYS if value.get(key) is not None]
    if len(present) != 1:
        found = "both `prompt` and `caption`" if present else f"neither `prompt` nor `caption` among {sorted(value)}"
        near = [key for key in (*TEXT_KEYS, *QUESTION_KEYS) if difflib.get_close_matches(key, map(str, value), n=1)]
        hint = f" Did you mean {near[0]}?" if near and not present else ""
        raise DataError(f"{where}: the row has {found}; give exactly one.{hint}")
    prompt = value[present[0]]
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{where}: {present[0]} = {prompt!r} must be a non-empty string.")
    if any("\ud800" <= char <= "\udfff" for char in prompt):
        raise DataError(
            f"{where}: {present[0]} = {prompt!r} holds half of a surrogate pair. Write the character whole."
        )
    embeddings = sorted(key for key in value if _EMBEDDING_KEY.search(key))
    if embeddings:
        raise DataError(
            f"{where}: {embeddings} hold embeddings, which are computed by the model and cached. Remove these keys."
        )
    media, metadata = _media(value, path, where), _metadata(value, present[0], where)
    if brings_conversation(metadata):
        for ref in media:
            _check_inside(ref, where)
    if CHOICES in metadata:
        prompt, metadata[ANSWER] = _multiple_choice(prompt, metadata, where)
    return PromptRow(prompt, _prompt_id(value, index, path, where), metadata, media)


def _prompt_id(value: Mapping[str, Row], index: int, path: Path, where: str) -> str:
    given = value.get("prompt_id")
    if given is None:
        return f"{path.name}:{index}"
    if isinstance(given, bool) or not isinstance(given, (str, int)) or str(given) == "":
        raise DataError(f"{where}: prompt_id = {given!r} must be a non-empty string or an integer.")
    return str(given)


def _metadata(value: Mapping[str, Row], text_key: str, where: str) -> dict[str, Row]:
    read = {
        text_key,
        *TEXT_KEYS,
        *MEDIA_KEYS,
        AUDIO,
        "prompt_id",
        "metadata",
        *({IMAGES} if _shows_images(value) else ()),
    }
    extra = {key: item for key, item in value.items() if key not in read}
    given = value.get("metadata")
    if given is None:
        return extra
    if not isinstance(given, Mapping):
        raise DataError(f"{where}: metadata is a {type(given).__name__}; write a mapping.")
    if extra:
        raise DataError(f"{where}: the row has metadata and also the keys {sorted(extra)}; move them into metadata.")
    return dict(given)


def _multiple_choice(prompt: str, metadata: Mapping[str, Row], where: str) -> tuple[str, str]:
    try:
        return multiple_choice(prompt, metadata[CHOICES], metadata.get(ANSWER))
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _shows_images(value: Mapping[str, Row]) -> bool:
    """True if `images` belong to the prompt; with scores they are rated ones, see `unirl.types.preference`."""
    return value.get(IMAGES) is not None and SCORES not in value


def _media(value: Mapping[str, Row], path: Path, where: str) -> tuple[MediaRef, ...]:
    keys = (*MEDIA_KEYS, *((IMAGES,) if _shows_images(value) else ()))
    present = [key for key in keys if value.get(key) is not None]
    folder = str(path.absolute().parent)
    heard = () if value.get(AUDIO) is None else (_sound_ref(value[AUDIO], folder, where),)
    if not present:
        return heard
    if len(present) > 1:
        raise DataError(f"{where}: the row has both `{present[0]}` and `{present[1]}`; give one.")
    items = value[present[0]]
    if not isinstance(items, list) or not items:
        raise DataError(f"{where}: {present[0]} must be a list of at least one image.")
    read = _image_ref if present[0] == IMAGES else _media_ref
    named = [read(item, folder, f"{where}: image {number}") for number, item in enumerate(items, start=1)]
    refs = tuple(part for ref in named for part in (_frames(ref, where) if ref.modality == "video" else (ref,)))
    for ref in refs:
        _check_readable(ref, where)
    return (*refs, *heard)


def _sound_ref(item: Row, folder: str, where: str) -> MediaRef:
    ref = replace(_image_ref(item, folder, f"{where}: audio"), modality=AUDIO)
    _check_readable(ref, where)
    return ref


def _check_readable(ref: MediaRef, where: str) -> None:
    """Raise DataError for an image or a sound that cannot be read, by the head of its file."""
    if "\0" in ref.uri:
        raise DataError(f"{where}: the path {ref.uri!r} holds a NUL character. Mend its path or remove the row.")
    kind, problem = ("sound", sound_problem(ref)) if ref.modality == AUDIO else ("image", picture_problem(ref))
    if problem is not None:
        raise DataError(f"{where}: the {kind} {ref.uri} {problem}. Mend its path or remove the row.")


def _check_inside(ref: MediaRef, where: str) -> None:
    """Raise DataError for a file outside the folder of the data, which a copy of the folder would lack."""
    if ref.data is None and not Path(os.path.normpath(ref.place()[0])).is_relative_to(os.path.normpath(ref.folder)):
        raise DataError(
            f"{where}: the image {ref.uri} lies outside the folder of the data, {ref.folder}. Copy it into the folder, "
            "so that both stay together."
        )


def _media_ref(item: Row, folder: str, where: str) -> MediaRef:
    if not isinstance(item, Mapping) or set(item) != set(MEDIA_FIELDS):
        raise DataError(f"{where} needs exactly {', '.join(MEDIA_FIELDS)}; got {item!r}.")
    ref = MediaRef(str(item["modality"]), str(item["role"]), str(item["uri"]), folder)
    if (ref.modality, ref.role) not in SLOTS:
        raise DataError(f"{where} is ({ref.modality}, {ref.role}); (modality, role) is one of {list(SLOTS)}.")
    return ref


def _frames(ref: MediaRef, where: str) -> tuple[MediaRef, ...]:
    frames = frames_of(ref)
    if not frames:
        raise DataError(
            f"{where}: the video {ref.uri} is no folder of images. Write its frames there, one file each, named in "
            "their order."
        )
    return frames


def _image_ref(item: Row, folder: str, where: str) -> MediaRef:
    if isinstance(item, str) and item:
        return MediaRef("image", "condition", item, folder)
    if isinstance(item, Mapping) and set(item) == {"bytes", "path"} and (item["bytes"] or item["path"]):
        name = str(item["path"] or "(without a name)")
        return MediaRef("image", "condition", name, folder, item["bytes"] or None)
    raise DataError(f"{where} must be a path, or what a table holds for one, {{bytes, path}}; got {str(item)[:80]}.")


def file_values(path: Path) -> Iterator[tuple[str, Row]]:
    """(place, decoded value) of every row of a file, in the format of its suffix. Raises DataError."""
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: unknown format {path.suffix!r}. Use {_formats()}.")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    problem = not_readable_as_text(path)
    if problem is not None:
        raise DataError(f"{path}: {problem}")
    text = _text(path)
    if path.suffix == ".json":
        yield from _json_rows(path, text)
        return
    if path.suffix == ".csv":
        yield from read_csv(text, str(path))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped:
            where = f"{path}:{number}"
            yield where, stripped if path.suffix == ".txt" else _decoded(stripped, where)


def not_readable_as_text(path: Path) -> str | None:
    """Why a file of prompts would never be read to its end; None where it would."""
    if not path.is_file():
        return "is no regular file. Write the prompts into one."
    if path.suffix != ".parquet" and path.stat().st_size > MAX_TEXT_BYTES:
        return f"has {path.stat().st_size} bytes; a text has at most {MAX_TEXT_BYTES}. Write a .parquet table."
    return None


def _text(path: Path) -> str:
    """Text of a file, without the byte order mark that some editors put first."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Fix its permissions.") from error
    try:
        return io.TextIOWrapper(io.BytesIO(data), "utf-8-sig").read()  # which knows every end of a line
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: not UTF-8 text: byte 0x{data[error.start]:02x}. Save the file as UTF-8."
        ) from error


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, Row]]:
    if not text.strip():
        return
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno}). Fix the file."
        ) from error
    except RecursionError:  # whose traceback has a thousand lines
        raise DataError(f"{path}: not JSON of rows: it nests too deeply. Fix the file.") from None
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
    except RecursionError:  # whose traceback has a thousand lines
        raise DataError(f"{where}: not JSON of a row: it nests too deeply. Fix or remove the line.") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("parquet files need pyarrow: pip install 'unirl-train[data]'") from error
    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{path}: cannot be read as parquet: {as_sentence(error)} Fetch or write the file again."
        ) from error
    for index, row in enumerate(table.to_pylist()):
        yield f"{path}:row {index + 1}", _present(row)


def _present(row: Mapping[str, Row]) -> Row:
    """A row of a table without its empty columns."""
    return {key: item for key, item in row.items() if item is not None}


def check_dataset_folder(path: Path) -> None:
    """Raise DataError for a folder that `save_to_disk` did not write."""
    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise DataError(
            f"{path}: not a Hugging Face dataset folder (no state.json or dataset_dict.json). Write it with "
            "dataset.save_to_disk(folder), or give a prompt file."
        )


def _dataset_rows(path: Path, split: str | None) -> Iterable[tuple[str, Row]]:
    check_dataset_folder(path)
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
    # Images stay files; they are decoded where a rollout needs them.
    stored = loaded.with_format("arrow")
    return [(f"{path}:row {index + 1}", _present(stored[index].to_pylist()[0])) for index in range(len(stored))]


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
            "Split the file: a batch is either all with images or all without."
        )


def _formats() -> str:
    return f"{', '.join(SUFFIXES)} or a folder of dataset.save_to_disk"
