"""Datasets of the Hugging Face hub."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unirl.datasets.records import DISK_FULL, Fetched, FetchError, PublishedFile, Repository


@dataclass(frozen=True, kw_only=True)
class HubDataset(Repository):
    """A dataset repository of the hub. Files are kept in the hub's own cache."""

    @property
    def address(self) -> str:
        """Its page."""
        return f"https://huggingface.co/datasets/{self.name}"

    def fetch(self, files: Sequence[PublishedFile], folder: Path) -> Fetched:
        """Download `files` at the revision, or take them from the cache. Raises FetchError."""
        import httpx  # listing the sets does without these
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        patterns = [file.path for file in files]
        try:
            snapshot = Path(
                snapshot_download(self.name, repo_type="dataset", revision=self.revision, allow_patterns=patterns)
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            raise FetchError(str(error).strip().splitlines()[0]) from error
        paths = {pattern: tuple(sorted(snapshot.glob(pattern))) for pattern in patterns}
        missing = [pattern for pattern, found in paths.items() if not found]
        if missing:
            raise FetchError(f"the repository (or its copy in the cache) has no {', '.join(missing)}")
        return Fetched(paths, revision=snapshot.name)

    def fetch_commands(self, files: Sequence[PublishedFile], folder: str) -> list[str]:
        """One `hf download`."""
        wanted = " ".join(f"--include {shlex.quote(file.path)}" for file in files)
        return [
            f"hf download {self.name} --repo-type dataset --revision {self.revision} {wanted} "
            f"--local-dir {shlex.quote(folder)}"
        ]
