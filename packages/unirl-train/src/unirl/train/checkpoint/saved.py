"""What is in a checkpoint: the state of a backend, the random generators of every rank, and the driver's own state."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save

from unirl.train.backend.manifest import file_digest, read_manifest
from unirl.train.backend.rng import read_rng_state, rng_state, set_rng_state, write_rng_state
from unirl.train.backend.state_reader import StateReader
from unirl.train.checkpoint.folder import finished_in
from unirl.train.checkpoint.ranks import Ranks
from unirl.train.saved_policies import SavedState
from unirl.types.errors import CheckpointError, ContractError, as_sentence

logger = logging.getLogger(__name__)

STATE_FOLDER = "state"
DRIVER_STATE = "driver_state.json"
ARCHITECTURE = "architecture.json"
_NOT_OURS = "Remove this checkpoint folder to resume from the one before it."


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes; nothing in it changes while training goes on."""

    step: int
    state: Mapping[str, Tensor]
    rng: tuple[dict[str, Tensor], dict[str, Any]]
    driver_state: str
    architecture: str
    facts: dict[str, Any]
    kept: Mapping[str, Sequence[str]]
    """Folder -> names of the samples that it holds, see `unirl.train.checkpoint.sample_files`."""


def take_snapshot(
    backend: SavedState,
    step: int,
    driver_state: dict[str, Any],
    score: float | None,
    *,
    num_ranks: int,
    is_copied: bool,
    kept: Mapping[str, Sequence[str]],
) -> Snapshot:
    """Everything as of now. is_copied: to host memory; else tensors share memory with the backend.

    Raises ContractError for a driver state that is not JSON.
    """
    if score is not None and not math.isfinite(score):
        logger.warning("checkpoint %d: score %s is not finite and does not count for the best", step, score)
        score = None
    try:
        driver_text = json.dumps(driver_state)
    except (TypeError, ValueError) as error:
        raise ContractError(f"the driver state of step {step} is not JSON: {error}") from error
    state = backend.state_dict()
    if is_copied:
        # The copies of tensors that share memory with the backend; those on a GPU leave it here.
        state = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
    return Snapshot(
        step=step,
        state=state,
        rng=rng_state(),
        driver_state=driver_text,
        architecture=json.dumps(backend.architecture()),
        facts={
            "step": step,
            "score": score,
            "num_ranks": num_ranks,
            "policies": list(backend.policy_names),
            "lora_scale": backend.lora_scale,
            "torch": torch.__version__,
            **backend.counters,
        },
        kept=kept,
    )


def write_rng(folder: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    """This rank's generators."""
    write_rng_state(folder / _rng_file(ranks.rank), snapshot.rng)


def write_state(folder: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    """This rank's shards of the state. A collective."""
    with warnings.catch_warnings():
        # It says that a single process saves alone, which is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_save(
            dict(snapshot.state),
            storage_writer=FileSystemWriter(folder / STATE_FOLDER),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )


def write_small_files(folder: Path, snapshot: Snapshot) -> None:
    """On rank 0, after all have written: what is not tensors. Raises OSError if a tensor was not written."""
    (folder / DRIVER_STATE).write_text(snapshot.driver_state + "\n")
    (folder / ARCHITECTURE).write_text(snapshot.architecture + "\n")
    written = set(StateReader(folder / STATE_FOLDER).read_metadata().state_dict_metadata)
    if lost := sorted(set(snapshot.state) - written):
        raise OSError(f"{len(lost)} tensors were not written: {lost[:3]}")


def restore(backend: SavedState, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Give a backend and the generators what a sound checkpoint holds; returns the driver state. On every rank.

    Raises CheckpointError if the model is another one, with the first parameters that differ.
    """
    _check_architecture(backend, folder)
    facts, _ = read_manifest(folder)
    if facts["lora_scale"] != backend.lora_scale:
        raise CheckpointError(
            f"{folder} was saved with lora.alpha / lora.rank = {facts['lora_scale']}, here it is "
            f"{backend.lora_scale}. Resume with the LoRA options that it was saved with."
        )
    for policy in facts["policies"]:
        if policy not in backend.policy_names:
            backend.keep_policy(policy)
    state = backend.state_dict()
    ranks.stage(folder, lambda: _read_state(folder / STATE_FOLDER, state, ranks))
    backend.load_state_dict(state)
    _restore_rng(folder, facts["num_ranks"], ranks)
    logger.info("loaded %s", folder)
    return _read_object(folder / DRIVER_STATE)


def _check_architecture(backend: SavedState, folder: Path) -> None:
    stored = json.loads((folder / ARCHITECTURE).read_text())
    own = backend.architecture()
    policies = backend.lora_scale
    if isinstance(policies, dict) and (held := {name.partition("/")[0] for name in stored}) != set(policies):
        raise CheckpointError(
            f"{folder} holds the policies {', '.join(sorted(held))}; this run trains "
            f"{', '.join(sorted(policies))}. Resume with the policies that trained (policies.<name>.trains), or "
            "start a new run."
        )
    different = [name for name in {**stored, **own} if stored.get(name) != own.get(name)]
    if different:
        described = "; ".join(
            f"{name}: saved {_described(stored.get(name))}, here {_described(own.get(name))}" for name in different[:3]
        )
        raise CheckpointError(
            f"{folder} was saved for another model; {len(different)} parameters differ. {described}. "
            "Resume with the model and the LoRA options that it was saved with."
        )


def _read_state(folder: Path, state: dict[str, Tensor], ranks: Ranks) -> None:
    stored = set(StateReader(folder).read_metadata().state_dict_metadata)
    missing, unexpected = sorted(set(state) - stored), sorted(stored - set(state))
    if missing or unexpected:
        raise CheckpointError(
            f"{folder} does not fit the backend: {len(missing)} tensors are not in it {missing[:3]}, "
            f"{len(unexpected)} have no place {unexpected[:3]}. "
            "Resume with the policies and the ema that it was saved with."
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(
            state,
            storage_reader=StateReader(folder),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )


def _restore_rng(folder: Path, num_ranks: int, ranks: Ranks) -> None:
    rank = ranks.rank
    if num_ranks != ranks.num_ranks:
        logger.warning("%s was saved by %d ranks and resumes on %d", folder, num_ranks, ranks.num_ranks)
    if rank < num_ranks:
        try:
            tensors, values = read_rng_state(folder / _rng_file(rank))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / _rng_file(rank)} cannot be read: {error}") from error
        set_rng_state(tensors, values)


def newest_driver_state(folder: Path) -> dict[str, Any] | None:
    """The driver state of the newest sound checkpoint in the `checkpoints` folder of a run, None where there is none.

    Reads two small files and no tensors: `Checkpointer.load` may still find the rest damaged and take an older one.
    """
    for path in reversed(finished_in(folder)):
        facts, problem = read_manifest(path)
        file = path / DRIVER_STATE
        if problem is None and file.is_file() and file_digest(file) == facts["files"][DRIVER_STATE]["blake2b"]:
            return _read_object(file)
    return None


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint. Raises CheckpointError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no JSON: {as_sentence(error)} {_NOT_OURS}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds {type(found).__name__} instead of a JSON object. {_NOT_OURS}")
    return found


def _rng_file(rank: int) -> str:
    return f"rng-{rank:05d}.safetensors"


def _described(entry: list[Any] | None) -> str:
    if entry is None:
        return "absent"
    shape, dtype, trains = entry
    return f"{shape} {dtype}{'' if trains else ', frozen'}"
