"""Every transport of a push, to engines in threads: what arrives, what travels, and what each fault says."""

import copy
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pushed_weights import CopyEngine, EnginesInThreads, make_sync, make_training, nudge, train

from unirl.distributed.weight_sync.full import FullWeightSync
from unirl.distributed.weight_sync.lora import LoraWeightSync
from unirl.distributed.weight_sync.transports import broadcast
from unirl.distributed.weight_sync.transports.base import ObjectParcel, Parcel
from unirl.distributed.weight_sync.transports.broadcast import BroadcastParcel
from unirl.distributed.weight_sync.transports.files import FileParcel
from unirl.train.configs import LoraConfig
from unirl.types.errors import ConfigError, WeightSyncError, WorkerError
from unirl.types.weights import tensor_checksum

TRANSPORTS = ("ray", "files", "ipc", "nccl")
LORA = LoraConfig(rank=2, alpha=4)
NUM_ELEMENTS = 4 * (8 * 8 + 8)
"""Elements of the small model."""


@pytest.fixture
def connected(tmp_path):
    """connected(transport, engines, ...) -> backend, sync, role: small buckets, so that several are on their way."""

    def make(transport, *engines, kind=FullWeightSync, training=None, times={}, **own) -> Any:  # noqa: B006
        trained = training or make_training()
        options: dict[str, Any] = {"transfer_dir": str(tmp_path), **own}
        if kind is FullWeightSync:
            options.setdefault("bucket_bytes", 400)
        sync = make_sync(trained, transport, kind=kind, canary_tolerance=1e-6, **options)
        role: Any = EnginesInThreads(*engines, **times)
        sync.connect_elsewhere(role)
        return trained[1], sync, role

    return make


def checksums(tensors):
    return {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_whole_weights_arrive_byte_for_byte_push_after_push(connected, transport):
    engines = CopyEngine(), CopyEngine()
    backend, sync, _ = connected(transport, *engines)
    for version in range(3):
        metrics = sync.push()
        expected = checksums(dict(backend.weight_source.weights()))
        assert [engine.checksums() for engine in engines] == [expected, expected]
        assert [engine.policy_version for engine in engines] == [version, version]
        assert metrics["sync/logprob_gap_max"] == 0
        train(backend)


@pytest.mark.parametrize(("lone_bytes", "run_bytes"), [(1, 64), (200, 100), (200, 1000), (1000, 50)])
def test_pieces_are_broadcast_from_where_they_lie_or_joined(connected, monkeypatch, lone_bytes, run_bytes):
    monkeypatch.setattr(broadcast, "_LONE_BYTES", lone_bytes)
    monkeypatch.setattr(broadcast, "_RUN_BYTES", run_bytes)
    engine = CopyEngine()
    backend, sync, _ = connected("nccl", engine, bucket_bytes=1000)
    for _ in range(2):
        sync.push()
        assert engine.checksums() == checksums(dict(backend.weight_source.weights()))
        train(backend)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_adapters_travel_merged_or_alone(connected, transport):
    engine = CopyEngine()
    backend, sync, _ = connected(transport, engine, training=make_training(lora=LORA))
    sync.push()
    assert engine.checksums() == checksums(dict(backend.weight_source.weights()))
    # An engine that has the base weights takes the adapter alone.
    alone = CopyEngine(seed=4)
    backend, sync, role = connected(transport, alone, kind=LoraWeightSync, training=make_training(seed=4, lora=LORA))
    assert sync.push()["sync/logprob_gap_max"] <= 1e-6
    sent = backend.weight_source.adapter_weights()
    assert role.num_bytes == sum(4 * tensor.numel() for tensor in sent.values())
    factors = {id(adapted): adapted.factors for adapted in alone._weights._adapted}
    assert len(factors) == len(sent) // 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_named_policy_and_both_components_arrive(connected, transport):
    engine = CopyEngine(num_components=2)
    backend, sync, _ = connected(transport, engine, training=make_training(num_components=2))
    backend.keep_policy("old")
    expected = checksums(copy.deepcopy(dict(backend.weight_source.weights())))
    train(backend)
    sync.push("old")
    assert engine.checksums() == expected
    assert {name.partition("/")[0] for name in expected} == {"transformer", "transformer_2"}
    sync.push()
    assert engine.checksums() == checksums(dict(backend.weight_source.weights())) != expected


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_only_what_changed_travels_and_the_engine_is_as_after_a_whole_push(connected, transport):
    engine, other = CopyEngine(), CopyEngine()
    training = make_training(lora=LORA)
    backend, sync, role = connected(transport, engine, training=training, changed="tensors")
    _, whole, _ = connected("ray", other, training=training)
    everything = sync.push()["sync/megabytes"]
    train(backend)
    before = role.num_bytes
    metrics = sync.push()
    whole.push()
    changed = 3 * 4 * 8 * 8  # the weights of three adapted layers
    assert (role.num_bytes - before, metrics["sync/megabytes"]) == (changed, changed / 1e6)
    assert changed / 1e6 < everything
    assert metrics["sync/tensors"] == len(backend.weight_source.weight_shapes())
    assert engine.checksums() == other.checksums() == checksums(dict(backend.weight_source.weights()))
    assert sync.push()["sync/megabytes"] == 0  # nothing is new, and it is verified all the same


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_changed_elements_travel_alone_and_the_engines_are_as_after_a_whole_push(connected, transport):
    engines = CopyEngine(), CopyEngine()
    backend, sync, role = connected(transport, *engines, changed="elements")
    everything = sync.push()
    assert everything["sync/changed_elements"] == 1
    backend.keep_policy("old")
    before = role.num_bytes
    for policy in (None, "old", None):
        nudge(backend)
        metrics = sync.push(policy)
        expected = checksums(dict(backend.weight_source.weights(policy)))
        assert [engine.checksums() for engine in engines] == [expected, expected]
        assert metrics["sync/tensors"] == everything["sync/tensors"] == len(expected)
        assert 0.2 <= metrics["sync/changed_elements"] < 0.25  # every fifth, rounded up in each tensor
        sent, before = role.num_bytes - before, role.num_bytes
        # A byte per tensor, a bit per element, and a float for each that changed.
        assert sent == metrics["sync/megabytes"] * 1e6 == len(expected) + NUM_ELEMENTS / 8 + 4 * num_changed(metrics)
    assert sync.push()["sync/megabytes"] == 0
    train(backend)  # all of them
    assert sync.push()["sync/megabytes"] == everything["sync/megabytes"]


def num_changed(metrics):
    return round(metrics["sync/changed_elements"] * NUM_ELEMENTS)


@pytest.mark.parametrize("changed", ["all", "tensors", "elements"])
@pytest.mark.parametrize("transport", ["files", "ipc"])
def test_an_engines_processes_may_keep_the_files_of_pushes_that_bring_all_alone(connected, transport, changed):
    class Keeping(CopyEngine):
        files: ClassVar = []

        def receive_weights(self, bucket):
            self.files.append(bucket.file)
            super().receive_weights(bucket)

    backend, sync, _ = connected(transport, Keeping(), changed=changed)
    for _ in range(2):
        sync.push()
        nudge(backend)
    assert Keeping.files and all((file is not None) == (changed == "all") for file in Keeping.files)


@pytest.mark.parametrize("changed", ["tensors", "elements"])
def test_an_engine_with_another_version_refuses_what_changed_and_is_then_sent_all(connected, changed):
    engine = CopyEngine()
    training = make_training()
    backend, sync, _ = connected("ray", engine, training=training, changed=changed)
    _, other, _ = connected("ray", engine, training=training)
    sync.push()
    nudge(backend)
    other.push()
    kept = engine.checksums()
    nudge(backend)
    with pytest.raises(WeightSyncError, match="changed since version 0, but the engine has version 1; push again"):
        sync.push()
    assert engine.checksums() == kept and engine.policy_version == 1
    everything = sync.push()
    assert everything["sync/megabytes"] * 1e6 == 4 * NUM_ELEMENTS
    assert engine.checksums() == checksums(dict(backend.weight_source.weights()))


class Wrong(CopyEngine):
    """Its samples are not of its weights while it is `is_wrong`."""

    is_wrong = False

    def generate(self, req, policy=None):
        resp = super().generate(req, policy)
        if self.is_wrong:
            resp.tracks["text"].segment.log_probs.add_(1)
        return resp


def test_a_push_that_the_canary_does_not_pass_is_no_base_of_the_next(connected):
    engine = Wrong()
    backend, sync, _ = connected("ray", engine, changed="elements")
    everything = sync.push()["sync/megabytes"]
    nudge(backend)
    engine.is_wrong = True
    with pytest.raises(WeightSyncError, match="does not have the trainer's policy of version 1"):
        sync.push()
    engine.is_wrong = False
    assert sync.push()["sync/megabytes"] == everything


@pytest.mark.parametrize("damage", ["checksum", "gap", "value"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_changed_elements_that_arrive_changed_are_refused_and_all_is_sent_next(connected, transport, damage):
    engine = CopyEngine()
    backend, sync, role = connected(transport, engine, changed="elements")
    everything = sync.push()["sync/megabytes"]
    kept = engine.checksums()
    nudge(backend)
    receive = engine.receive_weights

    def receive_damaged(bucket):
        first, *others = bucket.kept
        if damage == "checksum":
            bucket = replace(bucket, kept=(replace(first, checksum="0" * 32), *others))
        else:
            delta = bucket.tensors[first.name].clone()
            delta[1 if damage == "gap" else -1] ^= 128
            bucket = replace(bucket, tensors={**bucket.tensors, first.name: delta})
        receive(bucket)

    engine.receive_weights = receive_damaged
    with pytest.raises(WeightSyncError, match=r"arrived changed: .* are no delta|does not have what was left out"):
        sync.push()
    assert engine.checksums() == kept
    engine.receive_weights = receive
    assert sync.push()["sync/megabytes"] == everything
    assert engine.checksums() == checksums(dict(backend.weight_source.weights()))


def test_an_engine_that_lost_what_it_had_refuses_and_is_then_sent_all(connected):
    engine = CopyEngine()
    backend, sync, _ = connected("ray", engine, changed="tensors")
    sync.push()
    with torch.no_grad():
        engine.models["transformer"].get_parameter("proj_in.bias").add_(1e-3)
    with pytest.raises(WeightSyncError, match=r"does not have what was left out .*\n  changed: proj_in.bias"):
        sync.push()
    assert sync.push()["sync/megabytes"] > 0
    assert engine.checksums() == checksums(dict(backend.weight_source.weights()))


# Faults: one message each, and the next push heals


def tampered(parcel):
    """The parcel with a checksum that is not that of its tensors."""
    if isinstance(parcel, ObjectParcel | FileParcel):
        return replace(parcel, head=misdescribed(parcel.head))
    return replace(parcel, bucket=replace(parcel.bucket, head=misdescribed(parcel.bucket.head)))


def misdescribed(bucket):
    first, *others = bucket.specs
    return replace(bucket, specs=(replace(first, checksum="0" * 32), *others))


def is_parcel(value):
    return isinstance(value, Parcel)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_bucket_that_arrives_changed_at_one_engine_stops_the_push_and_the_next_heals(connected, transport):
    engines = CopyEngine(), CopyEngine()
    kept = engines[0].checksums()
    backend, sync, role = connected(transport, *engines)
    role.spoil = lambda number, value: tampered(value) if number == 1 and is_parcel(value) else value
    with pytest.raises(WeightSyncError, match="weights arrived changed: expected WeightSpec"):
        sync.push()
    assert engines[1].checksums() == kept
    role.spoil = lambda number, value: value
    sync.push()
    assert engines[1].checksums() == checksums(dict(backend.weight_source.weights()))


class Forgetful(CopyEngine):
    """Loses the first bucket of a push."""

    has_lost = False

    def receive_weights(self, bucket):
        if self.has_lost:
            super().receive_weights(bucket)
        self.has_lost = True


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_half_a_push_is_refused_and_the_engine_keeps_its_policy(connected, transport):
    engine = Forgetful()
    kept = engine.checksums()
    backend, sync, _ = connected(transport, engine)
    with pytest.raises(WeightSyncError, match=r"announced tensors did not arrive \(2\):\n  missing: proj_in.bias"):
        sync.push()
    assert engine.checksums() == kept
    sync.push()
    assert engine.checksums() == checksums(dict(backend.weight_source.weights()))


class Dying(CopyEngine):
    """Ends in its first bucket, as a process does that is killed."""

    is_dead = False

    def receive_weights(self, bucket):
        self.is_dead = True
        raise WorkerError("rollout-1", "the process died")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_dies_is_named(connected, transport):
    _, sync, _ = connected(transport, CopyEngine(), Dying())
    with pytest.raises(WorkerError, match=r"rollout-1 failed:\nthe process died"):
        sync.push()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_hangs_is_named_after_the_timeout(connected, transport):
    is_over = threading.Event()

    class Hanging(CopyEngine):
        def receive_weights(self, bucket):
            assert is_over.wait(60)

    _, sync, _ = connected(transport, CopyEngine(), Hanging(), times={"timeouts_s": {"receive_weights": 0.3}})
    with pytest.raises(WorkerError, match=r"rollout-1 failed:\nno answer to receive_weights within 0.3 s"):
        sync.push()
    is_over.set()


def test_an_engine_that_never_joins_the_broadcast_is_named(connected):
    _, sync, role = connected("nccl", CopyEngine(), CopyEngine(), times={"timeout_s": 2.0})
    role.timeout_s = 120.0  # of calls; the transport has the other

    def gone(number, value):
        if number == 1 and isinstance(value, BroadcastParcel):
            raise WorkerError("rollout-1", "the process died")
        return value

    role.spoil = gone
    with pytest.raises(WorkerError, match="rollout-1 failed"):
        sync.push()
    role.wait_until_idle()  # the other engine waits for the group no longer than the timeout
    role.spoil = lambda number, value: value
    sync._engine._transport._timeout_s = 120.0
    sync.push()  # a new group forms


def test_a_folder_that_an_engine_does_not_see_is_told(connected, tmp_path):
    _, sync, role = connected("files", CopyEngine())
    role.spoil = lambda number, value: (
        replace(value, path="/nowhere/bucket.safetensors") if isinstance(value, FileParcel) else value
    )
    with pytest.raises(WeightSyncError, match=r"cannot be read from /nowhere/bucket.* Set sync.transfer_dir"):
        sync.push()
    role.spoil = lambda number, value: value
    sync.push()
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {f"bucket-{number}.safetensors" for number in range(4)}  # written over by every push
    sync.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="sync.transfer_dir = '/nowhere' is no folder"):
        connected("files", CopyEngine(), transfer_dir="/nowhere")


def test_a_file_that_lost_its_end_is_refused(connected, tmp_path):
    _, sync, role = connected("files", CopyEngine())

    def cut(number, value):
        if isinstance(value, FileParcel):
            path = tmp_path / "short"
            path.write_bytes(Path(value.path).read_bytes()[:-1])
            return replace(value, path=str(path))
        return value

    role.spoil = cut
    with pytest.raises(WeightSyncError, match=r"cannot be read from .*short: it holds \d+ bytes, expected \d+"):
        sync.push()


def test_memory_of_another_node_cannot_be_mapped(connected):
    _, sync, role = connected("ipc", CopyEngine())

    role.spoil = lambda number, value: replace(value, path=f"{value.path}x") if isinstance(value, FileParcel) else value
    with pytest.raises(WeightSyncError, match="cannot be read from .* set sync.transport: nccl"):
        sync.push()
