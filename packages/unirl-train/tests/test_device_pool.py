"""Nodes of a cluster as a pool of devices, without processes: a fake stands for Ray."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from unirl.distributed.group import device_pool
from unirl.distributed.group.device_pool import DevicePool, reserved
from unirl.types.device_kinds import KINDS
from unirl.types.errors import ConfigError, WorkerError


class FakeRay:
    """A cluster whose nodes come and go by the calls of `nodes`: one list of names per call, the last one for good."""

    def __init__(
        self, *alive: str, cores: int = 2, is_granted: bool = True, others: Mapping[str, float] | None = None
    ) -> None:
        self.others = dict(others or {})
        self.alive = list(alive)
        self.cores = cores
        self.is_granted = is_granted
        self.asked: list[dict[str, Any]] = []
        self.num_removed = 0
        self.util = SimpleNamespace(placement_group=self._group, remove_placement_group=self._remove)

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "id-c")

    def nodes(self) -> list[dict[str, Any]]:
        names = self.alive.pop(0) if len(self.alive) > 1 else self.alive[0]
        return [
            {
                "NodeID": f"id-{name}",
                "NodeManagerAddress": f"10.0.0.{name}",
                "Alive": True,
                "Resources": {"CPU": self.cores, **self.others},
            }
            for name in names
        ]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.cores), **self.others}

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 0.0}

    def _group(self, bundles: list[dict[str, float]], **options: Any) -> Any:
        self.asked.append({"bundles": bundles, **options})
        return SimpleNamespace(wait=lambda timeout: self.is_granted)

    def _remove(self, group: Any) -> None:
        self.num_removed += 1


@pytest.fixture
def pool_on(monkeypatch):
    """pool_on(ray, ...) -> a pool of four devices on two nodes of a fake."""
    monkeypatch.setattr(device_pool, "_POLL_S", 0.0)

    def make(ray: FakeRay, **options: Any) -> DevicePool:
        monkeypatch.setattr(device_pool, "ray_module", lambda: ray)
        settings: dict[str, Any] = {"num_devices": 4, "num_nodes": 2, **options}
        return DevicePool(**settings)

    return make


def test_every_node_gets_its_devices_and_this_one_comes_first(pool_on) -> None:
    ray = FakeRay("abc")
    pool = pool_on(ray)
    pinned = [group["bundle_label_selector"] for group in ray.asked]
    assert pinned == [[{"ray.io/node-id": "id-c"}] * 2, [{"ray.io/node-id": "id-a"}] * 2]
    assert all(group["strategy"] == "STRICT_PACK" for group in ray.asked)
    block = pool.block("train", 1, 3)
    assert [(place.bundle, place.fraction) for place in block.places] == [(1, 1.0), (0, 1.0)]
    assert block.places[0].group is not block.places[1].group
    pool.close()
    assert ray.num_removed == 2


@pytest.mark.parametrize(("device", "resource"), [("cuda", "GPU"), ("xpu", "GPU"), ("npu", "NPU")])
def test_accelerators_are_reserved_by_the_name_that_ray_has_for_them(pool_on, device, resource) -> None:
    ray = FakeRay("ab", others={resource: 2.0})
    pool_on(ray, device=device)
    assert [group["bundles"] for group in ray.asked] == [[{"CPU": 1.0, resource: 1.0}] * 2] * 2
    with pytest.raises(ConfigError, match=rf"num_devices asks for 4 {resource}s; the Ray cluster has 2\. Lower"):
        pool_on(FakeRay("a", cores=8, others={resource: 2.0}), device=device, num_nodes=1)


def test_options_of_a_worker_name_its_part_of_a_device() -> None:
    asked = {name: reserved(KINDS[name], 0.5) for name in ("cpu", "cuda", "xpu", "npu")}
    assert asked == {
        "cpu": {},
        "cuda": {"num_gpus": 0.5},
        "xpu": {"num_gpus": 0.5},
        "npu": {"resources": {"NPU": 0.5}},
    }


def test_a_device_that_ray_cannot_reserve_is_refused(pool_on) -> None:
    with pytest.raises(ConfigError, match=r"device: mps \(Apple GPU\) has no Ray resource. Set runtime: local"):
        pool_on(FakeRay("ab"), device="mps")


def test_blocks_that_are_asked_for_together_share_devices(pool_on) -> None:
    pool = pool_on(FakeRay("ab"))
    blocks = pool.blocks({"train": range(3), "rollout": [2, 3], "reward": [2]})
    fractions = {name: [place.fraction for place in block.places] for name, block in blocks.items()}
    assert fractions == {
        "train": [1, 1, pytest.approx(1 / 3)],
        "rollout": [pytest.approx(1 / 3), 1],
        "reward": [pytest.approx(1 / 3)],
    }
    with pytest.raises(ConfigError, match=r"block late = \[3\] overlaps block rollout = \[2, 3\]"):
        pool.block("late", 3)


def test_nodes_that_join_late_are_waited_for(pool_on) -> None:
    ray = FakeRay("a", "a", "ab")
    pool_on(ray)
    assert len(ray.asked) == 2


def test_nodes_that_never_join_are_counted_with_those_that_did(pool_on) -> None:
    with pytest.raises(
        ConfigError, match=r"cluster.num_nodes = 2 nodes of 2 cpu devices did not join .*10.0.0.a with 2\."
    ):
        pool_on(FakeRay("a"), start_timeout_s=0.0)
    with pytest.raises(ConfigError, match="there are 10.0.0.a with 1, 10.0.0.b with 1"):
        pool_on(FakeRay("ab", cores=1), start_timeout_s=0.0)


def test_a_node_that_dies_before_its_devices_are_reserved_is_named(pool_on) -> None:
    ray = FakeRay("ab", "b", is_granted=False)
    with pytest.raises(WorkerError, match=r"node 10.0.0.a \(1 of 2\) died before its devices were reserved"):
        pool_on(ray)
    assert ray.num_removed == 2
