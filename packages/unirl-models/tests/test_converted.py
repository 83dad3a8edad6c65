"""Language models whose weights stay in their files: where the rules of transformers put them, and what is refused."""

import itertools
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from unirl.models.causal_lm.bundle import CausalLMBundle
from unirl.models.causal_lm.converted import Joined, Stacked
from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.models.stored import Box
from unirl.types.errors import CheckpointError, ConfigError

from .tiny_text import qwen3, qwen3_5, qwen3_5_moe, qwen3_moe, save_text_model, text_tokenizer

FILE = "model.safetensors"


class MemoryTensor:
    """Stands for a tensor of a file."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.shape = tuple(value.shape)

    def read(self, box: Box) -> Tensor:
        return self.value[box]


def _boxes(shape: tuple[int, ...]) -> list[Box]:
    """All boxes of a shape, empty ones included."""
    spans = [[slice(a, b) for a in range(size + 1) for b in range(a, size + 1)] for size in shape]
    return list(itertools.product(*spans))


def test_every_box_of_stacked_and_joined_tensors_is_that_of_the_whole() -> None:
    values = torch.arange(3 * 5 * 2).reshape(3, 5, 2)
    parts = [MemoryTensor(value) for value in values]
    stacked = Stacked(parts)
    gate_up = Joined([Stacked([MemoryTensor(value[:2]) for value in values]), MemoryTensor(values[:, 2:])], dim=1)
    for tensor in (stacked, gate_up, Joined([MemoryTensor(values[:1]), MemoryTensor(values[1:])], dim=0)):
        assert tensor.shape == tuple(values.shape)
        for box in _boxes(tensor.shape):
            found = tensor.read(box)
            assert found.shape == values[box].shape and torch.equal(found, values[box])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [qwen3, qwen3_moe, qwen3_5, qwen3_5_moe, lambda: qwen3(tie_word_embeddings=True)])
def test_every_weight_is_found_where_transformers_finds_it(make: Any, dtype: str, tmp_path: Path) -> None:
    save_text_model(make(), tmp_path)
    loaded = CausalLMBundle(str(tmp_path), dtype)
    bundle = CausalLMBundle(str(tmp_path), dtype, defers_weights=True)
    assert bundle.defers_weights and all(parameter.is_meta for parameter in bundle.model.parameters())
    assert bundle.is_packable == loaded.is_packable
    assert bundle.eos_token_ids == loaded.eos_token_ids
    found, expected = bundle.stored_weights()["model"], loaded.model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        stored = found[name].read(tuple(slice(0, size) for size in value.shape))
        assert stored.dtype == value.dtype and torch.equal(stored, value)


def test_a_base_model_is_read_into_a_model_with_a_head(tmp_path: Path) -> None:
    model = qwen3(tie_word_embeddings=True)
    save_text_model(model, tmp_path)
    weights = {name.removeprefix("model."): value for name, value in load_file(tmp_path / FILE).items()}
    save_file(weights, tmp_path / FILE, {"format": "pt"})
    found = Qwen3Bundle(str(tmp_path), defers_weights=True).stored_weights()["model"]
    assert torch.equal(found["lm_head.weight"].read((slice(3, 5), slice(0, 64))), model.lm_head.weight[3:5])


def test_weights_that_do_not_fit_are_named_in_one_error(qwen3_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen3_folder, tmp_path / "copy"))
    weights = load_file(folder / FILE)
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights |= {"model.norm.weight": torch.zeros(3), "other": torch.zeros(1)}
    save_file(weights, folder / FILE, {"format": "pt"})
    bundle = Qwen3Bundle(str(folder), defers_weights=True)
    with pytest.raises(CheckpointError) as caught:
        bundle.stored_weights()
    message = str(caught.value)
    assert "does not hold all weights of Qwen3ForCausalLM" in message
    assert "missing_keys ['model.layers.1.mlp.up_proj.weight']" in message
    assert "model.norm.weight: [3] in the file, [64] in the model" in message
    assert "unexpected_keys ['other']" in message


def test_an_expert_that_is_missing_is_an_error(tmp_path: Path) -> None:
    save_text_model(qwen3_moe(), tmp_path)
    weights = load_file(tmp_path / FILE)
    del weights["model.layers.1.mlp.experts.2.down_proj.weight"]
    save_file(weights, tmp_path / FILE, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts.down_proj: \[5, 64, 24\] in the file, \[6, 64, 24\]"):
        CausalLMBundle(str(tmp_path), defers_weights=True).stored_weights()


def test_both_names_of_a_tied_weight_in_a_file_are_left_to_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_text_model(qwen3(tie_word_embeddings=True), tmp_path)
    weights = load_file(tmp_path / FILE)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, tmp_path / FILE, {"format": "pt"})
    with caplog.at_level(logging.WARNING):
        bundle = Qwen3Bundle(str(tmp_path), defers_weights=True)
    assert not bundle.defers_weights
    assert "every rank reads all of" in caplog.text and "lm_head.weight is tied to" in caplog.text
    assert torch.equal(bundle.model.lm_head.weight, weights["lm_head.weight"])


def test_a_folder_without_safetensors_is_read_at_once(
    qwen3_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(qwen3_folder, tmp_path / "copy"))
    torch.save(load_file(folder / FILE), folder / "pytorch_model.bin")
    (folder / FILE).unlink()
    with caplog.at_level(logging.WARNING):
        assert not Qwen3Bundle(str(folder), defers_weights=True).defers_weights
    assert f"it has no {FILE}" in caplog.text


def test_logits_that_are_capped_are_refused_without_weights(tmp_path: Path) -> None:
    tokenizer = text_tokenizer()
    config = transformers.Gemma2Config(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        final_logit_softcapping=30.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=1,
    )
    save_text_model(transformers.Gemma2ForCausalLM(config), tmp_path)
    with pytest.raises(ConfigError, match="scales or caps its logits"):
        CausalLMBundle(str(tmp_path), defers_weights=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_random_weights_are_those_of_their_seed_whatever_the_folder_holds(dtype: str, tmp_path: Path) -> None:
    save_text_model(qwen3(), tmp_path)
    torch.manual_seed(11)
    state = torch.random.get_rng_state()
    made = [CausalLMBundle(str(tmp_path), dtype, random_weights=seed) for seed in (5, 5, 6)]
    deferred = CausalLMBundle(str(tmp_path), dtype, random_weights=5, defers_weights=True)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator is not touched"
    assert not deferred.defers_weights
    stored, first, again, other = (
        dict(bundle.model.named_parameters()) for bundle in (CausalLMBundle(str(tmp_path), dtype), *made)
    )
    drawn = [name for name, value in first.items() if value.ndim > 1]
    for name, value in first.items():
        assert value.dtype == stored[name].dtype and torch.equal(value, again[name])
        assert torch.equal(value, dict(deferred.model.named_parameters())[name])
    assert drawn and all(not torch.equal(first[name], each[name]) for name in drawn for each in (stored, other))
    assert made[0].eos_token_ids == CausalLMBundle(str(tmp_path), dtype).eos_token_ids
