"""Functions run by every rank of a gloo group, in their own processes."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

JOIN_TIMEOUT_S = 480.0
"""No job of a test takes half as long."""
COLLECTIVE_TIMEOUT_S = JOIN_TIMEOUT_S - 60.0
"""A rank that waits for another says where before it is killed."""
LEAVE_TIMEOUT_S = 60.0

PRELOADED = [
    "unirl.train.stack",
    "unirl.trainer.text",
    "unirl.models.qwen_vl.pipeline",
    "unirl.models.sd3.pipeline",
]
"""Imported once, by the process that all ranks of a test session are forked from: imports take longer than the jobs.
Packages that are not installed are left out."""

Job = Callable[[], Any]  # Any: what torch.save can write


def forkserver() -> Any:  # Any: the context's own class is private
    """The context of processes that are forked from the one that has imported `PRELOADED`."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankAborted(AssertionError):
    """A library ended a rank by SIGABRT. Seen with gloo, in one of some hundred groups, without a cause in the job."""


def results_of_ranks(job: Job, folder: Path, world_size: int = 2) -> list[Any]:
    """What `job()` returns on each rank, through files in `folder`.

    job: a function of a module, or a `partial` of one, which the processes import.
    folder: without what an earlier group has left, since its store leads to processes that are gone.
    Raises AssertionError with the tracebacks of the ranks that failed, RankAborted if one of them was aborted.
    """
    context = forkserver()
    processes = [context.Process(target=_run, args=(job, rank, world_size, folder)) for rank in range(world_size)]
    for process in processes:
        process.start()
    end = time.monotonic() + JOIN_TIMEOUT_S
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    failures = [path.read_text() for rank in range(world_size) if (path := folder / f"failure-{rank}").is_file()]
    if failures or codes != [0] * world_size:
        said = [(folder / f"stderr-{rank}").read_text()[-8000:] for rank in range(world_size)]
        error = RankAborted if -signal.SIGABRT in codes else AssertionError
        raise error("\n".join([*said, *failures, f"ranks ended with {codes}"]))
    return saved_results(folder, world_size)


def saved_results(folder: Path, world_size: int) -> list[Any]:
    """What `results_of_ranks` has left in `folder`."""
    return [torch.load(folder / f"result-{rank}.pt", weights_only=True) for rank in range(world_size)]


def _run(job: Job, rank: int, world_size: int, folder: Path) -> None:
    # What it inherits belongs to the test that ran when the first rank was forked.
    with (folder / f"stderr-{rank}").open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(COLLECTIVE_TIMEOUT_S)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    try:
        torch.save(job(), folder / f"result-{rank}.pt")
    except Exception:  # noqa: BLE001 - the parent raises it
        (folder / f"failure-{rank}").write_text(traceback.format_exc())
    _wait_for_others(rank, world_size, folder)
    dist.destroy_process_group()


def _wait_for_others(rank: int, world_size: int, folder: Path) -> None:
    """Until every rank has left its last collective, or a while if one died.

    A socket that is closed while something is on its way to it is reset, and the peer loses what it has not read yet.
    """
    (folder / f"left-{rank}").touch()
    end = time.monotonic() + LEAVE_TIMEOUT_S
    while time.monotonic() < end and any(not (folder / f"left-{other}").exists() for other in range(world_size)):
        time.sleep(0.005)
