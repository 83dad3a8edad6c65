"""Linear attention of Qwen3.5: samples that share a batch stay apart, released folders load, exports load in their
libraries. Sampling and replay against transformers: test_ar_stage, and with images test_qwen_vl."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors import safe_open

from unirl.models.ar import packed_inputs
from unirl.models.kept_experts import EXPERTS
from unirl.models.packing import Packing
from unirl.models.qwen3_5.bundle import Qwen35Bundle, Qwen35MoeBundle, Qwen35VLBundle
from unirl.models.qwen3_5.pipeline import Qwen35MoePipeline, Qwen35Pipeline, Qwen35VLPipeline
from unirl.types.errors import ConfigError
from unirl.types.media import Texts
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

from .tiny_text import qwen3_5, qwen3_5_moe, qwen_vl, save_text_model, save_vision_model

PARAMS = ARSamplingParams(temperature=1.0, max_new_tokens=70, seed=3)
TOKENS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model alone. Read-only."""
    return save_text_model(qwen3_5(), tmp_path_factory.mktemp("qwen3_5"))


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layout of released folders: a model that sees. Read-only."""
    return save_vision_model(qwen_vl("qwen3_5"), tmp_path_factory.mktemp("released"))


def logits(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens).logits


@pytest.mark.parametrize("is_packed", [True, False])
def test_what_neighbours_hold_changes_no_bit_of_a_sample(is_packed: bool, folder: Path) -> None:
    """Equal lengths and other tokens, before and behind it, across more than one chunk of 64 positions."""
    pipeline = Qwen35Pipeline(Qwen35Bundle(str(folder)), packed=is_packed)
    conditions = pipeline.encode({"text": Texts(texts=["first", "second!", "the third of them"])}, PARAMS)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 250, (length,), generator=generator) for length in (40, 70, 90)]
    others = [torch.randint(0, 250, (len(row),), generator=generator) for row in rows]
    for kept in range(3):
        changed = [row if place == kept else other for place, (row, other) in enumerate(zip(rows, others, strict=True))]
        with torch.no_grad():
            before, after = (
                pipeline.replay(conditions, TextSegment.pack(tokens=tokens), PARAMS).logp_N.split([40, 70, 90])
                for tokens in (rows, changed)
            )
        assert torch.equal(before[kept], after[kept])
        assert all(
            not torch.equal(*pair) for place, pair in enumerate(zip(before, after, strict=True)) if place != kept
        )


def test_a_packed_layer_gives_each_sample_the_bits_that_it_has_alone(folder: Path) -> None:
    layer = Qwen35Bundle(str(folder)).model.model.layers[0].linear_attn
    hidden = torch.randn(1, 3 + 3 + 70 + 1, 64, generator=torch.Generator().manual_seed(0))
    lengths = [3, 3, 70, 1]
    with torch.no_grad():
        packed = layer(hidden_states=hidden, packing=Packing.of(lengths, hidden.device))[0].split(lengths)
        through = layer(hidden_states=hidden)[0].split(lengths)
        for out, part in zip(packed[2:], hidden[0].split(lengths)[2:], strict=True):
            assert torch.equal(out, layer(hidden_states=part[None])[0])
        pair = layer(hidden_states=hidden[0, :6].unflatten(0, (2, 3)))
        assert torch.equal(torch.cat(packed[:2]), pair.flatten(0, 1))
    # What a row that is not cut would do: states and convolutions reach into the next sample.
    torch.testing.assert_close(through[0], packed[0], rtol=0, atol=1e-6)
    assert all(float((a - b).abs().max()) > 1e-2 for a, b in zip(through[1:], packed[1:], strict=True))


def test_attention_is_cut_at_the_same_places(folder: Path) -> None:
    """A packed row against transformers' own model, one sample at a time; 1e-5 of logits below 20."""
    bundle = Qwen35Bundle(str(folder))
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [torch.arange(5), torch.arange(30, 50), torch.arange(90, 93)]
    inputs = packed_inputs(rows, [torch.arange(len(row)) for row in rows], [2, 0, 1])
    with torch.no_grad():
        packed = bundle.model(**inputs.arguments, use_cache=False).logits[0]
    for row, start in zip(rows, inputs.starts, strict=True):
        torch.testing.assert_close(packed[start : start + len(row)], logits(plain, row[None])[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("defers", [False, True])
def test_the_language_model_of_a_released_folder_is_read_without_the_rest(defers: bool, released: Path) -> None:
    bundle = Qwen35Bundle(str(released), defers_weights=defers)
    whole: Any = transformers.AutoModelForImageTextToText.from_pretrained(released, dtype=torch.float32)
    if defers:
        stored = bundle.stored_weights()["model"]
        for name, value in whole.model.language_model.state_dict().items():
            assert torch.equal(stored[f"model.{name}"].read(tuple(slice(0, size) for size in value.shape)), value)
        return
    assert not any("visual" in name for name, _ in bundle.model.named_parameters())
    torch.testing.assert_close(logits(bundle.model), logits(whole), rtol=0, atol=1e-6)


def test_a_model_that_sees_reads_texts_as_the_language_model_alone_does(released: Path) -> None:
    pipelines = Qwen35Pipeline(Qwen35Bundle(str(released))), Qwen35VLPipeline(Qwen35VLBundle(str(released)))
    found = []
    for pipeline in pipelines:
        conditions = pipeline.encode({"text": Texts(texts=["hi", "hello"])}, PARAMS)
        with pipeline.evaluating():
            found.append(pipeline.generate(conditions, PARAMS, noise_keys=["a", "b"]))
    assert found[0].equals(found[1])


def test_a_lora_export_adapts_both_kinds_of_attention_and_loads_in_peft(folder: Path, tmp_path: Path) -> None:
    bundle = Qwen35Bundle(str(folder))
    targets = bundle.lora_target_modules
    adapted: Any = peft.inject_adapter_in_model(
        peft.LoraConfig(r=3, lora_alpha=5, target_modules=list(targets)), bundle.model
    )
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3
    state = peft.get_peft_model_state_dict(adapted)
    layers = {name.rsplit(".lora_", 1)[0].split("layers.")[1] for name in state}
    linear = {"in_proj_qkv", "in_proj_z", "out_proj"}
    assert layers == {f"{layer}.linear_attn.{name}" for layer in range(3) for name in linear} | {
        f"3.self_attn.{name}_proj" for name in "qkvo"
    }
    bundle.export_lora(str(tmp_path), {"model": state}, rank=3, alpha=5.0, target_modules=targets)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = logits(plain)
    torch.testing.assert_close(
        logits(peft.PeftModel.from_pretrained(plain, tmp_path)), logits(adapted), rtol=0, atol=2e-5
    )
    assert float((logits(adapted) - before).abs().max()) > 0.1


@pytest.mark.parametrize("bundle_class", [Qwen35Bundle, Qwen35VLBundle])
def test_a_merged_export_is_a_folder_of_the_same_kind(bundle_class: Any, released: Path, tmp_path: Path) -> None:
    bundle = bundle_class(str(released))
    with torch.no_grad():
        for parameter in bundle.model.parameters():
            parameter.mul_(1.1)
    state = {name: parameter.detach().clone() for name, parameter in bundle.model.named_parameters()}
    bundle.export_merged(str(tmp_path / "out"), {"model": state})
    again: Any = bundle_class.auto_class.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(logits(again), logits(bundle.model))
    assert torch.equal(logits(bundle_class(str(tmp_path / "out")).model), logits(bundle.model))
    if bundle_class is Qwen35VLBundle:
        with (
            safe_open(released / "model.safetensors", "pt") as old,
            safe_open(tmp_path / "out" / "model.safetensors", "pt") as new,
        ):
            assert set(old.keys()) == set(new.keys())


def test_kept_experts_are_weighed_as_the_model_weighs_its_own(tmp_path: Path) -> None:
    bundle = Qwen35MoeBundle(str(save_text_model(qwen3_5_moe(), tmp_path)))
    pipeline = Qwen35MoePipeline(bundle, replays_experts=True)
    params = ARSamplingParams(temperature=1.0, max_new_tokens=8, seed=3)
    conditions = pipeline.encode({"text": Texts(texts=["hi", "a longer one"])}, params)
    with pipeline.evaluating():
        segment = pipeline.generate(conditions, params, noise_keys=["a", "b"])
    free = {name: value for name, value in conditions.items() if name != EXPERTS}
    assert EXPERTS in conditions
    kept, own = (pipeline.replay(each, segment, params).logp_N.detach() for each in (conditions, free))
    torch.testing.assert_close(kept, own, rtol=0, atol=1e-6)
    torch.testing.assert_close(kept, segment.log_probs, rtol=0, atol=4e-5)


class Ranks:
    """Stands for an exchange between two ranks, which is refused before it is used."""

    size = 2
    ring = None
    num_head_parts = 2


@pytest.mark.parametrize("bundle_class", [Qwen35Bundle, Qwen35VLBundle])
def test_ranks_share_neither_tokens_nor_layers(bundle_class: Any, released: Path) -> None:
    bundle = bundle_class(str(released))
    with pytest.raises(ConfigError, match=r"sp = 2: the tokens of .* cannot be spread .*linear attention carries"):
        bundle.spread_tokens(Ranks())
    with pytest.raises(ConfigError, match=r"tp = 2: the layers of .* cannot be divided .*linear attention carries"):
        bundle.cut_layers(Ranks())
