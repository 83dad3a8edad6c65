"""Pools without devices: members that die or hang are replaced, counted and scaled, in this process and on Ray."""

import dataclasses
import functools
import importlib
import time

import pytest

from unirl.distributed.pools.hosting import HostedPool, LocalHosting
from unirl.types.errors import ConfigError, WorkerError

hosted = importlib.import_module("hosted")


class Dying(LocalHosting):
    """Ends before it can be asked, as often as `deaths` says."""

    deaths = 0

    def is_ready(self, timeout_s):
        if Dying.deaths:
            Dying.deaths -= 1
            raise WorkerError(self.name, "it died")
        return super().is_ready(timeout_s)


def local(num_members):
    return HostedPool("env", lambda _, key: Dying(key, hosted.Hosted), num_members)


def test_members_join_leave_and_are_counted():
    pool = local(2)
    pool.require_ready()
    assert pool.gauges() == {"busy_s": 2.0, "process_restarts": 2.0, "members": 2.0, "restarts": 0.0}
    pool.resize(3)
    assert [member.key for member in pool.members()] == ["env-0.0", "env-1.0", "env-2.0"]
    pool.resize(1)
    pool.resize(2)
    assert [member.key for member in pool.members()] == ["env-0.0", "env-1.1"], "no key comes twice"
    with pytest.raises(ConfigError, match="the pool env cannot be scaled to zero"):
        pool.resize(0)
    pool.close()


def test_a_lost_member_is_replaced_once():
    pool = local(2)
    lost = pool.members()[1]
    for _ in range(2):
        pool.lost(lost, "it died")
    assert [member.key for member in pool.members()] == ["env-0.0", "env-1.1"]
    assert pool.num_restarts == 1
    pool.close()


def test_a_member_that_cannot_start_is_not_tried_without_end():
    Dying.deaths = 2
    pool = local(1)
    pool.require_ready()
    assert pool.num_restarts == 2
    pool.close()
    Dying.deaths = 3
    with pytest.raises(WorkerError, match="it died"):
        local(1).require_ready()


def impatient(member):
    return dataclasses.replace(member, silent_s=1.0)


@pytest.mark.ray
@pytest.mark.matrix
def test_actors_die_hang_and_refuse_and_others_replace_them(ray_of_two_cores, tmp_path):
    from unirl.distributed.group.ray_hosting import HostingPlan, RayHostedPool

    broken = tmp_path / "broken"
    plan = HostingPlan("env", functools.partial(hosted.Hosted, str(broken)), num_members=1)
    pool = RayHostedPool.started(plan, [], 60.0)
    (first,) = pool.members()
    pid = first.start("where")()
    with pytest.raises(ConfigError, match="no such thing"):
        first.start("refuse")()
    slow = impatient(first)
    slow.start("sleep", 1.5)()  # it answers meanwhile, so it is waited for
    with pytest.raises(WorkerError, match="env-0.0 failed:\nthe process died"):
        first.start("die")()
    pool.lost(first, "it died")
    (second,) = pool.members()
    assert second.name == "env-0.1" and second.start("where")() != pid
    silent = impatient(second)
    silent.start("stop")
    with pytest.raises(WorkerError, match="where: no sign of life for 1 s"):
        time.sleep(0.5)
        silent.start("where")()
    pool.lost(second, "it hangs")
    pool.resize(2)
    assert {member.name for member in pool.members()} <= {"env-0.2", "env-1.0"}
    assert pool.gauges() | {"members": 2.0, "restarts": 2.0} == pool.gauges()
    pool.close()
    broken.touch()
    with pytest.raises(WorkerError, match="it is broken"):
        RayHostedPool.started(plan, [], 60.0)
