"""What is in flight as a part of checkpoints: a resumed run goes on with the samples of the run before.

Finished requests keep their samples and rewards, samples without rewards are scored, and what was begun is continued:
calls of served pools that were answered are not made again, and samples that were cut short go on where they were.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from unirl.distributed.held import Held
from unirl.distributed.runtime import Runtime
from unirl.train.checkpoint.sample_files import IN_FLIGHT, files_of, saved_files
from unirl.trainer.asking import AskedBefore, RequestOf
from unirl.trainer.collector import Collector, ScoredGroups
from unirl.trainer.loops.calls import CutRequest
from unirl.trainer.loops.flight import Flight
from unirl.trainer.loops.slots import Slot
from unirl.types.errors import CheckpointError, ContractError

logger = logging.getLogger(__name__)

Stage = Literal["scored", "made", "begun", "asked"]
"""How far a request is: with rewards, without, cut short by a push, or in the calls of served pools."""
State = Mapping[str, Any]  # Any: JSON


@dataclass
class InFlight:
    """Writes requests in flight into a checkpoint, and takes them back.

    prompts_per_request: of this run. folder: of the files in the run directory, on a file system that all workers
    share. checkpoints: of the run.
    """

    collector: Collector[Any]  # Any: parameters of the modality
    prompts_per_request: int
    runtime: Runtime
    folder: Path
    checkpoints: Path

    def is_settled(self, flight: Flight) -> bool:
        """True if what no part works at can be written: every request is between two parts of its way, or waits in
        pools for the weights. Asked while no call runs."""
        return all(
            flight.is_parked(slot) or any(dealt.is_waiting(slot.number) for dealt in self.runtime.dealt_requests)
            for slot in flight.slots.untrained
        )

    # Writing --------------------------------------------------------------------------------------------------------

    def write(self, step: int, flight: Flight) -> tuple[dict[str, Any], list[str]]:  # Any: JSON
        """Write all requests of `flight`, while no part works at any. Returns their state, for `restore`, and the names
        of their files. What no file can hold is asked for again by the run that resumes, which a warning says."""
        name = f"step-{step:06d}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove(name)
        requests = [self._written(slot, flight, f"{name}-request-{slot.number:06d}") for slot in flight.slots.untrained]
        self._remove_before(name)
        state = {"name": name, "requests": requests, "next": self.collector.asking.present_state()}
        return state, [name]

    def _written(self, slot: Slot[ScoredGroups], flight: Flight, name: str) -> dict[str, Any]:  # Any: JSON
        before = self.collector.asking.before(slot.number)
        own = {
            "number": slot.number,
            "version": slot.version,
            "calls": slot.calls,
            "resumed": list(slot.resumed),
            "is_dropped": slot.is_dropped,
            "before": before.state,
            "prompt_ids": list(before.prompt_ids),
        }
        try:
            return {**own, **self._samples_of(slot, flight, name)}
        except ContractError as error:
            self._remove(name)
            logger.warning("request %d is not in the checkpoint and would be made again: %s", slot.number, error)
            return {**own, "stage": "asked", "pools": {}}

    def _samples_of(self, slot: Slot[ScoredGroups], flight: Flight, name: str) -> dict[str, Any]:  # Any: JSON
        if slot.item is not None:
            pieces = [
                {"rows": rows, "num_files": self._keep(held, f"{name}-{number}")}
                for number, (held, rows) in enumerate(slot.item.pieces)
            ]
            return {"stage": "scored", "pieces": pieces, "gauges": slot.item.gauges}
        made = next((held for own, held in flight.unscored if own is slot), None)
        if made is not None:
            return {"stage": "made", "num_files": self._keep(made, f"{name}-0")}
        cut = next((own for own in flight.cut if own.slot is slot), None)
        if cut is not None:
            return {"stage": "begun", "num_files": self._keep(cut.begun, f"{name}-0")}
        if slot.is_dropped or not flight.is_shared or slot.asked is None:
            return {"stage": "asked", "pools": {}}
        dealt = [each.write(slot.number, self.folder, name) for each in self.runtime.dealt_requests]
        pools = {pool: legs for part in dealt for pool, legs in part.items()}
        return {"stage": "asked", "pools": pools, "began": flight.calls_of(slot)}

    def _keep(self, held: Held, name: str) -> int:
        held.write(self.folder, name)
        return len(held.metas)

    def _remove(self, name: str) -> None:
        for path in files_of(self.folder, name):
            path.unlink()

    def _remove_before(self, name: str) -> None:
        """The checkpoint before may still be written: its files stay, older ones go."""
        steps = sorted({"-".join(path.name.split("-")[:2]) for path in self.folder.glob("step-*.safetensors")} - {name})
        for step in steps[:-1]:
            self._remove(step)

    # Reading --------------------------------------------------------------------------------------------------------

    def restore(self, step: int, state: State, flight: Flight) -> None:
        """Put the requests of a checkpoint into `flight`, which has begun (`Slots.start`) and is empty.

        Raises CheckpointError if the checkpoint lacks files.
        """
        last = flight.until * flight.slots.per_rollout
        requests: Sequence[State] = [own for own in state["requests"] if own["number"] < last]
        if requests and (why := self._unfit(step, requests, flight)):
            logger.warning("the %d requests in flight of the checkpoint are made again: %s", len(requests), why)
            return
        folder = saved_files(self.checkpoints, step, IN_FLIGHT)
        try:
            for own in requests:
                self._restore(own, folder or self.checkpoints, f"{state['name']}-request-{own['number']:06d}", flight)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.checkpoints} lacks samples in flight ({error}). Restore its "
                f"folder {IN_FLIGHT} from a copy, or resume with save.in_flight=false, which makes them again."
            ) from error
        self.collector.asking.go_on(state["next"])
        shutil.rmtree(self.folder, ignore_errors=True)
        logger.info("%d requests in flight go on", len(requests))

    def _unfit(self, step: int, requests: Sequence[State], flight: Flight) -> str | None:
        """Why this run cannot go on with them; None if it can."""
        slots, size = flight.slots, {len(own["prompt_ids"]) for own in requests}
        if size != {self.prompts_per_request}:
            return f"they have {sorted(size)} prompts each, and requests of this run have {self.prompts_per_request}"
        if len(requests) > slots.capacity:
            return f"this run has {slots.capacity} in flight at most"
        oldest = step - min(own["version"] for own in requests)
        if oldest > slots.max_staleness and slots.too_old != "correct":
            return f"they are up to {oldest} versions old, and schedule.max_staleness = {slots.max_staleness}"
        there = {dealt.name for dealt in self.runtime.dealt_requests} if flight.is_shared else set[str]()
        if missing := sorted({pool for own in requests for pool in own.get("pools", {})} - there):
            return f"some are in the calls of the pool {missing[0]}, which this run has not"
        if flight.is_shared and any(own["stage"] == "begun" for own in requests):
            return "some were cut short by an engine that takes one request at a time"
        return None

    def _restore(self, own: State, folder: Path, name: str, flight: Flight) -> None:
        number = own["number"]
        slot = Slot[ScoredGroups](
            number,
            number // flight.slots.per_rollout,
            own["version"],
            calls={pool: tuple(versions) for pool, versions in own["calls"].items()},
            resumed=list(own["resumed"]),
            is_dropped=own["is_dropped"],
        )
        req = self.collector.asked_again(RequestOf(slot.rollout, number), AskedBefore(own["before"], own["prompt_ids"]))
        slot.asked = req.replace(number=number) if flight.is_shared else req
        flight.slots.restore(slot)
        stage: Stage = own["stage"]
        if stage == "scored":
            pieces = [
                (self._read(folder, f"{name}-{place}", piece["num_files"]), list(piece["rows"]))
                for place, piece in enumerate(own["pieces"])
            ]
            slot.item = ScoredGroups(pieces, dict(own["gauges"]))
        elif stage == "made":
            flight.unscored.append((slot, self._read(folder, f"{name}-0", own["num_files"])))
        elif stage == "begun":
            flight.cut.append(CutRequest(slot, self._read(folder, f"{name}-0", own["num_files"])))
        else:
            for dealt in self.runtime.dealt_requests if flight.is_shared else ():
                dealt.read(number, folder, name, own["pools"])
            if not slot.is_dropped:
                flight.asked.append((slot, own.get("began")))

    def _read(self, folder: Path, name: str, num_files: int) -> Held:
        return self.runtime.read([folder / f"{name}-{number:05d}.safetensors" for number in range(num_files)])
