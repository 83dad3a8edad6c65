"""Two ranks that share a model push it together: each sends the rows that it has."""

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from push_ranks import TRAININGS, TRANSPORTS, results_of_a_rank

from unirl.distributed.weight_sync.plan import push_plan
from unirl.types.errors import WeightSyncError

ranks_of_train: Any = importlib.import_module("ranks")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("push-ranks")
    return ranks_of_train.results_of_ranks(partial(results_of_a_rank, folder), folder)


@pytest.mark.slow
@pytest.mark.parametrize("training", TRAININGS)
def test_the_rows_of_both_ranks_are_the_gathered_weights_bit_for_bit(ranks, training):
    first, second = (rank["rows"][training] for rank in ranks)
    for name, whole in first["whole"].items():
        (start, stop), (other_start, other_stop) = first["rows"][name], second["rows"][name]
        assert (first["starts"][name], second["starts"][name]) == (start, other_start)
        if training == "replicated":
            assert (start, stop) == (other_start, other_stop) == (0, len(whole))
            assert torch.equal(first["shards"][name], whole)
        else:
            assert (start, stop, other_start, other_stop) == (0, 4, 4, 7)
            assert torch.equal(torch.cat([first["shards"][name], second["shards"][name]]), whole)


@pytest.mark.slow
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_both_ranks_send_and_every_engine_has_the_weights(ranks, transport, training):
    first, second = (rank["pushes"][f"{transport}-{training}"] for rank in ranks)
    assert first["arrived"] == [True] * 3 and first["error"] == second["error"] == ""
    assert len(set(first["megabytes"])) == 1


@pytest.mark.slow
def test_a_rank_that_cannot_write_ends_the_push_on_both_and_the_next_arrives(ranks):
    first, second = (rank["failing"] for rank in ranks)
    assert first["error"] == "a push ended on another rank. rank 1: no room on this rank"
    assert second["error"] == "no room on this rank"
    assert first["arrived"] == [True] * 2


def shapes(**own):
    return {name: (shape, torch.float32) for name, shape in own.items()}


def test_ranks_with_the_same_rows_take_turns_and_buckets_keep_their_size():
    plan = push_plan(
        shapes(a=(4, 2), b=(4, 2), c=(3,), d=(), e=(0, 2)),
        [
            dict(a=(0, 4), b=(0, 4), c=(0, 2), d=(0, 1), e=(0, 0)),
            dict(a=(0, 4), b=(0, 4), c=(2, 3), d=(0, 1), e=(0, 0)),
        ],
        32,
        torch.bfloat16,
    )
    assert [bucket.names for bucket in plan] == [("a", "b"), ("c", "d", "e")]
    pieces = {(piece.name, piece.start, piece.stop): piece.rank for bucket in plan for piece in bucket.pieces}
    assert pieces == {("a", 0, 4): 0, ("b", 0, 4): 1, ("c", 0, 2): 0, ("c", 2, 3): 1, ("d", 0, 1): 0, ("e", 0, 0): 1}
    assert [bucket.layout.num_bytes - len(bucket.layout.header) for bucket in plan] == [32, 8]


@pytest.mark.parametrize("rows", [[(0, 2), (3, 4)], [(0, 2), (1, 4)], [(0, 2), (2, 3)], [(1, 4), (0, 0)]])
def test_rows_that_no_rank_has_or_that_overlap_are_refused(rows):
    with pytest.raises(WeightSyncError, match=r"ranks have rows \[.*\] of the 4 of a"):
        push_plan(shapes(a=(4, 2)), [{"a": each} for each in rows], 100, torch.float32)
