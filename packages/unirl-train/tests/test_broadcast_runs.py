"""Which bytes of a bucket are broadcast together, and which are copied before."""

import itertools
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.distributed.weight_sync.transports import broadcast
from unirl.types.weights import WeightBucket


@given(
    pieces=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50))),
    lone_bytes=st.integers(1, 30),
    run_bytes=st.integers(1, 30),
)
def test_runs_have_every_byte_once_and_in_order(pieces, lone_bytes, run_bytes):
    ends = list(itertools.accumulate((size for _, size in pieces), initial=8))
    spans = [(sender, ends[at], ends[at + 1]) for at, (sender, _) in enumerate(pieces)]
    with mock.patch.multiple(broadcast, _LONE_BYTES=lone_bytes, _RUN_BYTES=run_bytes):
        runs = broadcast.runs_of(spans)
    sent = [(run.sender, byte) for run in runs for byte in range(run.start, run.stop)]
    assert sent == [(sender, byte) for sender, start, stop in spans for byte in range(start, stop)]
    assert all(run.start < run.stop for run in runs)
    largest_joined = max(run_bytes, lone_bytes - 1)  # a small piece is not cut
    assert all(run.stop - run.start <= (run_bytes if run.is_lone else largest_joined) for run in runs)
    lone = {byte for _, start, stop in spans if stop - start >= lone_bytes for byte in range(start, stop)}
    assert {byte for run in runs if run.is_lone for byte in range(run.start, run.stop)} == lone


def test_small_tensors_are_joined_and_large_ones_leave_from_where_they_lie():
    tensors = {"a": torch.randn(3), "large": torch.randn(1 << 19), "b": torch.randn(5), "c": torch.randn(2, 2).T}
    transport = broadcast.BroadcastTransport(torch.device("cpu"), num_engines=1, timeout_s=1.0)
    with mock.patch.object(transport, "opened", return_value=MEETING):
        parcel = transport.pack(WeightBucket(0, tensors, specs=()), 0)
    assert isinstance(parcel, broadcast.BroadcastParcel)
    leaving = [piece for _, piece in sorted(transport._leaving[0].items())]
    assert [piece.numel() for piece in leaving] == [12, 4 << 19, 36] == [run.stop - run.start for run in parcel.runs]
    assert leaving[1].data_ptr() == tensors["large"].data_ptr()
    assert torch.equal(leaving[2].view(torch.float32), torch.cat([tensors["b"], tensors["c"].flatten()]))


MEETING = {"name": "m", "host": "h", "port": 1, "num_members": 2, "device": "cpu", "timeout_s": 1.0}
