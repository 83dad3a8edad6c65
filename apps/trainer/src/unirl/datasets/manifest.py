"""SOURCE.json next to the files of a set: what they were made from, and how to know that they are still the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from unirl.datasets.records import PromptSet
from unirl.types.errors import DataError

NAME = "SOURCE.json"
_BLOCK_BYTES = 1 << 20

Standing = Literal["absent", "whole", "changed", "unknown"]
"""State of a file: not there; as it was made; not as it was made; not made by this command."""


@dataclass(frozen=True)
class Manifest:
    """What SOURCE.json holds. It has no date, so the same sources give the same file."""

    name: str
    """Name of the set."""
    files: Mapping[str, Mapping[str, Any]]  # Any: JSON values
    """By name: rows, sha256 and source; where images lie next to a file also their number and one sha256 of them."""

    def text(self) -> str:
        """As it is written."""
        content = {"set": self.name, "files": dict(sorted(self.files.items()))}
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    def rows(self, file: str) -> int:
        """Number of rows of the named file."""
        return int(self.files[file]["rows"])


def read_manifest(folder: Path) -> Manifest | None:
    """None where a folder has none. Raises DataError for one that cannot be read."""
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = {name: dict(record) for name, record in content["files"].items()}
        for record in files.values():
            record["rows"], record["sha256"], record["source"]
        return Manifest(str(content["set"]), files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: is not what `trainer data` writes ({type(error).__name__}: {error}). Remove it, then make the "
            "set again with --overwrite."
        ) from error


def standing(folder: Path, manifest: Manifest | None, prompt_set: PromptSet, file: str) -> Standing:
    """How a file of the set stands. Reads it whole."""
    path = folder / file
    if not path.exists():
        return "unknown" if pictures_folder(path).exists() else "absent"
    if manifest is None or manifest.name != prompt_set.name or file not in manifest.files:
        return "unknown"
    known = {key: value for key, value in manifest.files[file].items() if key not in ("source", "rows")}
    return "whole" if path.is_file() and checksums(path) == known else "changed"


def checksums(path: Path) -> dict[str, Any]:  # Any: JSON values
    """Checksums of a file, and of the images that lie next to it."""
    found: dict[str, Any] = {"sha256": sha256_of(path)}
    pictures = pictures_folder(path)
    if pictures.is_dir():
        files = (each for each in pictures.rglob("*") if each.is_file())
        digest, names = hashlib.sha256(), sorted(each.relative_to(pictures).as_posix() for each in files)
        for name in names:
            digest.update(f"{name} {sha256_of(pictures / name)}\n".encode())
        found |= {"pictures": len(names), "pictures_sha256": digest.hexdigest()}
    return found


def pictures_folder(path: Path) -> Path:
    """Where the images of a file's rows lie: train.jsonl has them in train-pictures."""
    return path.with_name(f"{path.stem}-pictures")


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
