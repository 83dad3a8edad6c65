"""What the driver is told of roles is what their components have."""

import inspect

import pytest

from unirl.distributed.weight_sync.base import WeightSync
from unirl.reward.service import RewardService
from unirl.rollout.engine.replica.text import ReplicaTextEngine
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.stack import TrainStack
from unirl.trainer import roles
from unirl.types.roles import remote_method

PLAYED_BY: dict[type, type] = {
    roles.DiffusionEngineRole: TrainsideRolloutEngine,
    roles.ResumingEngineRole: ReplicaTextEngine,
    roles.RewardRole: RewardService,
    roles.BackendRole: FSDPBackend,
    roles.StackRole: TrainStack,
    roles.CheckpointerRole: Checkpointer,
    roles.SyncRole: WeightSync,
}


def methods_of(protocol: type) -> list[str]:
    return [name for name, item in inspect.getmembers(protocol, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("role", PLAYED_BY, ids=lambda role: role.__name__)
def test_every_method_of_a_role_is_marked_and_takes_the_same(role: type) -> None:
    names = methods_of(role)
    assert names
    for name in names:
        remote_method(PLAYED_BY[role], name)  # raises without a marker
        ours, theirs = (inspect.signature(getattr(owner, name)).parameters for owner in (role, PLAYED_BY[role]))
        described = [{key: (item.kind, item.default) for key, item in each.items()} for each in (ours, theirs)]
        assert described[0] == described[1], name
