"""Several groups of workers as one runtime: roles are found where they are, and values follow the calls."""

import pytest
import torch
from runtime_fakes import InProcess, Source, build_source, grown, names

from unirl.distributed.groups import WorkerGroups
from unirl.distributed.worker import Usage, WorkerContext
from unirl.types.errors import ContractError


def build_engine(context: WorkerContext) -> dict[str, object]:
    return {"engine": Source(context)}


def build_reward(context: WorkerContext) -> dict[str, object]:
    return {"reward": Source(context)}


@pytest.fixture
def groups():
    closed: list[str] = []
    train, rollout, reward = InProcess(build_source, 3), InProcess(build_engine, 2), InProcess(build_reward, 1)
    with WorkerGroups(train, {"engine": rollout, "reward": reward}, on_close=lambda: closed.append("pool")) as groups:
        yield groups
    assert closed == ["pool"]


def test_roles_are_found_with_the_workers_that_hold_them(groups) -> None:
    sizes = {name: len(groups.role(name).where()) for name in ("source", "engine", "reward")}
    assert sizes == {"source": 3, "engine": 2, "reward": 1}
    assert groups.has_role("engine") and not groups.has_role("sync")
    assert groups.num_shards == 6 and groups.num_workers == 3


def test_a_value_moves_to_the_workers_that_are_called_with_it(groups) -> None:
    resp = grown(names("a", 6))
    held = groups.role("engine").keep(resp)
    assert len(held.metas) == 2
    held.attach("text", advantages=torch.arange(6.0))
    assert groups.role("reward").echo(held).batch_size == 6
    assert len(held.metas) == 1
    assert groups.role("source").echo(held).equals(resp.with_values("text", advantages=torch.arange(6.0)))
    assert [meta.batch_size for meta in held.metas] == [2, 2, 2]
    assert groups.num_held() == 1
    held.release()
    assert groups.num_held() == 0


def test_what_is_gathered_lies_with_the_workers_that_train(groups) -> None:
    fresh, scored = groups.role("engine").keep(grown(names("a", 4))), groups.hold(grown(names("b", 3)))
    with groups.gather([(scored, [2]), (fresh, [0, 3])]) as chosen:
        assert chosen.meta.root_track().sample_ids == ["b2", "a0", "a3"]
        assert len(chosen.metas) == 3
    fresh.release()
    scored.release()
    assert groups.num_held() == 0


def test_a_value_that_does_not_divide_stays_where_it_is(groups) -> None:
    held = groups.role("engine").keep(grown(names("a", 4)))
    with pytest.raises(ContractError, match="4 samples, which do not divide over 3 devices"):
        groups.role("source").echo(held)
    assert groups.role("engine").echo(held).batch_size == 4


class Mortal(InProcess):
    """Workers that answer nothing once they are stopped, as processes."""

    def usage(self) -> Usage:
        if self.is_closed:
            raise ContractError("this runtime is closed")
        return super().usage()

    def close(self) -> None:
        self._is_closed = True


def test_resources_of_a_group_that_died_are_those_that_it_said_last() -> None:
    train, reward = Mortal(build_source, 1), Mortal(build_reward, 1)
    with WorkerGroups(train, {"reward": reward}) as groups:
        before = groups.usage()
        reward.close()
        assert not groups.is_closed and groups.usage().cpu_s >= before.cpu_s > train.usage().cpu_s


def test_a_group_without_its_role_is_refused() -> None:
    with pytest.raises(ContractError, match=r"should hold 'engine' have \['reward'\]"):
        WorkerGroups(InProcess(build_source, 1), {"engine": InProcess(build_reward, 1)})


class Watched(InProcess):
    """Workers that say what they did."""

    def gauges(self) -> dict[str, float]:
        return {"busy_s": float(self.num_workers)}


def test_what_pools_did_has_their_names() -> None:
    train, rollout = Watched(build_source, 1), Watched(build_engine, 2)
    with WorkerGroups(train, {"engine": rollout}, pools={"train": train, "writer": rollout}) as groups:
        assert groups.pool_metrics() == {"perf/pool/train/busy_s": 1.0, "perf/pool/writer/busy_s": 2.0}
    assert train.pool_metrics() == {}
