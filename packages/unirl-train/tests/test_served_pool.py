"""A served pool: calls go to whoever is free, and members that die, join and leave change no sample."""

import random
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_fakes import InProcess, build_source
from served_fakes import LocalMember, pool_of, request

from unirl.distributed.groups import WorkerGroups
from unirl.distributed.pools.cutting import Ask, call_bounds
from unirl.types.errors import ConfigError, ContractError, WeightSyncError
from unirl.types.roles import Collect, Dispatch


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.integers(1, 12))
def test_calls_split_no_group_and_cover_every_sample_once(sizes, num_rows) -> None:
    groups = [f"g{number}" for number, size in enumerate(sizes) for _ in range(size)]
    bounds = call_bounds(groups, num_rows)
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])] and bounds[-1][1] == len(groups)
    assert all(stop - start >= num_rows for start, stop in bounds[:-1])
    assert all(groups[stop] != groups[stop - 1] for _, stop in bounds[:-1])


def test_samples_come_in_the_order_of_the_request_whoever_made_them() -> None:
    req = request(8)
    with pool_of(LocalMember(1), LocalMember(2)) as pool:
        held = pool.role("engine").generate(req)
        assert held.meta.root_track().sample_ids == req.sample_ids
        whole = held.fetch()
        assert whole.root_track().rewards.tolist() == list(range(16))
        assert pool.num_held() == 1
        held.release()
        assert pool.num_held() == 0


def test_one_member_is_asked_for_what_rank_zero_answers_and_all_go_to_sleep() -> None:
    members = LocalMember(1), LocalMember(2)
    with pool_of(*members) as pool:
        engine = pool.role("engine")
        assert engine.plan() == "sigmas" and members[0].num_asked + members[1].num_asked == 1
        engine.sleep()
        assert engine.asleep() == [True, True]
        with pytest.raises(ContractError, match="no request to cut"):
            pool.submit("engine", "generate", Dispatch.DP_SCATTER, Collect.HOLD, (), {}).result()


def test_twenty_deaths_at_random_cost_no_sample_and_every_replacement_is_restored() -> None:
    drawn, restored = random.Random(0), []
    members = [LocalMember(number) for number in range(3)]
    with pool_of(*members, rows=2) as pool:

        def restore(member: Any) -> None:
            restored.append(member.number)
            member.drawer.version = 7

        pool.restored = restore
        for member in members:
            restore(member)
        del restored[:]
        deaths = 0
        while deaths < 20:
            req = request(12)
            deadly = set(drawn.sample(req.sample_ids, 2))
            for member in members:
                member.deadly = deadly  # each sample ends the first that is asked for it
            whole = pool.role("engine").generate(req).fetch()
            deaths += 2
            assert whole.root_track().sample_ids == req.sample_ids
            assert whole.root_track().rewards.tolist() == [700 + row for row in range(24)]
        pool.heal()
        assert len(restored) == pool.gauges()["restarts"] == sum(member.num_starts - 1 for member in members) >= 10


def test_a_call_takes_along_what_others_made_for_its_samples() -> None:
    req = request(6)
    train, pool = InProcess(build_source, 3), pool_of(LocalMember(1), LocalMember(2))
    with WorkerGroups(train, {"engine": pool}) as groups:
        made = groups.role("engine").generate(req)
        above = train.gather([(made, range(12))])
        grown = groups.role("engine").generate(req, None, above)
        assert list(grown.meta.tracks) == ["image", "redraw"]
        assert grown.fetch().tracks["redraw"].rewards.tolist() == list(range(12))
        assert groups.num_shards == 3  # a served pool asks for no equal shares
        moved = groups.role("source").keep(grown)  # rows go to the workers that are called with them
        assert [meta.batch_size for meta in moved.metas] == [4, 4, 4] and grown.runtime is train


def test_a_member_works_once_it_has_the_weights_and_one_that_is_not_proved_never_does() -> None:
    one, other, third = LocalMember(1), LocalMember(2), LocalMember(3)
    with pool_of(one, other, third, start=1) as pool:

        def restore(member: Any) -> None:
            if member is third:
                raise WeightSyncError("it has other weights: version 3, the engines have 4")
            member.drawer.version = 4

        pool.restored = restore
        pool.resize(2)
        assert pool.members == (one, other) and other.drawer.version == 4
        with pytest.raises(WeightSyncError, match="version 3, the engines have 4"):
            pool.resize(3)
        assert pool.members == (one, other) and not third.is_alive
        pool.resize(1)
        assert pool.members == (one,) and not other.is_alive
        assert pool.role("engine").generate(request(2)).meta.batch_size == 4
        with pytest.raises(
            ConfigError, match="the pool writers cannot be scaled to zero: it needs at least one member"
        ):
            pool.resize(0)
        with pytest.raises(ConfigError, match="has fewer devices. 4 members are asked for, it has 3 devices"):
            pool.resize(4)


def test_pools_are_scaled_by_name_and_even_ones_are_not() -> None:
    train, pool = InProcess(build_source, 1), pool_of(LocalMember(1), LocalMember(2), start=1)
    with WorkerGroups(train, {"engine": pool}, pools={"train": train, "writers": pool}) as groups:
        groups.scale({"writers": 2})
        assert pool.num_workers == 2
        with pytest.raises(ConfigError, match="painters: there are no such pools; there are train, writers"):
            groups.scale({"painters": 1})
        with pytest.raises(ConfigError, match="these workers are an even pool"):
            groups.scale({"train": 2})
        with pytest.raises(ConfigError, match="all workers of this run stand together"):
            train.scale({"train": 2})


def test_what_a_member_itself_refuses_is_raised_and_replaces_nothing() -> None:
    member = LocalMember(1)
    with pool_of(member) as pool:
        with pytest.raises(AttributeError, match="is not marked"):
            pool.role("engine").paint()
        with pytest.raises(ContractError, match="an item per shard"):
            pool.submit("engine", "generate", Dispatch.SCATTER, Collect.ALL, ([1],), {})
        with pytest.raises(ContractError, match="hold nothing between calls"):
            pool.gather([])
    assert member.num_starts == 1
    with pytest.raises(ContractError, match="the pool writers is closed"):
        pool.role("engine").plan()
    with pytest.raises(ConfigError, match="needs at least one member"):
        pool_of()


def test_a_slow_member_gets_fewer_calls() -> None:
    class Slow(LocalMember):
        may_go = threading.Event()

        def call(self, message: Ask | str) -> Any:
            if isinstance(message, Ask) and message.method == "generate":
                assert self.may_go.wait(60)
            return super().call(message)

    class Fast(LocalMember):
        def call(self, message: Ask | str) -> Any:
            answer = super().call(message)
            if self.num_asked == 7:
                Slow.may_go.set()
            return answer

    slow, fast = Slow(1), Fast(2)
    begin = time.monotonic()
    with pool_of(slow, fast, rows=2) as pool:
        assert pool.role("engine").generate(request(8)).fetch().root_track().rewards.tolist() == list(range(16))
    assert (slow.num_asked, fast.num_asked) == (1, 7) and time.monotonic() - begin < 60


def test_a_control_method_is_answered_by_all_members_while_they_are_in_a_call() -> None:
    with pool_of(LocalMember(1), LocalMember(2)) as pool:
        threading.Timer(0.2, pool.role("engine").abort).start()
        assert pool.role("engine").wait() == [True, True]


def test_a_pool_tells_how_busy_a_member_was_on_average() -> None:
    with pool_of(LocalMember(1), LocalMember(4)) as pool:  # each was busy for as many seconds as its number
        assert pool.gauges() == {"busy_s": 2.5, "members": 2.0, "restarts": 0.0}
