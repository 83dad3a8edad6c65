"""Data planes, as far as one process shows them; between processes they are in tests/e2e/test_data_planes.py."""

import pickle
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime_fakes import grown, names

from unirl.distributed.tensor.flat import FlatLayout
from unirl.distributed.tensor.planes import queue
from unirl.distributed.tensor.planes.base import ObjectPlane
from unirl.distributed.tensor.planes.choice import make_plane
from unirl.distributed.tensor.planes.queue import QueuedRows, QueuePlane
from unirl.distributed.tensor.transport import contiguous
from unirl.types.errors import ConfigError, WorkerError


class Shelf:
    """Stands for TransferQueue in one process. Gives every tensor back as something that can be unbound."""

    def __init__(self):
        self.rows = {}

    def init(self, options=None):
        self.options = options

    def kv_batch_put(self, keys, partition, fields):
        (key,) = keys
        self.rows[key] = {name: tensor.clone() for name, tensor in fields.items()}

    def kv_batch_get(self, keys, partition, fields):
        (key,) = keys
        found = self.rows.get(key, {})
        return {name: SimpleNamespace(unbind=found[name].unbind) for name in fields if found}

    def kv_list(self, partition):
        return {partition: dict.fromkeys(self.rows)}

    def kv_clear(self, keys, partition):
        for key in keys:
            del self.rows[key]


@pytest.fixture
def shelf(monkeypatch):
    made = Shelf()
    monkeypatch.setitem(sys.modules, "transfer_queue", made)
    monkeypatch.setattr(queue, "_tensordict", lambda: lambda fields, batch_size: fields)
    return made


def test_rows_come_back_from_the_queue_as_they_went_in(shelf):
    resp: Any = grown(names("a", 5))
    parcel = pickle.loads(pickle.dumps(QueuedRows.put(resp, "k", 60.0)))
    again = parcel.opened({})
    for name, track in resp.tracks.items():
        assert again.tracks[name].sample_ids == track.sample_ids
        assert again.tracks[name].metadata == track.metadata
        assert torch.equal(again.tracks[name].rewards, track.rewards)
    assert torch.equal(again.tracks["text"].segment.tokens, resp.tracks["text"].segment.tokens)
    shelf.rows.clear()
    with pytest.raises(WorkerError, match="the rows of k are gone"):
        parcel.opened({})


def test_what_was_taken_leaves_the_queue(shelf):
    plane = QueuePlane({}, 60.0)

    class Actor:
        class pick_elsewhere:  # noqa: N801 - a method of a ray actor
            @staticmethod
            def options(num_returns):
                class Call:
                    @staticmethod
                    def remote(key, rows, put):
                        return None, put(grown(names("a", 2)))

                return Call

    for _ in range(2):
        plane.pick(Actor, None, [0])  # ty: ignore[invalid-argument-type]
    assert len(shelf.rows) == 2
    plane.taken()
    assert shelf.rows == {}


def test_a_queue_that_hangs_is_named(shelf):
    may_answer = threading.Event()
    shelf.kv_batch_get = lambda *args: may_answer.wait(60)
    parcel = QueuedRows.put(grown(names("a", 2)), "k", 60.0)
    with pytest.raises(WorkerError, match=r"getting \d+ bytes took longer than 0 s; a storage unit may be gone"):
        QueuedRows(parcel.key, parcel.structure, parcel.layout, 0.1).opened({})
    may_answer.set()


def test_a_queue_that_fails_says_what_it_said(shelf):
    def put(*args):
        raise ValueError("no space")

    shelf.kv_batch_put = put
    with pytest.raises(WorkerError, match=r"putting \d+ bytes failed: ValueError: no space"):
        QueuedRows.put(grown(names("a", 2)), "k", 60.0)


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transfer_queue", None)
    with pytest.raises(ConfigError, match=r"pip install 'unirl-train\[transfer-queue\]'"):
        QueuePlane({}, 60.0).join(["actor"])


def test_tensors_of_every_kind_lie_in_one_buffer():
    tensors = {
        "a": torch.arange(5, dtype=torch.int64),
        "b": torch.randn(3, 2).to(torch.bfloat16),
        "c": torch.tensor(True),
        "d": torch.zeros(0, 4),
        "e": torch.randn(7),
    }
    layout = FlatLayout.of(tensors)
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
    layout.write(tensors, buffer)
    views = layout.views(buffer)
    assert list(views) == list(tensors)
    assert all(
        torch.equal(views[name], tensor) and views[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


def test_what_leaves_by_direct_transport_is_contiguous():
    tensor = torch.arange(6).reshape(2, 3).t()
    found = contiguous({"a": [tensor], "b": (tensor, 1)})
    assert found["a"][0].is_contiguous() and torch.equal(found["b"][0], tensor)


def test_planes_have_the_names_of_recipes():
    assert isinstance(make_plane("ray", {}, 1.0), ObjectPlane)
    assert isinstance(make_plane("transfer_queue", {}, 1.0), QueuePlane)
    assert make_plane("rdt", {}, 1.0).actor_options == {"enable_tensor_transport": True}
