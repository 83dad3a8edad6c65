"""What the driver calls to save and resume a run."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.train.checkpoint.folder import CheckpointFolder, unfinished_name
from unirl.train.checkpoint.mirror import Copying, Mirror
from unirl.train.checkpoint.ranks import Ranks
from unirl.train.checkpoint.sample_files import link_files
from unirl.train.checkpoint.saved import (
    Snapshot,
    restore,
    take_snapshot,
    write_rng,
    write_small_files,
    write_state,
)
from unirl.train.saved_policies import SavedState
from unirl.types.errors import CheckpointError
from unirl.types.roles import Collect, Dispatch, distributed

WRITE_TIMEOUT_S = 3600.0


class Checkpointer:
    """Saves and resumes a backend, the random generators of every rank and the driver's own state.

    backend: what trains; of several policies, `SavedPolicies`.

    folder: of the run's checkpoints, on a file system that all ranks share. A checkpoint is the folder `step-000123`:
    `state/` (torch.distributed.checkpoint, each rank its own shards), `rng-00000.safetensors` by rank,
    `driver_state.json`, `architecture.json`, and `manifest.json` with the size and digest of each file
    (`unirl.train.checkpoint.saved`). `CheckpointFolder` says how one is written aside and which stay (keep_last,
    keep_best). is_async: `save` copies to host memory and returns; a thread writes.
    mirror: URL that rank 0 copies the checkpoints to meanwhile (`unirl.train.checkpoint.mirror`).
    samples: folder whose folders have files of samples, which a checkpoint holds too, see `save`.
    Loading executes nothing that a checkpoint holds (`unirl.train.backend.state_reader`).
    Every method is called by the driver on all ranks. With the same number of ranks, resuming is bit-identical to
    never having stopped; other numbers resume too, without the generators of ranks that were not there.
    """

    def __init__(
        self,
        backend: SavedState,
        folder: str,
        *,
        keep_last: int = 2,
        keep_best: bool = True,
        is_async: bool = False,
        mirror: str | None = None,
        samples: Path | None = None,
    ) -> None:
        self._folder = CheckpointFolder(Path(folder), keep_last=keep_last, keep_best=keep_best)
        self._backend = backend
        self._samples = samples
        self._is_async = is_async
        self._ranks = Ranks(self._folder.path)
        is_copied = mirror is not None and self._ranks.rank == 0
        self._copying = Copying(Mirror(str(mirror)), self._folder.path) if is_copied else None
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._is_written = True

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def remove_unfinished(self) -> None:
        """Remove what a run that was killed while it saved has left. Called by a run that begins or continues, which
        no other process writes beside; never by what only reads its checkpoints."""
        self._folder.remove_unfinished()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def save(
        self,
        step: int,
        driver_state: dict[str, Any],
        score: float | None = None,
        kept: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Save everything as of now under `step`. An earlier checkpoint of the same step is replaced.

        driver_state: JSON-able; comes back from `load` (tuples as lists). score: held-out evaluation, higher is
        better; None if this step was not evaluated. kept: folder of `samples` -> names of which the checkpoint holds
        the files (`unirl.train.checkpoint.sample_files`), which must stay until the next call. Raises ContractError for
        a driver state that is not JSON, and CheckpointError if writing fails (async: from the next `save` or `wait`);
        other checkpoints are then not touched.
        """
        self._wait_for_write()
        num_ranks, is_copied = self._ranks.num_ranks, self._is_async
        snapshot = take_snapshot(
            self._backend, step, driver_state, score, num_ranks=num_ranks, is_copied=is_copied, kept=kept or {}
        )
        if not self._is_async:
            self._write(snapshot)
            return
        # Not a daemon: a process that ends in peace finishes its last checkpoint.
        self._is_written = False
        self._thread = threading.Thread(target=self._write_aside, args=(snapshot,), name=f"checkpoint-{step}")
        self._thread.start()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wait(self) -> None:
        """Wait for a write in progress, and for the mirror; raises the CheckpointError that one failed with."""
        self._wait_for_write()
        if self._copying is not None:
            self._copying.wait()

    def _wait_for_write(self) -> None:
        if self._thread is not None:
            self._thread.join(WRITE_TIMEOUT_S)
            if self._thread.is_alive():
                raise CheckpointError(f"{self._thread.name} is still being written after {WRITE_TIMEOUT_S:.0f} s")
            name, self._thread = self._thread.name, None
            if self._failure is None and not self._is_written:
                raise CheckpointError(
                    f"{name} ended without being written; its traceback is in the log of this process"
                )
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _write_aside(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
            self._is_written = True
        except CheckpointError as error:
            self._failure = error

    def _write(self, snapshot: Snapshot) -> None:
        """Every stage ends with all ranks agreeing that it worked, so that none waits for one that failed."""
        ranks, folder, samples = self._ranks, self._folder, self._samples or Path()
        temp = folder.path / ranks.same(unfinished_name(snapshot.step))

        def link() -> None:
            for name, kept in snapshot.kept.items():
                if kept:
                    link_files(samples / name, temp / name, kept)

        def finish() -> None:
            write_small_files(temp, snapshot)
            folder.finish(temp, snapshot.step, snapshot.facts)

        try:
            ranks.stage(temp, lambda: ranks.on_rank_zero(lambda: folder.begin(temp)))
            ranks.stage(temp, lambda: write_rng(temp, snapshot, ranks))
            ranks.stage(temp, lambda: write_state(temp, snapshot, ranks))
            if self._samples is not None and any(snapshot.kept.values()):
                ranks.stage(temp, lambda: ranks.on_rank_zero(link))
            ranks.stage(temp, lambda: ranks.on_rank_zero(finish))
            if self._copying is not None:
                self._copying.begin()
        except CheckpointError:
            if ranks.rank == 0:
                shutil.rmtree(temp, ignore_errors=True)
            raise

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def load(self, step: int | None = None) -> dict[str, Any]:
        """Restore the newest sound checkpoint, or that of `step`, and the generators; returns the driver state.

        A damaged checkpoint is named in a warning and the one before it is used; a `step` that is named has no
        substitute. Raises CheckpointError if there is no sound one, listing what is wrong with each, or if the model is
        another one, naming the first parameters that differ.
        """
        self._wait_for_write()
        choice: list[Any] = self._ranks.same(self._folder.chosen(step) if self._ranks.rank == 0 else None)
        name, problem = choice
        if problem is not None:
            raise CheckpointError(problem)
        return restore(self._backend, self._folder.path / name, self._ranks)
