"""All ranks of a run at one checkpoint: after each stage they agree that it worked, so that none waits for one that
failed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from unirl.types.errors import CheckpointError, ContractError

_MAKE_ROOM = "Make room (save.keep_last keeps fewer checkpoints), then continue with resume=auto."
_FULL_BYTES = 1 << 20
"""A disk with less free is full."""


class Ranks:
    """The ranks that write and read the checkpoints in `folder`. Every rank makes one, in the same order.

    What they say of each other is pickled: they are processes of one run, which execute each other's functions anyway.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Of the process, not of its data-parallel place, at which several may stand.
        self.rank, self.num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # Of its own, so that a writing thread's messages never mix with those of training.
        self.group = _own_group() if self.num_ranks > 1 else None

    def on_rank_zero(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0 alone."""
        if self.rank == 0:
            action()

    def same(self, value: Any) -> Any:  # Any: small picklable values
        """Rank 0's value."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def stage(self, folder: Path, action: Callable[[], None]) -> None:
        """Run `action` on every rank; where it failed on any, CheckpointError on all, with the free space."""
        problem: str | None = None
        of_disk = False
        try:
            action()
        except CheckpointError as error:
            problem = str(error).removesuffix(".")
        except (OSError, SafetensorError) as error:
            problem, of_disk = f"{type(error).__name__}: {error}", True
        except CheckpointException as error:
            causes = {f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()}
            problem, of_disk = ", ".join(sorted(causes)), True
        outcomes: list[Any] = [(problem, of_disk)]  # Any: what a collective fills in
        if self.group is not None:
            outcomes = [None] * self.num_ranks
            dist.all_gather_object(outcomes, (problem, of_disk), group=self.group)
        failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text is not None]
        if not failed:
            return
        details = f"{folder}: {'; '.join(failed)}."
        if not any(each for _, each in outcomes):
            raise CheckpointError(details)
        free = self._free_bytes()
        # What a library says of a full disk is not always the system's message.
        is_full = free < _FULL_BYTES or any(os.strerror(code) in details for code in (errno.ENOSPC, errno.EDQUOT))
        first = f"The disk of {self._folder} is full; earlier checkpoints stand. {_MAKE_ROOM} " if is_full else ""
        raise CheckpointError(f"{first}{details} Free bytes there: {free}.")

    def _free_bytes(self) -> int:
        existing = next(path for path in (self._folder, *self._folder.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free


def _own_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    if not isinstance(group, dist.ProcessGroup):
        raise ContractError("this process is not part of its own group")
    return group
