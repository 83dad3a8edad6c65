"""What each of two ranks does that train one sharded model and push it together. A separate module, so that the
ranks' processes can import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pushed_weights import CopyEngine, EnginesInThreads, make_sync, make_training, train
from torch.distributed.tensor import DTensor

from unirl.train.configs import LoraConfig, TrainTopology
from unirl.types.bucket_files import BucketFiles
from unirl.types.errors import WeightSyncError
from unirl.types.weights import tensor_checksum

TRANSPORTS = ("ray", "files", "ipc", "nccl")
TRAININGS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": LoraConfig(rank=2, alpha=4)},
    "replicated": {"topology": TrainTopology(dp_replicate=2)},
}


class Gathered(Exception):
    """A rank gathered a whole tensor."""


def _refuse(_: DTensor) -> None:
    raise Gathered


def rows_of_a_rank(options: dict[str, Any]) -> dict[str, Any]:
    """What this rank has of a model whose rows do not divide by two, and what `weights` gathers."""
    _, backend = make_training(width=7, **options)
    train(backend)
    source = backend.weight_source
    rows = {name: tuple(place) for name, (_, _, *place) in source.shard_rows().items()}
    shards = {shard.name: shard.rows.clone() for shard in source.shards()}
    starts = {shard.name: shard.start for shard in source.shards()}
    return {"rows": rows, "starts": starts, "shards": shards, "whole": dict(source.weights())}


def pushes_of_a_rank(transport: str, options: dict[str, Any], folder: Path, *, fails: bool = False) -> dict[str, Any]:
    """Three pushes to two engines of the first rank; with `fails`, rank 1 cannot write in the second."""
    rank = dist.get_rank()
    training = make_training(**options)
    backend = training[1]
    sync = make_sync(training, transport, canary_tolerance=1e-5, transfer_dir=str(folder), bucket_bytes=400, rank=rank)
    engines = (CopyEngine(), CopyEngine())
    role: Any = EnginesInThreads(*engines)
    sync.connect_elsewhere(role)
    found: dict[str, Any] = {"arrived": [], "error": "", "megabytes": []}
    whole, write = DTensor.full_tensor, BucketFiles.write_rows
    for number in range(3):
        train(backend)
        expected = {name: tensor_checksum(tensor) for name, tensor in backend.weight_source.weights()}
        if transport != "ray" and "lora" not in options:
            DTensor.full_tensor = _refuse  # ty: ignore[invalid-assignment]
        if fails and number == 1 and rank == 1:
            BucketFiles.write_rows = _no_room  # ty: ignore[invalid-assignment]
        try:
            metrics = sync.push()
        except WeightSyncError as error:
            found["error"] = str(error)
            continue
        finally:
            DTensor.full_tensor, BucketFiles.write_rows = whole, write
        if rank == 0:
            found["arrived"].append(all(engine.checksums() == expected for engine in engines))
            found["megabytes"].append(metrics["sync/megabytes"])
    sync.close()
    return found


def _no_room(*_: object) -> None:
    raise WeightSyncError("no room on this rank")


def results_of_a_rank(folder: Path) -> dict[str, Any]:
    """Everything that the tests look at."""
    torch.manual_seed(0)
    pushes = {
        f"{transport}-{name}": pushes_of_a_rank(transport, options, folder)
        for transport in TRANSPORTS
        for name, options in TRAININGS.items()
    }
    return {
        "rows": {name: rows_of_a_rank(options) for name, options in TRAININGS.items()},
        "pushes": pushes,
        "failing": pushes_of_a_rank("files", {}, folder, fails=True),
    }
