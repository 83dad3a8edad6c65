"""The queue of one reward: batches, retries, restarts, cancellation, rest."""

import asyncio
import dataclasses
import functools

import pytest

from unirl.reward_server import job_queue
from unirl.reward_server.pool import QueueFull
from unirl.reward_server.replica import ReplicaDied, ReplicaFailed

from .fakes import FakeReplica, Maker, pool_of, sample, until


def in_loop(test):
    """Run an async test, at most two minutes."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 120))

    return run


async def held(make):
    """The first replica, ready, holding what it is asked."""
    await until(lambda: make.made)
    make.made[0].may_score.clear()
    return make.made[0]


@in_loop
async def test_samples_of_several_requests_share_batches_in_order_and_answers_find_their_samples():
    make = Maker()
    pool = pool_of(make)
    pool.start()
    replica = await held(make)
    first = pool.submit([sample("blocker")])
    await replica.asked.wait()
    many = [pool.submit([sample(f"{i}{j}", value=10 * i + j) for j in range(3)]) for i in range(3)]
    replica.may_score.set()
    found = [await future for futures in many for future in futures]
    assert replica.batches == [["blocker"], ["00", "01", "02", "10"], ["11", "12", "20", "21"], ["22"]]
    assert [item["reward"] for item in found] == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert (await first[0])["reward"] == 7 and pool.num_waiting == 0
    await pool.close()
    assert replica.is_stopped and [slot.state for slot in pool.slots] == ["stopped"]


def grouped(names, group):
    return [dataclasses.replace(sample(name), group_id=group) for name in names]


def comparing():
    replica = FakeReplica(batch_size=2)
    replica.card["is_groupwise"] = True
    return replica


@in_loop
async def test_samples_that_are_compared_arrive_as_whole_groups():
    make = Maker(comparing())
    pool = pool_of(make)
    pool.start()
    replica = await held(make)
    blocker = pool.submit(grouped(["blocker"], "g"))
    await replica.asked.wait()
    mixed = [
        each
        for pair in zip(grouped(["a1", "a2", "a3"], "g"), grouped(["b1", "b2", "b3"], "h"), strict=True)
        for each in pair
    ]
    futures = [*pool.submit(mixed), *pool.submit(grouped(["c1", "c2"], "g"))]
    assert pool.num_waiting == 8
    replica.may_score.set()
    await asyncio.gather(*futures, *blocker)
    assert replica.batches[1:] == [["a1", "a2", "a3"], ["b1", "b2", "b3"], ["c1", "c2"]]
    assert pool.num_waiting == 0
    await pool.close()


@in_loop
async def test_a_group_whose_replica_dies_is_tried_again_whole():
    make = Maker(comparing(), comparing())
    pool = pool_of(make)
    pool.start()
    replica = await held(make)
    futures = [*pool.submit(grouped(["a1", "a2", "a3"], "g")), *pool.submit(grouped(["b1", "b2"], "g"))]
    await replica.asked.wait()
    replica.ended.set()
    found = await asyncio.gather(*futures)
    assert make.made[1].batches == [["a1", "a2", "a3"], ["b1", "b2"]]
    assert [item["reward"] for item in found] == [7] * 5
    await pool.close()


@in_loop
async def test_samples_of_different_sizes_are_not_mixed_and_none_starves():
    make = Maker()
    pool = pool_of(make)
    pool.start()
    replica = await held(make)
    blocker = pool.submit([sample("blocker")])
    await replica.asked.wait()
    futures = pool.submit([sample("a1"), sample("b1", size=3), sample("a2"), sample("b2", size=3)])
    replica.may_score.set()
    await asyncio.gather(*futures, *blocker)
    assert replica.batches[1:] == [["a1", "a2"], ["b1", "b2"]]
    await pool.close()


@in_loop
async def test_large_samples_make_smaller_batches(monkeypatch):
    monkeypatch.setattr(job_queue, "_MAX_BATCH_BYTES", 30)
    make = Maker()
    pool = pool_of(make)
    pool.start()
    replica = await held(make)
    blocker = pool.submit([sample("blocker")])
    await replica.asked.wait()
    futures = pool.submit([sample(name) for name in "abc"] + [sample("large", size=9)])
    replica.may_score.set()
    await asyncio.gather(*futures, *blocker)
    assert replica.batches[1:] == [["a", "b"], ["c"], ["large"]]
    await pool.close()


@in_loop
async def test_a_partial_batch_waits_for_others_until_it_is_full():
    make = Maker()
    pool = pool_of(make, max_wait_ms=20_000)
    pool.start()
    waiting = pool.submit([sample(i) for i in range(3)])
    await until(lambda: make.made and pool.slots[0].state == "ready")
    assert not make.made[0].batches
    waiting += pool.submit([sample(3)])
    await asyncio.gather(*waiting)
    assert make.made[0].batches == [["0", "1", "2", "3"]]
    late = pool.submit([sample(4)])
    late[0].cancel()
    await pool.close()


@in_loop
async def test_a_replica_that_dies_loses_nothing_and_its_samples_are_retried_alone_once():
    make = Maker()
    pool = pool_of(make, num_replicas=2)
    pool.start()
    await until(lambda: len(make.made) == 2)
    for replica in make.made:
        replica.may_score.clear()
    futures = pool.submit([sample(i, value=i) for i in range(8)])
    victim, other = make.made
    await victim.asked.wait()
    await other.asked.wait()
    assert len(victim.batches[0]) == 4
    victim.ended.set()
    await until(lambda: len(make.made) == 3)
    other.may_score.set()
    assert [(await future)["reward"] for future in futures] == list(range(8))
    again = [batch for replica in make.made[1:] for batch in replica.batches if set(batch) & set(victim.batches[0])]
    assert sorted(again) == [[name] for name in sorted(victim.batches[0])]
    assert pool.slots[0].num_restarts == 1
    await pool.close()


@in_loop
async def test_a_sample_that_kills_two_replicas_fails_and_its_neighbour_is_scored():
    class Fragile(FakeReplica):
        async def score(self, samples):
            if any(each.prompt == "poison" for each in samples):
                self.ended.set()
            return await super().score(samples)

    make = Maker(*(Fragile() for _ in range(5)))
    pool = pool_of(make)
    pool.start()
    poison, good = pool.submit([sample("bad", prompt="poison"), sample("good")])
    assert await poison == "two replicas ended while they scored this sample"
    assert (await good)["reward"] == 7
    await pool.close()


@in_loop
async def test_cancelled_samples_leave_the_queue_and_work_that_nobody_waits_for_is_cancelled():
    make = Maker()
    pool = pool_of(make, max_queue=4)
    pool.start()
    replica = await held(make)
    working = pool.submit([sample("a"), sample("b")])
    await replica.asked.wait()
    waiting = pool.submit([sample(i) for i in range(4)])
    with pytest.raises(QueueFull, match="4 samples are waiting and 1 more do not fit into max_queue = 4") as full:
        pool.check_room(1)
    assert 1 <= full.value.retry_after_s <= 60
    for future in waiting:
        future.cancel()
    pool.forget()
    assert pool.num_waiting == 0
    pool.check_room(4)
    working[0].cancel()
    await asyncio.sleep(0)
    assert replica.cancelled == 0  # the other sample of the batch is still wanted
    working[1].cancel()
    await until(lambda: replica.cancelled == 1)
    replica.may_score.set()
    [after] = pool.submit([sample("after")])
    assert (await after)["reward"] == 7 and replica.batches == [["a", "b"], ["after"]] and not replica.is_stopped
    await pool.close()


@in_loop
async def test_a_batch_that_hangs_fails_at_the_deadline_and_its_replica_is_replaced():
    make = Maker()
    pool = pool_of(make, timeout_s=0.05)
    pool.start()
    replica = await held(make)
    [stuck] = pool.submit([sample("a")])
    assert await stuck == "not scored within 0.05 s"
    await until(lambda: len(make.made) == 2)
    assert replica.is_stopped and "took longer" in str(pool.metrics._owner.problems[-1])
    pool.score_timeout_s = 60.0  # the next one hangs no more
    [after] = pool.submit([sample("b")])
    assert (await after)["reward"] == 7
    await pool.close()


@in_loop
async def test_a_replica_that_cannot_start_is_tried_again_and_the_samples_wait():
    make = Maker(FakeReplica(fails=ReplicaDied("exit 1")), FakeReplica(fails=ReplicaFailed("no memory", False)))
    pool = pool_of(make)
    pool.start()
    [found] = pool.submit([sample("a")])
    assert (await found)["reward"] == 7 and len(make.made) == 3 and not pool.failure.done()
    await pool.close()


@in_loop
async def test_a_scorer_that_can_never_be_built_answers_who_waits_and_reports_the_failure():
    make = Maker(*(FakeReplica(fails=ReplicaFailed("ConfigError: no such folder", True)) for _ in range(99)))
    pool = pool_of(make, load="demand")
    pool.start()
    assert pool.is_ready and not make.made
    [found] = pool.submit([sample("a")])
    assert await found == "its scorer cannot be loaded: ConfigError: no such folder"
    assert await pool.failure == "reward r: ConfigError: no such folder" and len(make.made) == 1
    await until(lambda: pool.slots[0].state == "offloaded")
    [again] = pool.submit([sample("b")])
    assert "cannot be loaded" in await again and len(make.made) == 2
    await pool.close()


@in_loop
async def test_replicas_load_on_demand_and_stop_when_idle():
    make = Maker()
    pool = pool_of(make, load="demand", idle_stop_s=0.05)
    pool.start()
    await asyncio.sleep(0)
    assert not make.made and pool.slots[0].state == "offloaded"
    for round_ in (1, 2):
        [found] = pool.submit([sample("a")])
        assert (await found)["reward"] == 7 and len(make.made) == round_
        await until(lambda: pool.slots[0].state == "offloaded")
        assert make.made[-1].is_stopped and pool.slots[0].num_restarts == 0
    await pool.close()


@in_loop
async def test_a_replica_works_on_as_many_batches_at_a_time_as_it_may():
    make = Maker()
    pool = pool_of(make, max_concurrency=3, max_batch=1)
    pool.start()
    replica = await held(make)
    futures = pool.submit([sample(i) for i in range(5)])
    await until(lambda: len(replica.batches) == 3)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(replica.batches) == 3 and pool.num_waiting == 2
    replica.may_score.set()
    await asyncio.gather(*futures)
    await pool.close()


@in_loop
async def test_closing_answers_everybody():
    make = Maker()
    pool = pool_of(make)
    pool.start()
    replica = await held(make)
    futures = pool.submit([sample(i) for i in range(6)])
    await replica.asked.wait()
    await pool.close()
    assert [future.result() for future in futures] == ["the server is stopping"] * 6
