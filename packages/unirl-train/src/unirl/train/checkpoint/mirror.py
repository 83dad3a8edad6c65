"""Copies of a run's checkpoints in a store of objects, or on another file system: its machine may be taken away."""

from __future__ import annotations

import logging
import posixpath
import shutil
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from unirl.train.backend.manifest import MANIFEST, damage
from unirl.train.checkpoint.folder import finished_in, is_finished_name, step_of, unfinished_name
from unirl.train.checkpoint.stores import store_of
from unirl.types.errors import CheckpointError

logger = logging.getLogger(__name__)


class Mirror:
    """The checkpoints of one run below a URL of fsspec, such as s3://bucket/my-run, gs://..., or a path.

    Stores of objects rename nothing, so a checkpoint is finished there once its manifest is, which is copied last and
    removed first. What is fetched is read back against the manifest.
    Raises ConfigError for a URL whose kind is unknown or lacks its library.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._store, self._root = store_of(url)

    def finished(self) -> list[str]:
        """Names of the finished checkpoints, oldest first."""
        self._store.invalidate_cache()
        if not self._store.exists(self._root):
            return []
        names = [posixpath.basename(path.rstrip("/")) for path in self._store.ls(self._root, detail=False)]
        found = [name for name in names if is_finished_name(name) and self._store.exists(self._at(name, MANIFEST))]
        return sorted(found, key=lambda name: step_of(Path(name)))

    def put(self, folder: Path) -> None:
        """Copy a finished checkpoint; does nothing if the same is there."""
        manifest = self._at(folder.name, MANIFEST)
        if self._store.exists(manifest):
            if self._store.cat_file(manifest) == (folder / MANIFEST).read_bytes():
                return
            self.remove(folder.name)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST]
        for path in (*files, folder / MANIFEST):
            to = self._at(folder.name, path.relative_to(folder).as_posix())
            self._store.makedirs(posixpath.dirname(to), exist_ok=True)
            self._store.put_file(str(path), to)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, of which there may be a part or nothing."""
        if self._store.exists(self._at(name, MANIFEST)):
            self._store.rm_file(self._at(name, MANIFEST))
        if self._store.exists(self._at(name)):
            self._store.rm(self._at(name), recursive=True)

    def keep(self, names: Collection[str]) -> None:
        """Remove finished checkpoints of other names."""
        for name in self.finished():
            if name not in names:
                self.remove(name)

    def fetch_newest(self, folder: Path) -> Path | None:
        """Copy the newest sound checkpoint into `folder`, which is a run's `checkpoints`; None if `folder` has one that
        is as new, or there is none. Raises CheckpointError if none of those that are newer is sound."""
        newest = max((step_of(path) for path in finished_in(folder)), default=-1)
        newer = [name for name in self.finished() if step_of(Path(name)) > newest]
        wrong = []
        for name in reversed(newer):
            temp = folder / unfinished_name(step_of(Path(name)))
            folder.mkdir(parents=True, exist_ok=True)
            self._fetch(name, temp)
            if (problem := damage(temp)) is None:
                temp.rename(folder / name)
                logger.info("fetched %s from %s", name, self.url)
                return folder / name
            shutil.rmtree(temp)
            logger.warning("checkpoint %s of %s is damaged and not used: %s", name, self.url, problem)
            wrong.append(f"{name}: {problem}")
        if wrong:
            raise CheckpointError(f"no checkpoint in {self.url} is sound: {'; '.join(wrong)}. Start anew elsewhere.")
        return None

    def _fetch(self, name: str, temp: Path) -> None:
        root = self._at(name)
        for path in self._store.find(root):
            to = temp / posixpath.relpath(path, root)
            to.parent.mkdir(parents=True, exist_ok=True)
            self._store.get_file(path, str(to))

    def _at(self, *parts: str) -> str:
        return posixpath.join(self._root, *parts)


class Copying:
    """Copies checkpoints to a mirror in a thread, while training goes on. What fails is tried again with the next."""

    def __init__(self, mirror: Mirror, folder: Path) -> None:
        self._mirror = mirror
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "unirl-mirror")
        self._last: Future[None] | None = None

    def begin(self) -> None:
        """Copy what the folder has and the mirror lacks, newest first, and remove there what the folder has not."""
        self._last = self._thread.submit(self._copy)

    def wait(self) -> None:
        """Wait until all is copied. Raises CheckpointError if the last attempt failed."""
        last, self._last = self._last, None
        error = None if last is None else last.exception()
        if error is not None:
            raise CheckpointError(
                f"the checkpoints in {self._folder} are whole, but {self._mirror.url} lacks some: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _copy(self) -> None:
        folders = finished_in(self._folder)
        try:
            for path in reversed(folders):
                try:
                    self._mirror.put(path)
                except FileNotFoundError:
                    if path.exists():
                        raise
                    self._mirror.remove(path.name)  # a newer one took its place meanwhile
            self._mirror.keep({path.name for path in finished_in(self._folder)})
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            logger.error("%s has no copy of the newest checkpoint yet: %s", self._mirror.url, what)
            raise
