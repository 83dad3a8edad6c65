"""Files of GitHub repositories."""

from __future__ import annotations

import http.client
import shlex
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unirl.datasets.records import Fetched, FetchError, PublishedFile, Repository

TIMEOUT_S = 60
"""Without a byte."""


@dataclass(frozen=True, kw_only=True)
class GitHubRepository(Repository):
    """Files of one commit."""

    @property
    def address(self) -> str:
        """Its page."""
        return f"https://github.com/{self.name}"

    def fetch(self, files: Sequence[PublishedFile], folder: Path) -> Fetched:
        """Download `files` into `folder`. Raises FetchError."""
        paths: dict[str, tuple[Path, ...]] = {}
        for file in files:
            target = folder / self.name / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with urllib.request.urlopen(self.url(file), timeout=TIMEOUT_S) as answer, target.open("wb") as copy:
                    shutil.copyfileobj(answer, copy)
            except urllib.error.URLError as error:
                raise FetchError(f"{self.url(file)}: {error.reason}") from error
            except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
                raise FetchError(f"{self.url(file)}: {type(error).__name__} {error}".rstrip()) from error
            paths[file.path] = (target,)
        return Fetched(paths, revision=self.revision)

    def fetch_commands(self, files: Sequence[PublishedFile], folder: str) -> list[str]:
        """A `curl` for each file."""
        return [f"curl -fL --create-dirs -o {shlex.quote(f'{folder}/{file.path}')} {self.url(file)}" for file in files]

    def url(self, file: PublishedFile) -> str:
        """Where the bytes of a file are."""
        return f"https://raw.githubusercontent.com/{self.name}/{self.revision}/{urllib.parse.quote(file.path)}"
