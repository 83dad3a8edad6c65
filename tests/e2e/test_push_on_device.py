"""What a push does where both sides have their weights on one device, with tensors of the host in its role."""

from collections import Counter
from typing import Any

import pytest
import torch
from pushed_weights import CopyEngine, EnginesInThreads, make_sync, make_training, nudge, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from unirl.distributed.weight_sync import slices
from unirl.distributed.weight_sync.transports import ipc
from unirl.rollout.engine.replica.weights import ReplicaWeights
from unirl.types import weights, word_sums
from unirl.types.errors import WeightSyncError
from unirl.types.weights import tensor_checksum, weight_buckets

TRANSPORTS = ("ray", "files", "ipc", "nccl")


@pytest.fixture(autouse=True)
def sums_of_a_device(monkeypatch):
    """Tensors of the host are summed as those of a device are."""
    for module in (weights, slices):
        monkeypatch.setattr(module, "sum_kind", lambda device: "words_128")


class Watching(CopyEngine):
    """Notes the kinds of sums, and can damage what arrives."""

    def __init__(self):
        super().__init__()
        self.kinds: Counter[str] = Counter()
        self.damage: Any = None

    def receive_weights(self, bucket):
        self.kinds.update(spec.sum_kind for spec in (*bucket.specs, *bucket.kept))
        if self.damage is not None and bucket.tensors:
            bucket = bucket.with_tensors(self.damage({name: tensor.clone() for name, tensor in bucket.tensors.items()}))
        super().receive_weights(bucket)


def checksums(tensors):
    return {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("changed", ["all", "tensors", "elements"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums_of_words_prove_every_push(transport, changed, tmp_path):
    engine, training = Watching(), make_training()
    backend = training[1]
    options: dict[str, Any] = {"transfer_dir": str(tmp_path), "bucket_bytes": 400, "canary_tolerance": 1e-6}
    sync = make_sync(training, transport, changed=changed, **options)
    role: Any = EnginesInThreads(engine)
    sync.connect_elsewhere(role)
    for _ in range(3):
        sync.push()
        assert engine.checksums() == checksums(dict(backend.weight_source.weights()))
        nudge(backend)
    # Broadcasts to the host are summed as they arrive, all others once the bucket is there.
    assert set(engine.kinds) == {"words_128"}
    kept = engine.checksums()
    train(backend)
    if changed == "elements" or transport == "nccl":
        return  # deltas are refused by their form too, and what a broadcast brought was summed before
    engine.damage = one_bit
    with pytest.raises(WeightSyncError, match="arrived changed"):
        sync.push()
    assert engine.checksums() == kept
    engine.damage = None
    sync.push()
    assert engine.checksums() == checksums(dict(backend.weight_source.weights()))


def one_bit(tensors):
    """The tensors with the lowest bit of the last one's last element flipped."""
    last = [*tensors.values()][-1]
    last.view(torch.int32).view(-1)[-1] ^= 1
    return tensors


class Counted(TorchDispatchMode):
    """Counts operations on tensors, views apart."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_layers", [3, 200])
def test_a_push_takes_as_many_operations_for_400_tensors_as_for_6(num_layers, monkeypatch):
    monkeypatch.setattr(word_sums, "_CHUNK_ROWS_OF_HOST", word_sums._CHUNK_ROWS)
    monkeypatch.setattr(ipc, "reduce_tensor", lambda buffer: (lambda: buffer, ()))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    layers = {"transformer": nn.Sequential(*[nn.Linear(8, 8) for _ in range(num_layers)])}
    engine = ReplicaWeights(layers, torch.float32, torch.device("cpu"), 0)
    sent = {name: torch.randn_like(tensor) for name, tensor in engine._tensors().items()}
    sender, kept = ipc.DeviceTransport(torch.device("cpu")), dict[str, Any]()
    parts = {}

    def push(version):
        engine.begin(version, [weights.WeightSpec(name, tuple(t.shape), str(t.dtype), "") for name, t in sent.items()])
        with Counted() as parts["sums"]:
            (bucket,) = weight_buckets(sent.items(), policy_version=version, max_bytes=10**9)
        with Counted() as parts["pack"]:
            parcel = sender.pack(bucket, 0)
        with Counted() as parts["open"]:
            bucket = parcel.opened(kept)
        with Counted() as parts["verify"]:
            engine.receive(bucket)
        with Counted() as parts["load"]:
            engine.finish(version, None)

    push(1)  # makes buffers and keys
    push(2)
    assert all(torch.equal(tensor, sent[name]) for name, tensor in engine._tensors().items())
    counts = {part: sum(found.counts.values()) for part, found in parts.items()}
    assert parts["load"].counts == {"_foreach_copy_": 1}
    assert counts["open"] == 0
    assert parts["pack"].counts == {"copy_": 1, "_foreach_copy_": 1}  # the header, and all tensors
    assert parts["sums"].counts == parts["verify"].counts
    assert (counts["sums"], parts["sums"].counts["cat"]) == (56, 2)
