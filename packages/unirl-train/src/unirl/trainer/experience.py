"""Experience replay: groups of earlier rollouts that are trained on again, next to fresh ones.

Ids and numbers are here; the samples are with the workers that train (`unirl.train.experience_files`). They keep the
advantages that they were trained with first, which compare them with the group that they were made in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

from unirl.algorithms.replay_buffer import ReplayBuffer, ReplayEntry
from unirl.distributed.held import Held
from unirl.distributed.runtime import Runtime
from unirl.train.experience_files import Taken
from unirl.trainer.collector import ScoredRollout
from unirl.trainer.roles import StackRole
from unirl.types.batch import rows_by

Row = tuple[int, int]
"""(shard, row in its file)"""


class ExperienceRole(Protocol):
    """Files of kept samples (unirl.train.experience_files.ExperienceFiles)."""

    def keep(self, resp: Held, name: str) -> None:
        """Keep all samples under a name."""
        ...

    def joined(self, resp: Held, taken: Sequence[Sequence[Taken]], purpose: str) -> Held:
        """The samples with kept ones, which come behind."""
        ...

    def forget(self, names: Sequence[str]) -> None:
        """Remove what was kept under these names."""
        ...

    def restore(self, step: int, names: Sequence[str]) -> None:
        """Take what a checkpoint has kept."""
        ...


@dataclass(frozen=True)
class _Group:
    """Where the samples of an entry are."""

    name: str
    rows: Sequence[Row]


class Experience:
    """Adds groups of earlier rollouts to each rollout that trains, and keeps its own.

    buffer: which groups are kept and drawn. groups_per_rollout: groups to add; fewer while fewer are known, and so few
    that they divide over devices and updates. best_of: samples kept of each group, those of the highest advantages, of
    groups in which one is above 0; None: all of every group. num_updates: as in the settings.
    A group is first drawn for the rollout after its own.
    """

    def __init__(
        self,
        runtime: Runtime,
        buffer: ReplayBuffer,
        *,
        groups_per_rollout: int,
        best_of: int | None = None,
        num_updates: int = 1,
    ) -> None:
        self._files = runtime.role("experience", ExperienceRole)
        self._buffer = buffer
        self._groups_per_rollout = groups_per_rollout
        self._best_of = best_of
        self._divisor = runtime.num_shards * num_updates * runtime.role("stack", StackRole).samples_per_unit()
        self._groups: dict[str, _Group] = {}
        self._new: dict[str, tuple[ReplayEntry, _Group]] = {}
        """Groups of the rollout that trains."""
        self._names: set[str] = set()
        """What the files are called that there are."""
        self._saved: set[str] = set()
        """Those that the last checkpoint needs, which may still be written."""
        self._settled = self._state()

    def mixed(self, rollout: ScoredRollout, version: int) -> tuple[ScoredRollout, dict[str, float]]:
        """A rollout with earlier groups behind its own, which are kept, and metrics; takes the rollout over.

        version: the oldest with which the engine began one of its requests. Nothing is settled before `finished`.
        """
        drawn = self._whole(self._buffer.draw(self._groups_per_rollout, version=rollout.rollout_id))
        name, resp = f"rollout-{rollout.rollout_id:06d}", rollout.resp
        self._names.add(name)
        self._files.keep(resp, name)
        self._new = self._found(resp, name, version)
        if drawn:
            rows = [(group.name, row) for entry in drawn for group in [self._groups[entry.key]] for row in group.rows]
            size = len(rows) // len(resp.metas)
            plans = [_taken(rows[shard * size : (shard + 1) * size]) for shard in range(len(resp.metas))]
            with resp:
                rollout = replace(rollout, resp=self._files.joined(resp, plans, f"again-{rollout.rollout_id}:"))
        lags = [rollout.rollout_id - entry.version for entry in drawn]
        return rollout, {
            "group/trained_samples": float(rollout.resp.meta.batch_size),
            "schedule/experience/groups": float(len(drawn)),
            "schedule/experience/kept_groups": float(len(self._buffer)),
            **({"schedule/lag/replayed_mean": sum(lags) / len(lags)} if lags else {}),
            **({"schedule/lag/replayed_oldest": float(max(lags))} if lags else {}),
        }

    def finished(self, rollout_id: int) -> None:
        """The rollout of the last `mixed` is trained on: its groups may be drawn now, and what is no longer needed is
        removed."""
        for key, (_, group) in self._new.items():
            self._groups[key] = group
        gone = self._buffer.add(entry for entry, _ in self._new.values())
        for key in (*gone, *self._buffer.discard_older(rollout_id + 1)):
            self._groups.pop(key, None)
        self._new = {}
        self._settled = self._state()
        unneeded = self._names - self._saved - set(self.names)
        self._files.forget(sorted(unneeded))
        self._names -= unneeded

    def _found(self, resp: Held, name: str, version: int) -> dict[str, tuple[ReplayEntry, _Group]]:
        """The groups of a rollout that are kept, by key."""
        sizes = [meta.batch_size for meta in resp.metas]
        rows = [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]
        track = resp.meta.root_track()
        advantages = track.known_advantages.tolist()
        found: dict[str, tuple[ReplayEntry, _Group]] = {}
        for group, members in rows_by(track.group_ids).items():
            chosen = members
            if self._best_of is not None:
                best = sorted(members, key=lambda row: -advantages[row])[: self._best_of]
                if advantages[best[0]] <= 0:
                    continue
                chosen = sorted(best)
            size = sum(abs(advantages[row]) for row in chosen) / len(chosen)
            key = f"{name}/{group}"
            found[key] = ReplayEntry(key, version, size), _Group(name, [rows[row] for row in chosen])
        return found

    def _whole(self, drawn: Sequence[ReplayEntry]) -> Sequence[ReplayEntry]:
        """The longest beginning whose samples divide over devices and updates."""
        ends = list(accumulate(len(self._groups[entry.key].rows) for entry in drawn))
        count = max((place + 1 for place, end in enumerate(ends) if end % self._divisor == 0), default=0)
        return drawn[:count]

    # State ------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Rollouts whose samples a checkpoint of now has to hold."""
        return sorted({group["name"] for group in self._settled["groups"].values()})

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """The state after the last rollout that was trained on. The files of `names` stay until the next call."""
        self._saved = set(self.names)
        return self._settled

    def _state(self) -> dict[str, Any]:  # Any: JSON
        groups = {key: {"name": group.name, "rows": list(group.rows)} for key, group in self._groups.items()}
        return {"buffer": self._buffer.state_dict(), "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:  # Any: JSON
        """Restore `state_dict` with the files of the checkpoint of `step`. Raises CheckpointError if it lacks some."""
        saved: Mapping[str, Mapping[str, Any]] = state["groups"]
        self._buffer.load_state_dict(state["buffer"])
        known = {entry.key for entry in self._buffer.entries}
        self._groups = {
            key: _Group(group["name"], [(shard, row) for shard, row in group["rows"]])
            for key, group in saved.items()
            if key in known
        }
        self._settled = self._state()
        self._files.restore(step, self.names)
        self._names = self._saved = set(self.names)


def _taken(rows: Sequence[tuple[str, Row]]) -> list[Taken]:
    """Consecutive rows of one file together."""
    found: list[Taken] = []
    for name, (shard, row) in rows:
        if found and (found[-1].name, found[-1].shard) == (name, shard):
            found[-1] = replace(found[-1], rows=[*found[-1].rows, row])
        else:
            found.append(Taken(name, shard, [row]))
    return found
