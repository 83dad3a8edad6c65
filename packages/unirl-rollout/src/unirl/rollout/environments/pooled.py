"""Episodes in a pool of environments that others use too: asked as `EnvironmentWorkers` are."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unirl.rollout.environments import wire
from unirl.rollout.environments.base import Environment, Task
from unirl.rollout.environments.begun import MAX_LOSSES, BegunEpisode, Lost
from unirl.rollout.environments.child import Prototype
from unirl.rollout.environments.pool_member import Batch, BatchResult, SlotState, full_name
from unirl.rollout.environments.process import Act, Answer, Call, Close, Raised, Reset, Restore
from unirl.types.errors import WorkerError
from unirl.types.protocols.hosting import HostedMember, HostingPool

_MAX_MEMBERS = 4
"""Members that may be lost in one round of calls, before these are taken for the cause."""


@dataclass(frozen=True)
class _Home:
    """The process that an episode is in."""

    member: str
    """Its key."""
    slot: int
    life: int


@dataclass(frozen=True)
class _Sent:
    """A call on its way."""

    call: Call
    is_asked: bool
    """False: it brings the episode to where it was."""
    is_last: bool = False
    """True for the last one of these."""


class PooledEnvironments:
    """Plays many episodes in the processes of a pool. An episode stays with the process that has the fewest when it
    begins, whoever they are of.

    at: where the environment stands in the recipe. step_timeout_s, memory_gb: see `EnvironmentWorkers`.
    Episodes of a process or member that ends are restored in other ones (`Environment`), and the call that a process
    ended in is made again once.
    """

    def __init__(
        self,
        environment: Environment[Any, Any],  # Any: of whatever acts
        pool: HostingPool,
        *,
        at: str,
        step_timeout_s: float,
        memory_gb: float | None = None,
    ) -> None:
        wire.require_sendable(environment)
        self._environment, self._at = environment, at
        self._pool = pool
        self._step_timeout_s, self._memory_gb = step_timeout_s, memory_gb
        self._client = uuid.uuid4().hex
        """Begins the names of our episodes where those of others are too."""
        self._members: dict[str, HostedMember] = {}
        self._loads: dict[_Home, int] = {}
        """Episodes of each process when we asked, and those that we have added."""
        self._pids: list[int] = []
        self._homes: dict[str, _Home] = {}
        self._episodes: dict[str, BegunEpisode] = {}
        self._num_lost = 0
        """Members that were lost in this round of calls."""
        self.num_restarts = 0
        """Processes that ended with our episodes and were replaced."""

    @property
    def pids(self) -> list[int]:
        """Process ids when episodes last began, of all members; none before."""
        return list(self._pids)

    def reset(self, tasks: Mapping[str, tuple[Task, int]]) -> dict[str, Answer | Lost]:
        """Begin episodes: name -> (task, seed). Returns what each one observes first, or why it cannot begin."""
        self._num_lost = 0
        self._look()
        self._episodes.update({name: BegunEpisode(task, seed) for name, (task, seed) in tasks.items()})
        return self._played([Reset(name, task, seed) for name, (task, seed) in tasks.items()])

    def step(self, actions: Mapping[str, Any]) -> dict[str, Answer | Lost]:  # Any: as the environment takes them
        """Take one step of each of some episodes. Returns the `Step` of each, or why the episode is lost."""
        return self._played([Act(name, action) for name, action in actions.items()])

    def begun(self, name: str) -> BegunEpisode:
        """What continues an episode where it is not known."""
        return self._episodes[name]

    def resume(self, episodes: Mapping[str, BegunEpisode]) -> dict[str, Lost]:
        """Continue episodes that others have begun, or that were forgotten here: they are restored when they are
        stepped, which also tells of those that cannot be."""
        if episodes:
            self._num_lost = 0
            self._look()
        self._episodes.update(episodes)
        return {}

    def end(self, names: Sequence[str]) -> None:
        """Forget episodes."""
        self._num_lost = 0
        here = [name for name in names if name in self._episodes]
        sent: dict[_Home, list[_Sent]] = {}
        for name in here:
            home = self._homes.get(name)
            if home is not None:
                sent.setdefault(home, []).append(_Sent(Close(name), is_asked=True))
        for home, result in self._asked(sent):
            if result.death is not None:
                self._leave(home, result.life)
        for name in here:
            del self._episodes[name]
            self._homes.pop(name, None)

    def close(self) -> None:
        """Forget all. The processes are the pool's."""
        self._members, self._loads, self._homes, self._episodes = {}, {}, {}, {}

    # Members -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Find the members of now, and what their processes play."""
        self._members, self._loads = {}, {}
        while not self._loads:
            found = {member.key: member for member in self._pool.members()}
            states = self._states(found)
            self._members = {key: found[key] for key in states}
            homes = [
                (_Home(key, slot, state.life), state) for key, own in states.items() for slot, state in enumerate(own)
            ]
            self._pids = [state.pid for _, state in homes]
            # Those who look at the same time begin with different ones.
            first = int(self._client, 16) % max(1, len(homes))
            self._loads = {home: state.num_episodes for home, state in (*homes[first:], *homes[:first])}
            self._homes = {name: home for name, home in self._homes.items() if home in self._loads}

    def _states(self, members: Mapping[str, HostedMember]) -> dict[str, list[SlotState]]:
        """The processes of members that answer."""
        states = self._results(members, lambda member: member.start("prepare", self._at, None))
        new = {key: members[key] for key, found in states.items() if found is None}
        if new:
            prototype = Prototype.of(self._environment, self._memory_gb)
            states |= self._results(new, lambda member: member.start("prepare", self._at, prototype))
        return {key: found for key, found in states.items() if found is not None}

    def _results(
        self, members: Mapping[str, HostedMember], start: Callable[[HostedMember], Callable[[], Any]]
    ) -> dict[str, Any]:  # Any: as the member's method
        """Key -> what each member answers that is not lost meanwhile."""
        waits = {key: start(member) for key, member in members.items()}
        found = {}
        for key, wait in waits.items():
            try:
                found[key] = wait()
            except WorkerError as error:
                self._lose_member(members[key], error)
        return found

    def _lose_member(self, member: HostedMember, error: WorkerError) -> None:
        """Its episodes need another home. Raises the error if too many members were lost in these calls."""
        self._pool.lost(member, str(error))
        self._members.pop(member.key, None)
        self._loads = {home: load for home, load in self._loads.items() if home.member != member.key}
        self._homes = {name: home for name, home in self._homes.items() if home.member != member.key}
        self._num_lost += 1
        if self._num_lost >= _MAX_MEMBERS:
            raise error

    def _leave(self, home: _Home, life: int) -> None:
        """The process has ended, and another one stands there."""
        self._homes = {name: own for name, own in self._homes.items() if own != home}
        self.num_restarts += 1
        if self._loads.pop(home, None) is not None:
            self._loads[_Home(home.member, home.slot, life)] = 0

    def _settled(self, name: str) -> _Home:
        """A home for an episode that has none."""
        if not self._loads:
            self._look()
        home = min(self._loads, key=self._loads.__getitem__)
        self._loads[home] += 1
        self._homes[name] = home
        return home

    # Calls -------------------------------------------------------------------------------------------------------

    def _played(self, calls: Sequence[Call]) -> dict[str, Answer | Lost]:
        """What each call gave, by episode; one call per episode."""
        self._num_lost = 0
        found: dict[str, Answer] = {}
        losses: Counter[str] = Counter()
        left = {call.episode: call for call in calls}
        while left := {name: call for name, call in left.items() if self._episodes[name].lost is None}:
            sent = self._sent(left)
            for home, result in self._asked(sent):
                answers = [wire.unpacked(answer) for answer in result.answers]
                for own, said in zip(sent[home], answers, strict=False):
                    if self._take(own, said):
                        found[own.call.episode] = said.answer
                        del left[own.call.episode]
                if result.death is None:
                    continue
                self._leave(home, result.life)
                if result.is_cause:
                    self._blame(sent[home][len(answers)], result.death, losses)
        lost = {call.episode: self._episodes[call.episode].lost for call in calls}
        return {name: found[name] if why is None else Lost(why) for name, why in lost.items()}

    def _sent(self, left: Mapping[str, Call]) -> dict[_Home, list[_Sent]]:
        """Calls by home, those that restore an episode before its own. An episode that cannot be restored is lost."""
        sent: dict[_Home, list[_Sent]] = {}
        for name, call in left.items():
            home, before = self._homes.get(name), []
            if home is None:
                restoration = self._episodes[name].restoration(name, self._environment)
                if isinstance(restoration, Lost):
                    self._episodes[name].lost = restoration.reason
                    continue
                home = self._settled(name)
                last = len(restoration) - 1
                before = [_Sent(each, is_asked=False, is_last=place == last) for place, each in enumerate(restoration)]
            sent.setdefault(home, []).extend([*before, _Sent(call, is_asked=True)])
        return sent

    def _asked(self, sent: Mapping[_Home, Sequence[_Sent]]) -> Iterator[tuple[_Home, BatchResult]]:
        """What came of the calls of each home; nothing of those whose member was lost."""
        batches: dict[str, dict[_Home, Batch]] = {}
        for home, own in sent.items():
            batches.setdefault(home.member, {})[home] = self._batch(home, [each.call for each in own])
        members = {key: self._members[key] for key in batches if key in self._members}
        results = self._results(members, lambda member: member.start("play", list(batches[member.key].values())))
        for key, found in results.items():
            yield from zip(batches[key], found, strict=True)

    def _batch(self, home: _Home, calls: Sequence[Call]) -> Batch:
        full = {call.episode: full_name(self._client, call.episode) for call in calls}
        return Batch(
            client=self._client,
            slot=home.slot,
            life=home.life,
            calls=wire.packed([replace(call, episode=full[call.episode]) for call in calls]),
            num_calls=len(calls),
            timeout_s=self._step_timeout_s,
            begun=tuple(full[call.episode] for call in calls if isinstance(call, (Reset, Restore))),
            ended=tuple(full[call.episode] for call in calls if isinstance(call, Close)),
        )

    def _take(self, own: _Sent, said: Any) -> bool:  # Any: Answered or Raised
        """Note an answer. True if it is what the caller asked for."""
        name = own.call.episode
        episode = self._episodes[name]
        if episode.lost is not None:
            return False
        if isinstance(said, Raised):
            self._lose(name, said.reason if own.is_asked else f"it could not be restored: {said.reason}")
            return False
        if own.is_asked:
            episode.keep(own.call, said)
            return True
        different = episode.difference(said, self._environment) if own.is_last else None
        if different is not None:
            self._lose(name, different.reason)
        return False

    def _blame(self, cause: _Sent, death: str, losses: Counter[str]) -> None:
        """A process has ended in a call. Its episode is lost if that was not the first time."""
        name = cause.call.episode
        losses[name] += 1
        if not cause.is_asked:
            self._lose(name, "its process ended again while it was restored")
        elif losses[name] >= MAX_LOSSES:
            self._lose(name, f"its process {death}, twice")

    def _lose(self, name: str, reason: str) -> None:
        self._episodes[name].lost = reason
