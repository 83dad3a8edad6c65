"""Pushes to a served pool: members may die of them, and one that starts later gets the last push, proved."""

from typing import Any

import pytest
from served_fakes import LocalMember, pool_of, request

from unirl.distributed.pools.lent import LentMembers
from unirl.distributed.weight_sync.served_syncs import PushedPool, ServedSyncs
from unirl.types.errors import WeightSyncError, WorkerError


class FakeSync:
    """Stands for the syncs of what trains: gives a version to every member that it knows, one after the other.

    deadly: numbers of the members that die of a push, each once. refuses: the number of one that is not proved.
    """

    def __init__(self) -> None:
        self.version, self.deadly, self.refuses = 0, [], None
        self.engines: dict[str | None, Any] = {}
        self.connected: list[tuple[str | None, list[int]]] = []
        self.pushed: list[tuple[Any, str | None]] = []

    def connect_elsewhere(
        self, engines: Any, shares_device: bool, policy: str | None = None, *, keeps_former: bool = False
    ) -> None:
        assert keeps_former == (len(engines.actors) == 1 and bool(self.pushed))
        self.engines[policy] = engines
        self.connected.append((policy, [member.number for member in engines.actors]))

    def prepare(self) -> None:
        pass

    def push(self, policy: Any = None, only: str | None = None) -> dict[str, float]:
        self.pushed.append((policy, only))
        for name, engines in self.engines.items():
            for member in engines.actors if only in (None, name) else ():
                if member.number in self.deadly:
                    self.deadly.remove(member.number)
                    member.die()
                if member.number == self.refuses:
                    raise WeightSyncError("log-probs differ")
                assert member.is_alive
                member.drawer.version = self.version
        return {"sync/version": float(self.version)}


def versions(members: list[LocalMember]) -> list[int]:
    return [member.drawer.version for member in members]


def rewards(pool: Any) -> list[float]:
    return pool.role("engine").generate(request(4)).fetch().root_track().rewards.tolist()


def test_a_push_begins_again_without_the_members_that_died_of_it() -> None:
    members = [LocalMember(number) for number in range(3)]
    with pool_of(*members) as pool:
        sync = FakeSync()
        syncs = ServedSyncs(sync, [PushedPool(pool, "engine")])
        syncs.prepare()
        sync.version, sync.deadly = 1, [1, 2]
        assert syncs.push("old") == {"sync/version": 1.0}
        assert versions(members) == [1, 1, 1] and pool.gauges()["restarts"] == 2
        assert sync.pushed == [("old", None)] * 3
        sync.version = 2
        syncs.push("old")
        assert [numbers for _, numbers in sync.connected] == [[0, 1, 2]]  # as in this process: a worker keeps its id


def test_a_member_that_replaces_a_dead_one_gets_the_last_push_alone() -> None:
    members = [LocalMember(number) for number in range(3)]
    with pool_of(*members, rows=2) as pool:
        sync = FakeSync()
        syncs = ServedSyncs(sync, [PushedPool(pool, "engine", policy="painter")])
        sync.version = 3
        syncs.push("ema")
        members[0].deadly, members[1].deadly, members[2].deadly = ({"s2"},) * 3
        assert rewards(pool) == [300 + row for row in range(8)]
        pool.heal()
        assert versions(members) == [3, 3, 3] and sync.pushed[1:] == [("ema", "painter")]
        assert [len(numbers) for _, numbers in sync.connected] == [3, 1]
        sync.version = 4
        syncs.push("ema")
        assert versions(members) == [4, 4, 4] and len(sync.connected[-1][1]) == 3


def test_a_member_that_is_not_proved_does_not_join_and_the_others_work_on() -> None:
    members = [LocalMember(0), LocalMember(1), LocalMember(2)]
    with pool_of(*members, start=2) as pool:
        sync = FakeSync()
        syncs = ServedSyncs(sync, [PushedPool(pool, "engine")])
        sync.version = 1
        syncs.push()
        sync.refuses = 2
        with pytest.raises(WeightSyncError, match="log-probs differ"):
            pool.resize(3)
        assert pool.num_workers == 2 and rewards(pool) == [100 + row for row in range(8)]
        sync.refuses, members[2] = None, LocalMember(3)
    with pool_of(*members, start=2) as pool:
        syncs = ServedSyncs(sync, [PushedPool(pool, "engine")])
        syncs.push()
        pool.resize(3)
        assert versions(members) == [1, 1, 1] and rewards(pool) == [100 + row for row in range(8)]


def test_a_push_that_fails_while_all_live_is_raised_at_once() -> None:
    with pool_of(LocalMember(0)) as pool:
        sync = FakeSync()
        syncs = ServedSyncs(sync, [PushedPool(pool, "engine")])
        sync.refuses = 0
        with pytest.raises(WeightSyncError, match="log-probs differ"):
            syncs.push()
        assert len(sync.pushed) == 1
        sync.refuses, sync.deadly = None, [0] * 9
        with pytest.raises(WorkerError, match="it died"):
            syncs.push()
        assert len(sync.pushed) == 9


def outdated(pool: Any, version: int) -> tuple[FakeSync, ServedSyncs]:
    """A version is pushed, and what trains has the next one by now."""
    sync = FakeSync()
    syncs = ServedSyncs(sync, [PushedPool(pool, "engine")])
    sync.version = version
    syncs.push()
    syncs.training_begins()
    sync.version = version + 1
    return sync, syncs


def test_a_member_that_dies_after_training_has_begun_waits_for_the_next_push() -> None:
    members = [LocalMember(number) for number in range(3)]
    with pool_of(*members, rows=2) as pool:
        sync, syncs = outdated(pool, version=3)
        members[0].deadly, members[1].deadly, members[2].deadly = ({"s2"},) * 3
        assert rewards(pool) == [300 + row for row in range(8)]  # no sample is of the new weights
        assert len(sync.pushed) == 1
        syncs.push()
        assert versions(members) == [4, 4, 4] and len(sync.pushed) == 2
        assert rewards(pool) == [400 + row for row in range(8)]


def test_where_no_member_has_the_old_weights_one_gets_the_new_ones(caplog: pytest.LogCaptureFixture) -> None:
    member = LocalMember(0)
    with pool_of(member, rows=2) as pool:
        outdated(pool, version=3)
        member.deadly = {"s4"}
        assert rewards(pool) == [*(300 + row for row in range(4)), *(400 + row for row in range(4, 8))]
        assert "no member of writers has the weights that were pushed last; member 0 gets newer ones" in caplog.text


def test_where_all_members_die_after_training_has_begun_they_do_not_wait_for_each_other() -> None:
    members = [LocalMember(number) for number in range(2)]
    with pool_of(*members, rows=2) as pool:
        outdated(pool, version=3)
        for member in members:
            member.deadly = {"s0", "s2"}
        made = rewards(pool)
        assert {value % 100 for value in made} == set(range(8)) and {value // 100 for value in made} <= {3, 4}


def test_a_member_that_joins_after_training_gets_the_push_that_follows() -> None:
    members = [LocalMember(0), LocalMember(1)]
    with pool_of(*members, start=1) as pool:
        sync, syncs = outdated(pool, version=1)
        pool.resize(2)
        assert len(sync.pushed) == 1
        syncs.push()
        assert versions(members) == [2, 2]


def test_a_member_that_waits_for_a_push_does_not_keep_the_pool_from_closing() -> None:
    members = [LocalMember(0), LocalMember(1)]
    with pool_of(*members, rows=2) as pool:
        outdated(pool, version=0)
        members[0].deadly = {"s0"}
        members[1].deadly = set()
        rewards(pool)
    assert not any(member.is_alive for member in members)


def test_members_on_devices_that_train_are_pushed_to_and_asked_while_these_are_lent() -> None:
    members = [LocalMember(number) for number in range(4)]
    with pool_of(*members, rows=2) as pool:
        sync = FakeSync()
        syncs = ServedSyncs(sync, [PushedPool(pool, "engine")])
        lent = LentMembers(pool, [0, 2, 7], ["engine"])
        assert (lent.num_lent, lent.num_others) == (2, 2)
        sync.version = 1
        syncs.push()
        lent.take_back(cuts_calls=False, sleeps=True)
        assert [member.drawer.is_asleep for member in members] == [True, False, True, False]
        sync.version = 2
        syncs.push()
        assert versions(members) == [1, 2, 1, 2] and rewards(pool) == [200 + row for row in range(8)]
        members[2].is_alive = False
        lent.lend(wakes=False)
        sync.version = 3
        syncs.push()
        assert versions(members) == [3, 3, 3, 3] and members[2].num_starts == 2
