"""Which prompts are asked for, and which requests are not trained on yet."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unirl.data.data_source import MultimodalRLDataSource, PromptRow
from unirl.trainer.request import unique_ids
from unirl.types.errors import CheckpointError


@dataclass(frozen=True)
class RequestOf:
    """Which request of a run is asked for."""

    rollout: int
    number: int
    """Requests are numbered in the order in which they take prompts."""
    skips: int = 0
    """Requests before it that are trained on already: their prompts are passed over."""
    mixes: int = 0
    """Earlier rollouts whose requests it may be trained on with, so that ids differ from theirs."""


@dataclass(frozen=True)
class AskedBefore:
    """A request that an earlier run has asked for, so that it can be asked for again."""

    state: Mapping[str, Any]  # Any: JSON
    """State of asking before it."""
    prompt_ids: Sequence[str]


@dataclass(frozen=True)
class LeftOver:
    """Requests that were overtaken where a run was saved."""

    oldest: int
    """The oldest request that is not trained on."""
    ahead: Sequence[int]
    """Later ones that are."""
    prompts_per_request: int

    def require(self, prompts_per_request: int) -> None:
        """Raise CheckpointError if the run that resumes has requests of another size."""
        if self.prompts_per_request != prompts_per_request:
            raise CheckpointError(
                f"the checkpoint has trained on requests of {self.prompts_per_request} prompts ahead of older ones, "
                f"and this run has {prompts_per_request}. Resume with schedule.groups_per_request: "
                f"{self.prompts_per_request}."
            )


class Asking:
    """Takes prompts for requests and for groups that replace others. Threads may share it.

    A request is unfinished from when it is asked for until `finished` is called. `state_dict` is the state before the
    oldest unfinished one, so that a resumed run asks for that again and loses no prompts; `present_state` is the one
    behind all, for a run that goes on with what was unfinished (`again`).
    """

    def __init__(self, data: MultimodalRLDataSource) -> None:
        self._data = data
        self._asking = threading.Lock()
        self._unfinished: dict[int, AskedBefore] = {}
        self._ahead: set[int] = set()
        """Finished requests that are newer than an unfinished one."""
        self._prompts_per_request = 0
        self._asked: dict[int, list[str]] = {}
        """Rollout -> ids of the prompts that it was asked for; of the last ones."""
        self.num_dropped_groups = 0
        """Groups replaced since the start of the run."""
        self.left_over: LeftOver | None = None
        """What a checkpoint says of overtaken requests; None: there were none."""

    def rows(self, own: RequestOf, num_prompts: int) -> list[PromptRow]:
        """The next prompts, for a request that is unfinished from now on."""
        with self._asking:
            if own.skips:
                self._data.next(own.skips * num_prompts)
            before = self._present()
            rows = self._distinct(self._data.next(num_prompts), own)
            self._begin(own, AskedBefore(before, [row.prompt_id for row in rows]))
            return rows

    def other_rows(self, num_prompts: int) -> list[PromptRow]:
        """The next prompts, for groups that replace others."""
        with self._asking:
            return list(self._data.next(num_prompts))

    def before(self, request: int) -> AskedBefore:
        """What `again` needs for an unfinished request."""
        return self._unfinished[request]

    def again(self, own: RequestOf, before: AskedBefore) -> list[PromptRow]:
        """The prompts of a request that an earlier run has asked for, unfinished again. `go_on` has to follow."""
        with self._asking:
            self._data.load_state_dict(before.state["data"])
            drawn = self._data.next(len(before.prompt_ids))
            self._begin(own, before)
            names = before.prompt_ids
            return [dataclasses.replace(row, prompt_id=name) for row, name in zip(drawn, names, strict=True)]

    def _begin(self, own: RequestOf, before: AskedBefore) -> None:
        self._prompts_per_request = len(before.prompt_ids)
        self._unfinished[own.number] = before

    def _distinct(self, rows: Sequence[PromptRow], own: RequestOf) -> list[PromptRow]:
        """Rows whose ids are unique among all requests of the rollout, as they are within one: data may begin again."""
        oldest = own.rollout - own.mixes
        self._asked = {rollout: ids for rollout, ids in self._asked.items() if rollout >= oldest}
        known = [name for ids in self._asked.values() for name in ids]
        found = unique_ids([*known, *(row.prompt_id for row in rows)])[len(known) :]
        self._asked.setdefault(own.rollout, []).extend(row.prompt_id for row in rows)
        return [dataclasses.replace(row, prompt_id=name) for row, name in zip(rows, found, strict=True)]

    def finished(self, requests: Sequence[int]) -> None:
        """These requests are trained on, so that they are not asked for again."""
        with self._asking:
            for request in requests:
                del self._unfinished[request]
            oldest = min(self._unfinished, default=None)
            self._ahead = set() if oldest is None else {each for each in (*self._ahead, *requests) if each > oldest}

    # State ------------------------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> object:
        """Fingerprint of the data's rows; None if the source has none."""
        return self._data.state_dict().get("fingerprint")

    def _present(self) -> dict[str, Any]:  # Any: JSON
        return {"data": self._data.state_dict(), "num_dropped_groups": self.num_dropped_groups}

    def present_state(self) -> dict[str, Any]:  # Any: JSON
        """The state behind all requests so far, and what replaced groups, for `go_on`."""
        with self._asking:
            return {**self._present(), "asked": {str(rollout): ids for rollout, ids in self._asked.items()}}

    def go_on(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Ask for what follows `present_state`."""
        with self._asking:
            self._data.load_state_dict(state["data"])
            self.num_dropped_groups = state["num_dropped_groups"]
            self._asked = {int(rollout): list(ids) for rollout, ids in state["asked"].items()}

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """The state before the oldest unfinished request."""
        with self._asking:
            oldest = min(self._unfinished, default=None)
            state = self._present() if oldest is None else dict(self._unfinished[oldest].state)
            if oldest is None or not self._ahead:
                return state
            return {**state, "left_over": asdict(LeftOver(oldest, sorted(self._ahead), self._prompts_per_request))}

    def load_state_dict(self, state: Mapping[str, Any], *, is_same_data: bool) -> None:  # Any: JSON
        """Restore `state_dict`. is_same_data: the prompts come in the order of the saved run."""
        if is_same_data:
            self._data.load_state_dict(state["data"])
        self.num_dropped_groups = state["num_dropped_groups"]
        left = state.get("left_over")
        self.left_over = LeftOver(**left) if left is not None and is_same_data else None
        self._ahead = set() if self.left_over is None else set(self.left_over.ahead)
