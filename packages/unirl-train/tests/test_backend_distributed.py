"""Two ranks against one: gradients, HSDP, policies, skipped steps, checkpoints. Both ranks run once, for all tests."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import results_of_ranks
from safetensors.torch import load_file
from train_fakes import (
    HEAD_WIDTH,
    HEADS,
    TOKENS,
    TinyBundle,
    attention_of_all,
    gradients_and_state,
    lora_config,
    make_backend,
    rows,
    run_scenarios,
    snapshot,
    tokens_and_weights,
)

from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.configs import EMAConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two-ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return results_of_ranks(partial(run_scenarios, folder), folder)


def test_moments_on_the_host_are_those_of_shards_on_the_device(ranks: list[dict[str, Any]]):
    for rank in ranks:
        found, expected = rank["topologies"]["hosted"]["state"], rank["topologies"]["sharded"]["state"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, found[key]) for key, value in expected.items())


@pytest.mark.parametrize("name", ["sharded", "replicated", "one_by_two", "lora", "kept_gathered"])
def test_two_ranks_take_the_steps_that_one_takes(name: str, ranks: list[dict[str, Any]]):
    one = gradients_and_state(**({"lora": lora_config()} if name == "lora" else {}))
    for rank in ranks:
        two = rank["topologies"][name]
        assert two["is_sharded"] and not one["is_sharded"]
        # float32 sums of the same rows in another order.
        for key, gradient in one["gradients"].items():
            torch.testing.assert_close(two["gradients"][key], gradient, rtol=1e-5, atol=1e-6)
        assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)
        assert two["state"].keys() == one["state"].keys()
        for key, value in one["state"].items():
            # AdamW divides by the root of tiny second moments: differences grow to a fraction of lr = 0.01.
            torch.testing.assert_close(two["state"][key], value, rtol=1e-4, atol=1e-5)


def test_both_ranks_hold_the_same_whole_state(ranks: list[dict[str, Any]]):
    for name, first in ranks[0]["topologies"].items():
        second = ranks[1]["topologies"][name]
        assert all(torch.equal(value, second["state"][key]) for key, value in first["state"].items())


def test_a_topology_that_does_not_multiply_to_the_ranks_is_refused(ranks: list[dict[str, Any]]):
    assert "2 * 2 = 4, but there are 2 devices" in ranks[0]["wrong_topology"]


def test_ranks_that_share_samples_step_as_one_and_reductions_know_their_axis(ranks: list[dict[str, Any]]):
    one = gradients_and_state()
    for number, rank in enumerate(ranks):
        found = rank["shared_samples"]
        assert found["place"] == (0, 1, number, 2)
        assert found["sums"] == {"dp": 1.0, "sp": 2.0, "all": 2.0}
        # The module's gradients are the mean over the shards of a batch, of which there is one; its start is rank 0's.
        first = ranks[0]["shared_samples"]["module"]
        assert found["keeps_gradients"]
        assert all(torch.equal(mine, its) for mine, its in zip(found["module"], first, strict=True))
        assert found["norms"] == pytest.approx(one["norms"], rel=1e-5)
        for key, gradient in one["gradients"].items():
            torch.testing.assert_close(found["gradients"][key], gradient, rtol=1e-5, atol=1e-6)
        assert found["state"].keys() == one["state"].keys()


def test_what_cannot_be_spread_over_ranks_is_refused(ranks: list[dict[str, Any]]):
    found = ranks[0]["unspread"]
    assert "topology.sp = 2: the tokens of TinyBundle cannot be spread" in found["bundle"]
    assert "Set fsdp.compile: false" in found["compile"]
    assert "topology.ep = 2: TinyBundle has no experts that can be spread over ranks" in found["experts"]
    assert "without the exchange of topology.ep = 2. Set fsdp.compile: false" in found["compiled experts"]


def test_tokens_are_exchanged_for_heads_and_back_and_gradients_are_those_of_one_process(ranks: list[dict[str, Any]]):
    whole, weights = tokens_and_weights()
    whole.requires_grad_(True)
    result = attention_of_all(whole)
    (result * weights).sum().backward()
    for rank in (each["exchange"] for each in ranks):
        assert rank["lengths"] == [3, 2] and rank["heads"] and rank["tokens"] and rank["whole"]
        torch.testing.assert_close(rank["result"], result.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rank["gradient"], whole.grad, rtol=1e-12, atol=1e-12)


def test_each_exchange_sends_the_bytes_of_the_formula(ranks: list[dict[str, Any]]):
    """Each rank keeps one part in P of the heads of its tokens, and its tokens of its heads."""
    num_ranks, width = len(ranks), 2 * HEADS * HEAD_WIDTH * torch.float64.itemsize
    for number, rank in enumerate(ranks):
        own, longest = rank["exchange"]["lengths"][number], max(rank["exchange"]["lengths"])
        to_heads = width * own * (num_ranks - 1) // num_ranks
        to_tokens = width // num_ranks * (TOKENS - own)
        gathered = width * longest * (num_ranks - 1)
        assert rank["exchange"]["bytes"] == [to_heads, to_tokens + gathered, to_heads + to_tokens]


def test_policies_swap_under_sharding_and_reductions_reach_all(ranks: list[dict[str, Any]], folder: Path):
    for rank in ranks:
        found = rank["policies"]
        assert found["old_is_start"] and found["comes_back"] and found["moved"]
        assert (found["sum"], found["max"]) == (3.0, 2.0)
    bundle = TinyBundle(seed=9)
    bundle.model.load_state_dict(load_file(folder / "merged" / "transformer.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(bundle.model(rows(0)[0]), ranks[0]["policies"]["now"])
    merged, whole = (load_file(folder / name / "transformer.safetensors") for name in ("merged", "whole"))
    assert {tensor.dtype for tensor in whole.values()} == {torch.float32}
    assert merged.keys() == whole.keys() and all(torch.equal(merged[key].float(), whole[key]) for key in merged)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(ranks: list[dict[str, Any]]):
    assert [rank["poisoned"] for rank in ranks] == [[True, 1], [True, 1]]


@pytest.mark.parametrize("name", ["resumed", "resumed_async"])
def test_a_sharded_resume_is_bit_identical_on_every_rank(name: str, ranks: list[dict[str, Any]]):
    for rank in ranks:
        assert rank[name]["different"] == []
        assert rank[name]["same_draws"]
        assert rank[name]["driver_state"] == {"next": 2}


def test_a_checkpoint_of_two_ranks_loads_on_one(ranks: list[dict[str, Any]], folder: Path):
    backend = make_backend(TinyBundle(seed=4), ema=EMAConfig())
    Checkpointer(backend, str(folder / "checkpoints-False")).load()
    state = snapshot(backend)
    assert state.keys() == ranks[0]["resumed"]["expected"].keys()
    assert backend.progress.num_optimizer_steps == 2


def test_a_rank_that_cannot_write_fails_all_and_the_last_checkpoint_stays(ranks: list[dict[str, Any]]):
    for rank in ranks:
        found = rank["full_disk"]
        assert "rank 1: OSError" in found["message"] and "No space left" in found["message"]
        assert found["folders"] == ["step-000001"]
        assert found["loaded"] == {"step": 1}


def test_shards_that_are_read_are_those_of_loaded_weights_in_every_topology(ranks: list[dict[str, Any]]):
    assert [rank["read_in_shards"] for rank in ranks] == [[], []]


def test_shards_that_one_rank_cannot_read_are_an_error_on_all(ranks: list[dict[str, Any]]):
    for rank in ranks:
        assert rank["unreadable"] == {"one": "rank 1: the file is cut off", "all": "the file is cut off"}
