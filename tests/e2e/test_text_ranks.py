"""Text on a sharded model: ranks that sample different lengths stay in step, and two ranks compute what one does."""

import importlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from text_ranks import (
    CASES,
    PARAMS,
    PROMPTS,
    pictures,
    results_of_a_rank,
    sample_and_differentiate,
    save_model,
    stop_tokens,
)

from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.models.qwen_vl.pipeline import QwenVLPipeline
from unirl.rollout.engine.checkpoint import checkpoint_shapes
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import FSDPConfig, OptimizerConfig
from unirl.types.media import ImageLists, Texts
from unirl.types.segments import TextSegment
from unirl.worlds.shapes.questions import pretrain

ranks_of_train: Any = importlib.import_module("ranks")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text-ranks")
    for name in ("tied", "untied"):
        save_model(folder / name, is_tied=name == "tied")
    save_model(folder / "linear", has_linear=True)
    pretrain.save_random_model(folder / "vision")
    free = sample_and_differentiate(folder / "untied", slice(0, 4), PARAMS, lora=False)
    # End the first two samples early, and so the first rank before the second.
    tokens = free["tokens"].split(free["lengths"].tolist())
    (folder / "stop").write_text(f"{int(tokens[0][2])} {int(tokens[1][4])}")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return ranks_of_train.results_of_ranks(partial(results_of_a_rank, folder), folder)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_sample_score_and_differentiate_as_one(case: str, folder: Path, ranks: list[dict[str, Any]]):
    model, lora = CASES[case]
    params = replace(PARAMS, stop_token_ids=stop_tokens(folder))
    one = sample_and_differentiate(folder / model, slice(0, 4), params, lora=lora)
    first, second = (rank[case] for rank in ranks)
    assert first["num_sampling"] == second["num_sampling"]
    assert model != "vision" or not any(".visual." in name for name in one["gradients"])
    assert torch.equal(torch.cat([first["tokens"], second["tokens"]]), one["tokens"])
    for name in ("rollout", "replay", "again"):
        # float32 sums in another order.
        torch.testing.assert_close(torch.cat([first[name], second[name]]), one[name], rtol=0, atol=5e-6)
    torch.testing.assert_close(one["replay"], one["rollout"], rtol=0, atol=5e-6)
    torch.testing.assert_close(one["again"], one["replay"], rtol=0, atol=5e-6)
    for rank in (first, second):
        assert rank["gradients"].keys() == one["gradients"].keys() and rank["gradients"]
        for name, gradient in one["gradients"].items():
            torch.testing.assert_close(
                rank["gradients"][name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())
            )


def test_the_ranks_of_the_first_case_end_at_different_lengths(ranks: list[dict[str, Any]]):
    """Otherwise the test above would not see ranks that must wait for each other."""
    longest = [int(rank["untied-full"]["lengths"].max()) for rank in ranks]
    assert longest[0] != longest[1]


def test_half_precision_and_recomputed_blocks_replay_what_they_sampled(folder: Path):
    """bfloat16 has 8 bits: log-probs of rollout and replay differ by some hundredths at |logp| below 10."""
    config = FSDPConfig(param_dtype="bf16", activation_checkpointing=True)
    half = sample_and_differentiate(folder / "untied", slice(0, 4), PARAMS, lora=False, config=config)
    assert float((half["replay"] - half["rollout"]).abs().mean()) < 0.05
    assert torch.equal(half["again"], half["replay"])
    assert all(torch.isfinite(gradient).all() for gradient in half["gradients"].values())


def test_pictures_change_what_is_sampled_from_them(folder: Path):
    """Otherwise ranks that lost theirs would agree all the same."""
    one = sample_and_differentiate(folder / "vision", slice(0, 2), PARAMS, lora=False)
    bundle = QwenVLBundle(str(folder / "vision"))
    pipeline = QwenVLPipeline(bundle)
    blank = ImageLists(images=[[torch.zeros_like(image) for image in each] for each in pictures().images[:2]])
    conditions = pipeline.encode({"text": Texts(texts=PROMPTS[:2]), "image": blank}, PARAMS)
    segment = TextSegment.pack(tokens=list(one["tokens"].split(one["lengths"].tolist())), params=PARAMS)
    other = pipeline.replay(conditions, segment, PARAMS).logp_N.detach()
    assert float((other - one["replay"]).abs().max()) > 1e-3


def test_a_push_names_the_weights_of_a_vision_model_as_the_engine_does(folder: Path):
    """Its checkpoint has the names of an older transformers."""
    backend = FSDPBackend(QwenVLBundle(str(folder / "vision")), optimizer=OptimizerConfig(learning_rate=1e-3))
    assert backend.weight_source.weight_shapes() == checkpoint_shapes(folder / "vision")
    backend.close()
