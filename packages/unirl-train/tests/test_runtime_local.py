"""The runtime contract on one local worker, and the parts of the Ray runtime that need no Ray."""

import pickle
import threading

import pytest
import torch
from runtime_fakes import build, build_hanging, numbered

from unirl.distributed.group.device_pool import DevicePool
from unirl.distributed.runtime import LocalRuntime
from unirl.distributed.tensor.transport import outgoing
from unirl.types.errors import ConfigError, ContractError
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutTrack


@pytest.fixture
def runtime():
    with LocalRuntime(build) as runtime:
        yield runtime


def test_an_unknown_role_lists_the_roles(runtime) -> None:
    assert runtime.has_role("sink")
    assert not runtime.has_role("engine")
    with pytest.raises(
        ConfigError, match=r"no component is called 'engine'; there are \['sink', 'source', 'trainee'\]"
    ):
        runtime.role("engine")


def test_leaving_a_runtime_closes_the_components_that_hold_something() -> None:
    class Holds:
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    holds = Holds()
    with LocalRuntime(lambda context: {"holds": holds, "plain": object()}):
        assert not holds.is_closed
    assert holds.is_closed


def test_an_unmarked_method_cannot_be_called(runtime) -> None:
    with pytest.raises(AttributeError, match="Source.private is not marked"):
        runtime.role("source").private()
    with pytest.raises(AttributeError, match="Source.absent is not marked"):
        runtime.role("source").absent()


def test_a_held_value_reaches_another_role_without_a_copy(runtime) -> None:
    held = runtime.role("source").make(numbered(["1", "2"]), 2.0)
    assert held.meta.tracks["image"].sample_ids == ["1", "2"]
    assert runtime.role("sink").is_same_object(held) == [True]
    assert held.fetch() is runtime.component("source").made[-1]


def test_a_held_value_is_written_and_read_as_another_one(runtime, tmp_path) -> None:
    with runtime.role("source").make(numbered(["1", "2"]), 2.0) as held:
        held.write(tmp_path, "some")
        with runtime.read([tmp_path / "some-00000.safetensors"]) as found:
            assert found.fetch().equals(held.fetch()) and found.meta.equals(held.meta)
            assert found.fetch() is not held.fetch()


def test_a_released_value_is_refused_by_name(runtime) -> None:
    with runtime.role("source").make(numbered(["1"]), 1.0) as held:
        assert runtime.num_held() == 1
    assert runtime.num_held() == 0
    held.release()
    for use in (lambda: runtime.role("sink").is_same_object(held), held.fetch, lambda: held.map(len)):
        with pytest.raises(ContractError, match="held value 0 was released before it was used"):
            use()


def test_a_held_value_of_other_workers_is_refused(runtime) -> None:
    held = LocalRuntime(build).role("source").make(numbered(["1"]), 1.0)
    with pytest.raises(ContractError, match="is held by other workers"):
        runtime.role("sink").is_same_object(held)


def test_a_held_value_inside_a_list_is_refused_when_it_would_travel(runtime) -> None:
    held = runtime.role("source").make(numbered(["1"]), 1.0)
    with pytest.raises(ContractError, match="direct argument"):
        pickle.dumps([held])


def test_a_method_that_holds_returns_something_with_metadata(runtime) -> None:
    with pytest.raises(ContractError, match="source.where is collected by HOLD but returned a tuple"):
        runtime.submit("source", "where", Dispatch.BROADCAST, Collect.HOLD, (), {}).result()
    with pytest.raises(ContractError, match="RANK_ZERO makes it on one"):
        runtime.submit("source", "where", Dispatch.RANK_ZERO, Collect.HOLD, (), {}).result()


def test_what_leaves_a_process_takes_only_its_own_storage() -> None:
    whole = torch.arange(1000.0, requires_grad=True)
    sent = outgoing({"a": [whole[10:12]], "b": (3, None), "c": RolloutTrack(sample_ids=["x"], rewards=whole[:1])})
    assert sent["a"][0].untyped_storage().nbytes() == 8
    assert not sent["a"][0].requires_grad
    assert sent["b"] == (3, None)
    assert sent["c"].rewards.untyped_storage().nbytes() == 4
    plain = torch.zeros(3)
    assert outgoing(plain).data_ptr() == plain.data_ptr()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_devices": 2, "device": "tpu"}, "device is 'tpu'"),
        ({"num_devices": 0}, "num_devices = 0"),
        ({"num_devices": 3, "num_nodes": 2}, "num_devices = 3 and cluster.num_nodes = 2 .* devices must divide"),
        ({"num_devices": 1, "address": "127.0.0.1:1"}, "no Ray answers at 127.0.0.1:1 .*refused.* Start Ray there"),
        ({"num_devices": 1, "address": "ray"}, "cluster.address = 'ray' must be auto, local or host:port"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_before_anything_starts(asked, message) -> None:
    with pytest.raises(ConfigError, match=message):
        DevicePool(**asked)


def test_a_control_method_is_answered_in_the_thread_that_calls_it_while_another_call_runs():
    with LocalRuntime(build_hanging) as runtime:
        threading.Timer(0.2, runtime.role("source").tell).start()
        assert runtime.role("source").wait_until_told() == [True]


def test_a_control_method_reaches_every_worker():
    with pytest.raises(ContractError, match="mark it BROADCAST, not RANK_ZERO"):
        distributed(Dispatch.RANK_ZERO, is_control=True)
