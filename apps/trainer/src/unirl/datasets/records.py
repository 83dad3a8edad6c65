"""What is known of a set of prompts before any of it is there."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unirl.datasets.reading import read_published
from unirl.types.errors import DataError

Row = Mapping[str, Any]  # Any: JSON values, `Picture` under "images" and Medium under "media"
IMAGE = ("image", "condition")
"""One image to look at or to change, in `PromptSet.media`."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of an OSError."""


@dataclass(frozen=True)
class Picture:
    """An encoded image or recording of a row: in a `.parquet` file, or its own file next to a `.jsonl` file."""

    data: bytes
    suffix: str
    """Suffix of its file name, such as .png; a recording's is .wav."""


@dataclass(frozen=True)
class Medium:
    """What a prompt brings besides its text: an image, the frames of a video, or a recording."""

    role: str
    """What it is to its prompt, see `unirl.data.media.SLOTS`."""
    content: Picture | tuple[Picture, ...]

    @property
    def modality(self) -> str:
        """As the row of a prompt file has it."""
        if not isinstance(self.content, Picture):
            return "video"
        return "audio" if self.content.suffix == ".wav" else "image"


@dataclass(frozen=True)
class PublishedFile:
    """A file of a repository."""

    path: str
    """In the repository. With a `*` it stands for every file that matches."""
    num_rows: int | None = None
    """Rows that it is published with; None if that is not known."""
    sha256: str | None = None
    """Checksum of the published file, if known."""


class FetchError(DataError):
    """A file cannot be downloaded here. The message is the reason alone."""


@dataclass(frozen=True)
class Fetched:
    """Downloaded files by the path (or pattern) that asked for them, and the commit that they are of."""

    paths: Mapping[str, tuple[Path, ...]]
    revision: str


@dataclass(frozen=True, kw_only=True)
class Repository(ABC):
    """Published files."""

    name: str
    """owner/name."""
    revision: str
    """A commit, or a branch where no commit is known."""
    license: str
    files: tuple[PublishedFile, ...]

    @property
    @abstractmethod
    def address(self) -> str:
        """Its page."""

    @abstractmethod
    def fetch(self, files: Sequence[PublishedFile], folder: Path) -> Fetched:
        """Download `files`; into `folder`, if not into a cache. Raises FetchError."""

    @abstractmethod
    def fetch_commands(self, files: Sequence[PublishedFile], folder: str) -> list[str]:
        """Shell commands that do the same on another machine, keeping the paths below `folder`."""


@dataclass(frozen=True)
class Files:
    """The published files of a set, on this machine."""

    paths: Mapping[str, tuple[Path, ...]]
    """By the path (or pattern) in the repository."""
    published: Mapping[str, PublishedFile]
    is_partial: bool = False
    """True if fewer rows than published are accepted."""
    own: Path | None = None
    """A prompt file of the user's own instead of the published one."""

    def rows(self, path: str, columns: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:  # Any: a decoded value
        """(place, value) of every row; only `columns` of a table, which all must be there. Raises DataError."""
        num_rows = 0
        for file in self.paths[path]:
            for row in read_published(file, columns):
                num_rows += 1
                yield row
        self.require_rows(path, num_rows)

    def only(self, path: str) -> Path:
        """The one file of a path without a `*`."""
        (file,) = self.paths[path]
        return file

    def require_rows(self, path: str, num_rows: int) -> None:
        """Raises DataError if a file has fewer rows than it is published with."""
        wanted = self.published[path].num_rows
        if wanted is not None and num_rows < wanted and not self.is_partial:
            raise DataError(
                f"{self.paths[path][0]}: has {num_rows} rows, {path} is published with {wanted}. Fetch it again, or "
                "accept a part with --partial."
            )


@dataclass(frozen=True, kw_only=True)
class Output:
    """One file of a set."""

    split: str
    """train or test."""
    file: str
    """Name in the set's folder; its suffix is the format, see `unirl.data.datasets`."""
    rows: Callable[[Files], Iterable[Row]]
    """Its rows from the published files, in order."""
    reads: tuple[str, ...] = ()
    """Paths of the published files that it is made from."""
    num_rows: int | None = None
    """Rows that it will have, where known."""


class GeneratedRows(Protocol):
    """Rows of a set that needs no published files."""

    def __call__(self, *, held_out: bool) -> Iterable[Row]:
        """Those to judge by, or those to train on."""
        ...


def generated(rows: GeneratedRows, *, num_train: int, num_held_out: int) -> tuple[Output, ...]:
    """Both files of a generated set."""
    return (
        Output(split="train", file="train.jsonl", rows=lambda files: rows(held_out=False), num_rows=num_train),
        Output(split="test", file="test.jsonl", rows=lambda files: rows(held_out=True), num_rows=num_held_out),
    )


class RowsOfFiles(Protocol):
    """Rows of a set from its published files."""

    def __call__(self, files: Files, *, held_out: bool) -> Iterable[Row]:
        """Those to judge by, or those to train on."""
        ...


def both_splits(rows: RowsOfFiles, *, suffix: str, reads: tuple[str, ...]) -> tuple[Output, ...]:
    """Both files of a set whose rows are divided by `rows`."""
    return tuple(
        Output(
            split=split,
            file=f"{split}{suffix}",
            rows=lambda files, held_out=split == "test": rows(files, held_out=held_out),
            reads=reads,
        )
        for split in ("train", "test")
    )


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """A set of prompts by the name that `trainer data` and recipes call it."""

    name: str
    what: str
    made: str
    """How its rows come about, for people."""
    outputs: tuple[Output, ...]
    media: tuple[tuple[str, str], ...] = ()
    """(modality, role) of what each prompt brings besides its text, see `unirl.data.media.SLOTS`."""
    sources: tuple[Repository, ...] = ()
    """Empty where the set is generated."""
    takes_own: bool = False
    """True if a prompt file of the user's own, one image per row, can replace the sources."""
    version: int = 1
    """Goes up where the same sources would give other rows."""

    @property
    def is_generated(self) -> bool:
        """True if nothing is downloaded."""
        return not self.sources

    @property
    def origin(self) -> str:
        """Where it comes from, in a few words."""
        if self.is_generated:
            return "generated"
        return "\n".join(source.name for source in self.sources)

    def output(self, split: str) -> Output | None:
        """The file of a split."""
        return next((output for output in self.outputs if output.split == split), None)
