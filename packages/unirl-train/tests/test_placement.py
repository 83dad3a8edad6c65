"""Which devices each group of workers gets, and what is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.config.placement import Given, cluster_shape, devices_of, shared_devices, worker_groups
from unirl.config.schema import Cluster
from unirl.types.errors import ConfigError

ONE_ENGINE = {"engine": None, "reward": None}


def groups(
    num_devices: int, cluster: dict[str, Any] | None = None, members: dict[str, str | None] = ONE_ENGINE, **pools: Any
) -> dict[str, tuple[Any, Any]]:
    given = {name: Given(f"placement.{name}", devices) for name, devices in pools.items()}
    found = worker_groups(num_devices, Cluster(**(cluster or {})), given, members)
    return {group.name: (group.holds, group.devices) for group in found}


def test_without_a_placement_every_device_holds_everything() -> None:
    assert groups(3) == {"worker": (("train", "engine", "reward"), (0, 1, 2))}


@pytest.mark.parametrize(
    ("text", "devices"),
    [("0-3", (0, 1, 2, 3)), (5, (5,)), ("4, 5", (4, 5)), ("7,0-1", (0, 1, 7)), ("all", tuple(range(8)))],
)
def test_devices_are_ranges_numbers_or_all(text: str | int, devices: tuple[int, ...]) -> None:
    assert devices_of(text, "placement.train", cluster_shape(8, Cluster())) == devices


def test_devices_of_a_node_group_are_counted_within_it() -> None:
    shape = cluster_shape(8, Cluster(num_nodes=4, node_groups={"old": "0-1", "new": 3}))
    assert devices_of("old:all", "k", shape) == (0, 1, 2, 3)
    assert devices_of("old:1-2", "k", shape) == (1, 2)
    assert devices_of("new:0", "k", shape) == (6,)


def test_what_is_not_placed_is_with_the_engine_or_with_what_trains() -> None:
    assert groups(4, train="0-1", rollout="2-3") == {
        "train": (("train",), (0, 1)),
        "rollout": (("engine", "reward"), (2, 3)),
    }
    assert groups(4, train="0-2", reward="3") == {
        "train": (("train", "engine"), (0, 1, 2)),
        "reward": (("reward",), (3,)),
    }
    assert groups(4, train="all", rollout="0-3", reward="0-3") == {
        "train": (("train", "engine", "reward"), (0, 1, 2, 3))
    }


CHAIN = {"stages.text": "writer", "stages.image": "painter", "reward": None}


def test_stages_stand_in_the_pools_that_they_name_and_the_reward_with_the_last() -> None:
    assert groups(4, members=CHAIN, train="0-1", writer="2", painter="3") == {
        "train": (("train",), (0, 1)),
        "writer": (("stages.text",), (2,)),
        "painter": (("stages.image", "reward"), (3,)),
    }
    together = groups(4, members={**CHAIN, "reward": "judge"}, judge="3", painter="2,3", writer="2-3", train="0-1")
    assert together == {
        "train": (("train",), (0, 1)),
        "writer": (("stages.text", "stages.image"), (2, 3)),
        "judge": (("reward",), (3,)),
    }


def test_the_reward_is_with_what_trains_where_members_of_a_served_pool_hold_no_samples() -> None:
    placed = {"train": Given("a", 0), "rollout": Given("b", "1-3", is_served=True)}
    found = worker_groups(4, Cluster(), placed, ONE_ENGINE)
    assert [(group.name, group.holds, group.given.is_served) for group in found] == [
        ("train", ("train", "reward"), False),
        ("rollout", ("engine",), True),
    ]


def test_groups_that_share_some_devices_are_named_with_them() -> None:
    placed = {"train": Given("a", "0-2"), "rollout": Given("b", "2-3"), "reward": Given("c", 3)}
    found = worker_groups(4, Cluster(), placed, ONE_ENGINE)
    pairs = {(one.name, other.name): devices for one, other, devices in shared_devices(found)}
    assert pairs == {("train", "rollout"): (2,), ("rollout", "reward"): (3,)}


@given(st.integers(1, 6), st.integers(1, 9))
def test_nodes_and_their_devices_multiply_to_all(num_nodes: int, per_node: int) -> None:
    total = num_nodes * per_node
    for cluster in (
        Cluster(num_nodes=num_nodes),
        Cluster(devices_per_node=per_node),
        Cluster(num_nodes=num_nodes, devices_per_node=per_node),
    ):
        shape = cluster_shape(total, cluster)
        assert (shape.num_nodes, shape.devices_per_node, shape.num_devices) == (num_nodes, per_node, total)


def test_eight_devices_make_a_node_where_nothing_else_is_said() -> None:
    shapes = [cluster_shape(count, Cluster()) for count in (1, 7, 8, 16)]
    assert [(shape.num_nodes, shape.devices_per_node) for shape in shapes] == [(1, 1), (1, 7), (1, 8), (2, 8)]


@pytest.mark.parametrize(
    ("num_devices", "cluster", "placement", "message"),
    [
        (4, {}, {"train": "0-5"}, r"placement.train = 0-5 names device 5, but num_devices has 4 \(0 to 3\)"),
        (4, {}, {"train": "0", "rollout": ""}, r"placement.rollout = '' names no device: .* Write 0-3, 4,5 or all"),
        (4, {}, {"train": "3-1"}, "placement.train = '3-1' names no device"),
        (4, {}, {"train": "gpu0"}, "placement.train = 'gpu0' names no device"),
        (4, {}, {"rollout": "1"}, "placement.rollout is given, placement.train is not"),
        (4, {}, {"train": "big:0"}, r"no node group 'big' in cluster.node_groups \(it names none\). Add it there"),
        (4, {"num_nodes": 2, "node_groups": {"old": 0}}, {"train": "big:0"}, r"no node group 'big' .*\(old\)"),
        (4, {"num_nodes": 2, "node_groups": {"old": 0}}, {"train": "old:2"}, "names device of old 2, but .*old has 2"),
        (4, {"num_nodes": 2, "node_groups": {"old": "0-2"}}, {"train": "0"}, "node_groups.old = 0-2 names node 2, but"),
        (12, {}, {}, "num_devices = 12 does not fill 2 nodes of 8 devices. Change one of: num_devices, cluster.num_n"),
        (1, {"num_nodes": 2}, {}, "cluster.num_nodes = 2, but num_devices = 1: every node needs a device. Raise"),
        (5, {"num_nodes": 2}, {}, "num_devices = 5 does not fill 2 nodes of 2 devices"),
        (4, {"num_nodes": 2, "devices_per_node": 4}, {}, "num_devices = 4 does not fill 2 nodes of 4 devices"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(num_devices, cluster, placement, message) -> None:
    with pytest.raises(ConfigError, match=message):
        groups(num_devices, cluster, **placement)


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        (
            {"train": 0, "writer": 1},
            r"stages.image.pool = painter: there is no such pool; there are train, writer. Add",
        ),
        ({"train": 0, "writer": 1, "painter": 2, "spare": 3}, "placement.spare = 3: nothing stands in the pool spare"),
        ({"writer": 1, "painter": 2}, "placement.writer is given, placement.train is not"),
        ({}, "stages.text.pool = writer: there is no such pool; there are none"),
    ],
)
def test_pools_that_do_not_fit_their_members_are_refused(pools, message) -> None:
    with pytest.raises(ConfigError, match=message):
        groups(4, members=CHAIN, **pools)
