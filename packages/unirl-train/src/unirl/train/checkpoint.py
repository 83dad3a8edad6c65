"""Checkpoints of a run: written aside, verified, renamed; the newest sound one is resumed from, bit for bit."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import secrets
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save

from unirl.train.backend.manifest import damage, file_digest, flush, read_manifest, write_manifest
from unirl.train.backend.rng import read_rng_state, rng_state, set_rng_state, write_rng_state
from unirl.train.backend.state_reader import StateReader
from unirl.train.saved_policies import SavedState
from unirl.types.errors import CheckpointError, ConfigError, ContractError, as_sentence
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.storage import open_to_umask

logger = logging.getLogger(__name__)

STATE_FOLDER = "state"
DRIVER_STATE = "driver_state.json"
ARCHITECTURE = "architecture.json"
BEST = "best.json"
WRITE_TIMEOUT_S = 3600.0
_MAKE_ROOM = "Make room (save.keep_last keeps fewer checkpoints), then continue with resume=auto."
_NOT_OURS = "Remove this checkpoint folder to resume from the one before it."
_FULL_BYTES = 1 << 20
"""A disk with less free is full."""

_FINISHED = re.compile(r"step-(\d+)(\.replaced-[0-9a-f]+)?")
_UNFINISHED = re.compile(r"step-\d+\.tmp-[0-9a-f]+")


@dataclass(frozen=True)
class _Snapshot:
    """What one rank writes; nothing in it changes while training goes on."""

    step: int
    state: Mapping[str, Tensor]
    rng: tuple[dict[str, Tensor], dict[str, Any]]
    driver_state: str
    architecture: str
    facts: dict[str, Any]


class Checkpointer:
    """Saves and resumes a backend, the random generators of every rank and the driver's own state.

    backend: what trains; of several policies, `SavedPolicies`.

    folder: of the run's checkpoints, on a file system that all ranks share. A checkpoint is the folder `step-000123`:
    `state/` (torch.distributed.checkpoint, each rank its own shards), `rng-00000.safetensors` by rank,
    `driver_state.json`, `architecture.json`, and `manifest.json` with the size and digest of each file. It is written
    as `step-000123.tmp-...`, forced to the disk, read back, and renamed, so that the last good one survives whatever
    happens meanwhile. keep_last: newest checkpoints that stay. keep_best: the one of the highest score stays too, and
    `best.json` names it. is_async: `save` copies to host memory and returns; a thread writes.
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
    ) -> None:
        if keep_last < 1:
            raise ConfigError(f"save.keep_last = {keep_last} must be at least 1")
        self._backend = backend
        self._folder = Path(folder)
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._is_async = is_async
        # Of the process, not of its data-parallel place, at which several may stand.
        self._rank, self._num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # Of its own, so that a writing thread's messages never mix with those of training.
        self._group = _own_group() if self._num_ranks > 1 else None
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._is_written = True

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def remove_unfinished(self) -> None:
        """Remove what a run that was killed while it saved has left. Called by a run that begins or continues, which
        nobody else writes beside; never by what only reads its checkpoints."""
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if _UNFINISHED.fullmatch(path.name):
                logger.warning("removing %s, which an interrupted run left unfinished", path)
                shutil.rmtree(path, ignore_errors=True)

    # Saving -----------------------------------------------------------------------------------------------------

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def save(self, step: int, driver_state: dict[str, Any], score: float | None = None) -> None:
        """Save everything as of now under `step`. An earlier checkpoint of the same step is replaced.

        driver_state: JSON-able; comes back from `load` (tuples as lists). score: held-out evaluation, higher is
        better; None where this step was not evaluated. Raises ContractError for a driver state that is not JSON, and
        CheckpointError where writing fails (async: from the next `save` or `wait`); the others are untouched then.
        """
        self.wait()
        snapshot = self._snapshot(step, driver_state, score)
        if not self._is_async:
            self._write(snapshot)
            return
        # Not a daemon: a process that ends in peace finishes its last checkpoint.
        self._is_written = False
        self._thread = threading.Thread(target=self._write_aside, args=(snapshot,), name=f"checkpoint-{step}")
        self._thread.start()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wait(self) -> None:
        """Wait for a write in progress; raises the CheckpointError that it failed with."""
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

    def _snapshot(self, step: int, driver_state: dict[str, Any], score: float | None) -> _Snapshot:
        if score is not None and not math.isfinite(score):
            logger.warning("checkpoint %d: score %s is not finite and does not count for the best", step, score)
            score = None
        try:
            driver_text = json.dumps(driver_state)
        except (TypeError, ValueError) as error:
            raise ContractError(f"the driver state of step {step} is not JSON: {error}") from error
        backend = self._backend
        state = backend.state_dict()
        if self._is_async:
            # The copies of tensors that share memory with the backend; those on a GPU leave it here.
            state = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
        return _Snapshot(
            step=step,
            state=state,
            rng=rng_state(),
            driver_state=driver_text,
            architecture=json.dumps(backend.architecture()),
            facts={
                "step": step,
                "score": score,
                "num_ranks": self._num_ranks,
                "policies": list(backend.policy_names),
                "lora_scale": backend.lora_scale,
                "torch": torch.__version__,
                **backend.counters,
            },
        )

    def _write_aside(self, snapshot: _Snapshot) -> None:
        try:
            self._write(snapshot)
            self._is_written = True
        except CheckpointError as error:
            self._failure = error

    def _write(self, snapshot: _Snapshot) -> None:
        """Every stage ends with all ranks agreeing that it worked, so that none waits for one that failed."""
        name = f"step-{snapshot.step:06d}"
        temp = self._folder / self._same_on_all_ranks(f"{name}.tmp-{secrets.token_hex(4)}")
        try:
            self._stage(temp, lambda: self._on_rank_zero(lambda: self._begin(temp)))
            rng_path = temp / _rng_file(self._rank)
            self._stage(temp, lambda: write_rng_state(rng_path, snapshot.rng))
            self._stage(temp, lambda: self._write_state(temp / STATE_FOLDER, snapshot.state))
            self._stage(temp, lambda: self._on_rank_zero(lambda: self._finish(temp, name, snapshot)))
        except CheckpointError:
            if self._rank == 0:
                shutil.rmtree(temp, ignore_errors=True)
            raise

    def _begin(self, temp: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        temp.mkdir()

    def _write_state(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        with warnings.catch_warnings():
            # It says that a single process saves alone, which is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_save(
                dict(state),
                storage_writer=FileSystemWriter(folder),
                process_group=self._group,
                no_dist=self._group is None,
            )

    def _finish(self, temp: Path, name: str, snapshot: _Snapshot) -> None:
        """On rank 0: the small files, the manifest, the check, the name, and what may go now."""
        (temp / DRIVER_STATE).write_text(snapshot.driver_state + "\n")
        (temp / ARCHITECTURE).write_text(snapshot.architecture + "\n")
        written = set(StateReader(temp / STATE_FOLDER).read_metadata().state_dict_metadata)
        if lost := sorted(set(snapshot.state) - written):
            raise OSError(f"{len(lost)} tensors were not written: {lost[:3]}")
        open_to_umask(temp)
        write_manifest(temp, snapshot.facts)
        if problem := damage(temp):
            raise OSError(f"what was written does not read back: {problem}")
        final = self._folder / name
        if final.exists():
            final.rename(self._folder / f"{name}.replaced-{secrets.token_hex(4)}")
        temp.rename(final)
        flush(self._folder)
        self._retain()

    def _retain(self) -> None:
        """Remove all but the newest and the best, on rank 0."""
        finished = self._finished()
        best = self._best(finished)
        keep = set(finished[-self._keep_last :])
        if self._keep_best and best is not None:
            keep.add(best[1])
            text = json.dumps({"step": _step_of(best[1]), "score": best[0], "folder": best[1].name}) + "\n"
            aside = self._folder / f"{BEST}.new"
            aside.write_text(text)
            aside.rename(self._folder / BEST)
        for path in self._candidates():
            if path not in keep:
                shutil.rmtree(path, ignore_errors=True)

    def _best(self, finished: list[Path]) -> tuple[float, Path] | None:
        """Highest score and its folder; the earlier of equals."""
        scored = [(read_manifest(path)[0].get("score"), path) for path in finished]
        known = [(score, path) for score, path in scored if score is not None]
        return max(known, key=lambda pair: pair[0], default=None)

    @property
    def best_step(self) -> int | None:
        """Step of the best checkpoint on disk by held-out score, or None where none was evaluated."""
        best = self._best(self._finished())
        return None if best is None else _step_of(best[1])

    def _candidates(self) -> list[Path]:
        return _finished_in(self._folder)

    def _finished(self) -> list[Path]:
        """One folder a step, oldest first: of a step that is there twice, the newer."""
        return list({_step_of(path): path for path in self._candidates()}.values())

    # Resuming ---------------------------------------------------------------------------------------------------

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def load_best(self) -> dict[str, Any]:
        """Restore the checkpoint with the best held-out score. Raises CheckpointError where none was scored."""
        step = self.best_step
        if step is None:
            raise CheckpointError(
                f"no checkpoint in {self._folder} has a held-out score. Add an eval section, or take the newest."
            )
        return self.load(step)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def load(self, step: int | None = None) -> dict[str, Any]:
        """Restore the newest sound checkpoint, or that of `step`, and the generators; returns the driver state.

        A damaged checkpoint is named in a warning and the one before it is used; a `step` that is named has no
        substitute. Raises CheckpointError where there is none, with each and what is wrong with it, and where the
        model is another one, with the first parameters that differ.
        """
        self.wait()
        choice: list[Any] = self._same_on_all_ranks(self._chosen(step) if self._rank == 0 else None)
        name, problem = choice
        if problem is not None:
            raise CheckpointError(problem)
        folder = self._folder / name
        self._check_architecture(folder)
        facts, _ = read_manifest(folder)
        if facts["lora_scale"] != self._backend.lora_scale:
            raise CheckpointError(
                f"{folder} was saved with lora.alpha / lora.rank = {facts['lora_scale']}, here it is "
                f"{self._backend.lora_scale}. Resume with the LoRA options that it was saved with."
            )
        for policy in facts["policies"]:
            if policy not in self._backend.policy_names:
                self._backend.keep_policy(policy)
        state = self._backend.state_dict()
        self._stage(folder, lambda: self._read_state(folder / STATE_FOLDER, state))
        self._backend.load_state_dict(state)
        self._restore_rng(folder, facts["num_ranks"])
        logger.info("resumed from %s", folder)
        return _read_object(folder / DRIVER_STATE)

    def _chosen(self, step: int | None) -> list[str | None]:
        """[name of the checkpoint to load, None] or [None, what is wrong]. On rank 0."""
        candidates = [path for path in self._candidates() if step is None or _step_of(path) == step]
        wrong = []
        for path in reversed(candidates):
            problem = damage(path)
            if problem is None:
                return [path.name, None]
            logger.warning("checkpoint %s is damaged and not used: %s", path, problem)
            wrong.append(f"{path.name}: {problem}")
        what = "checkpoint" if step is None else f"checkpoint of step {step}"
        if not wrong:
            steps = ", ".join(str(_step_of(path)) for path in self._candidates()) or "none"
            return [None, f"there is no {what} in {self._folder} (steps there: {steps})"]
        return [
            None,
            f"no {what} in {self._folder} is sound: {'; '.join(wrong)}. Restore one from a copy, or start anew.",
        ]

    def _check_architecture(self, folder: Path) -> None:
        stored = json.loads((folder / ARCHITECTURE).read_text())
        own = self._backend.architecture()
        policies = self._backend.lora_scale
        if isinstance(policies, dict) and (held := {name.partition("/")[0] for name in stored}) != set(policies):
            raise CheckpointError(
                f"{folder} holds the policies {', '.join(sorted(held))}; this run trains "
                f"{', '.join(sorted(policies))}. Resume with the policies that trained (policies.<name>.trains), or "
                "start a new run."
            )
        different = [name for name in {**stored, **own} if stored.get(name) != own.get(name)]
        if different:
            described = "; ".join(
                f"{name}: saved {_described(stored.get(name))}, here {_described(own.get(name))}"
                for name in different[:3]
            )
            raise CheckpointError(
                f"{folder} was saved for another model; {len(different)} parameters differ. {described}. "
                "Resume with the model and the LoRA options that it was saved with."
            )

    def _read_state(self, folder: Path, state: dict[str, Tensor]) -> None:
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
                process_group=self._group,
                no_dist=self._group is None,
            )

    def _restore_rng(self, folder: Path, num_ranks: int) -> None:
        rank = self._rank
        if num_ranks != self._num_ranks:
            logger.warning("%s was saved by %d ranks and resumes on %d", folder, num_ranks, self._num_ranks)
        if rank < num_ranks:
            try:
                tensors, values = read_rng_state(folder / _rng_file(rank))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{folder / _rng_file(rank)} cannot be read: {error}") from error
            set_rng_state(tensors, values)

    # All ranks together -----------------------------------------------------------------------------------------

    def _on_rank_zero(self, action: Callable[[], None]) -> None:
        if self._rank == 0:
            action()

    def _same_on_all_ranks(self, value: Any) -> Any:  # Any: small picklable values
        """Rank 0's value."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def _stage(self, folder: Path, action: Callable[[], None]) -> None:
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
        if self._group is not None:
            outcomes = [None] * self._num_ranks
            dist.all_gather_object(outcomes, (problem, of_disk), group=self._group)
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


def newest_driver_state(folder: Path) -> dict[str, Any] | None:
    """The driver state of the newest sound checkpoint in the `checkpoints` folder of a run, None where there is none.

    Reads two small files and no tensors: `Checkpointer.load` may still find the rest damaged and take an older one.
    """
    for path in reversed(_finished_in(folder)):
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


def _finished_in(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first; one that was being replaced comes before its successor."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _FINISHED.fullmatch(path.name)]
    return sorted(found, key=lambda path: (_step_of(path), "." not in path.name, path.name))


def _own_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    if not isinstance(group, dist.ProcessGroup):
        raise ContractError("this process is not part of its own group")
    return group


def _step_of(path: Path) -> int:
    return int(path.name.partition("-")[2].partition(".")[0])


def _rng_file(rank: int) -> str:
    return f"rng-{rank:05d}.safetensors"


def _described(entry: list[Any] | None) -> str:
    if entry is None:
        return "absent"
    shape, dtype, trains = entry
    return f"{shape} {dtype}{'' if trains else ', frozen'}"
