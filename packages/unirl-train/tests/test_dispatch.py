"""How arguments are cut and results joined."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unirl.distributed.dispatch import HeldKey, collected, scatter, shard_arguments, shard_bounds, shard_ranks
from unirl.types.errors import ConfigError, ContractError
from unirl.types.roles import Collect, Dispatch, MeshPlace
from unirl.types.rollout import RolloutReq, RolloutResp, RolloutTrack


def track_of(size: int) -> RolloutTrack:
    return RolloutTrack(sample_ids=[f"s{i}" for i in range(size)], rewards=torch.arange(float(size)))


@given(st.integers(1, 8), st.integers(0, 5))
def test_scatter_then_concat_is_the_identity(num_shards: int, per_shard: int) -> None:
    size = num_shards * per_shard
    resp = RolloutResp(tracks={"image": track_of(size)})
    assert collected(Collect.CONCAT, scatter(resp, num_shards)).equals(resp)
    request = RolloutReq(sample_ids=[f"s{i}" for i in range(size)], sigmas=torch.linspace(1, 0, 5))
    assert collected(Collect.CONCAT, scatter(request, num_shards)).equals(request)


@given(st.integers(1, 16), st.integers(0, 64))
def test_shards_are_contiguous_equal_and_cover_everything(num_shards: int, per_shard: int) -> None:
    bounds = shard_bounds(num_shards * per_shard, num_shards, "it")
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(num_shards * per_shard))
    assert {stop - start for start, stop in bounds} == {per_shard}


def test_sizes_that_do_not_divide_name_the_values_and_the_fix() -> None:
    with pytest.raises(ContractError, match="RolloutTrack has 6 samples.* over 4 devices.*Change batch_size"):
        scatter(track_of(6), 4)


def test_arguments_of_different_sizes_are_refused() -> None:
    with pytest.raises(ContractError, match=r"different numbers of samples: \[2, 4\]"):
        shard_arguments(Dispatch.DP_SCATTER, (track_of(4), track_of(2)), {}, 2)


def test_a_response_is_cut_by_its_root_samples() -> None:
    root = track_of(4)
    resp = RolloutResp(tracks={"text": root, "image": root.fork("text", "image", branch=3)})
    first, second = scatter(resp, 2)
    assert first.tracks["text"].sample_ids == ["s0", "s1"]
    assert second.tracks["image"].batch_size == 6
    assert collected(Collect.CONCAT, [first, second]).equals(resp)


def test_unmarked_lists_and_tensors_are_repeated() -> None:
    tensor = torch.arange(4)
    calls = shard_arguments(Dispatch.DP_SCATTER, (["a", "b"], tensor), {"scale": 2.0}, 2)
    assert all(args[0] == ["a", "b"] and args[1] is tensor and named == {"scale": 2.0} for args, named in calls)


def test_one_rank_gets_the_very_objects() -> None:
    track = track_of(3)
    ((args, _),) = shard_arguments(Dispatch.DP_SCATTER, (track,), {}, 1)
    assert args[0] is track


def test_rank_zero_is_called_alone() -> None:
    assert shard_arguments(Dispatch.RANK_ZERO, (1,), {"b": 2}, 8) == [((1,), {"b": 2})]


def test_rank_zero_does_not_take_a_share_for_the_whole() -> None:
    with pytest.raises(ContractError, match="only its own share"):
        shard_arguments(Dispatch.RANK_ZERO, (HeldKey(0),), {}, 2)
    assert shard_arguments(Dispatch.RANK_ZERO, (HeldKey(0),), {}, 1) == [((HeldKey(0),), {})]


def test_a_scattered_list_has_one_item_per_shard() -> None:
    calls = shard_arguments(Dispatch.SCATTER, (["a", "b"],), {"named": (1, 2)}, 2)
    assert calls == [(("a",), {"named": 1}), (("b",), {"named": 2})]
    assert shard_arguments(Dispatch.SCATTER, (HeldKey(3),), {}, 2) == [((HeldKey(3),), {}), ((HeldKey(3),), {})]
    with pytest.raises(ContractError, match="list of 2 items, one per shard; got 3 items"):
        shard_arguments(Dispatch.SCATTER, ([1, 2, 3],), {}, 2)
    with pytest.raises(ContractError, match="got Tensor"):
        shard_arguments(Dispatch.SCATTER, (torch.zeros(2),), {}, 2)


def test_what_cannot_be_joined_says_so() -> None:
    assert collected(Collect.FIRST, [1, 2]) == 1
    assert collected(Collect.ALL, [1, 2]) == [1, 2]
    with pytest.raises(ContractError, match="not a bare tensor"):
        collected(Collect.CONCAT, [torch.zeros(1), torch.zeros(1)])
    with pytest.raises(ContractError, match="cannot join float results of 2 shards"):
        collected(Collect.CONCAT, [1.0, 2.0])
    with pytest.raises(ContractError, match="different types"):
        collected(Collect.CONCAT, [[1], None])


def test_ranks_are_grouped_by_their_data_parallel_place() -> None:
    assert shard_ranks([MeshPlace(dp_rank=rank, dp_size=3) for rank in range(3)]) == [[0], [1], [2]]
    pairs = [MeshPlace(dp_rank=rank % 2, dp_size=2, tp_rank=rank // 2, tp_size=2) for rank in range(4)]
    assert shard_ranks(pairs) == [[0, 2], [1, 3]]
    with pytest.raises(ConfigError, match=r"3 ranks stand at 2 data-parallel places as \[2, 1\]"):
        shard_ranks(pairs[:3])
    with pytest.raises(ConfigError, match="rank 1 counts 1 data-parallel places, rank 0 counts 2"):
        shard_ranks([pairs[0], MeshPlace()])
    with pytest.raises(ContractError, match="sp_rank = 2 of sp_size = 2"):
        MeshPlace(sp_rank=2, sp_size=2)
