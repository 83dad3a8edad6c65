"""What families of diffusers pipelines share, on families that SD3 is not: ragged texts, a reference image, experts."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from safetensors.torch import load_file
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import processor, text_encoder, trained
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.models.diffusers_pipeline.text import TextEncoders, ragged
from unirl.models.embedding_cache import EmbeddingCache
from unirl.models.tiny.text import t5_encoder
from unirl.types.conditions import Condition, ImageLatentCondition, TextEmbedCondition
from unirl.types.errors import CheckpointError, ConfigError, ContractError
from unirl.types.media import Images, Primitive, Texts
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

from .tiny import byte_tokenizer


class RaggedTextEncoders(TextEncoders):
    """One token per character, padded to the length and masked, as a language model's tokenizer would."""

    def __init__(self) -> None:
        tokenizer = byte_tokenizer({"<pad>": 0}, pad_token="<pad>")
        super().__init__({"text_encoder": t5_encoder()}, {"tokenizer": tokenizer})
        self.num_texts = 0

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        self.num_texts += len(texts)
        embeds = torch.zeros(len(texts), max_sequence_length, 1)
        mask = torch.zeros(len(texts), max_sequence_length, dtype=torch.long)
        for row, text in enumerate(texts):
            embeds[row, : len(text), 0] = torch.tensor([float(ord(char)) for char in text])
            mask[row, : len(text)] = 1
        return TextEmbedCondition(embeds=embeds, attention_mask=mask)


class TwoStreamTextEncoders(RaggedTextEncoders):
    """A second stream of width 2: what stands between quotation marks, which may be nothing."""

    def _encode_beside(self, texts: Sequence[str]) -> dict[str, TextEmbedCondition]:
        quoted = [text.split("'")[1] if "'" in text else "" for text in texts]
        return {"text_2": ragged([torch.full((len(text), 2), float(len(text))) for text in quoted])}


class PlainTextEncoders(TextEncoders):
    """One number per text."""

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        return TextEmbedCondition(embeds=torch.tensor([float(len(text)) for text in texts])[:, None, None])


class EditBundle(DiffusersBundle):
    """A family whose texts are ragged. Nothing is loaded: the adapter's part of the contract alone is tested."""

    family = "Edit"
    pipeline_classes = ("EditPipeline",)
    components = {}
    block_class_names = ()
    lora_target_modules = ()

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.text: TextEncoders = RaggedTextEncoders()


class EditAdapter(TextConditionedAdapter[EditBundle]):
    """A velocity x + mean of the text + reference image, of which guidance negates the text alone."""

    read_slots = frozenset({"text", "image"})
    default_sequence_length = 8
    longest_sequence = 16

    @property
    def geometry(self) -> Geometry:
        return Geometry(1, 8)

    def encode_inputs(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        images = primitives["image"]
        assert isinstance(images, Images)
        return {"reference": ImageLatentCondition(latents=images.pixels.mean(dim=(1, 2, 3))[:, None, None, None])}

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        assert set(conditions) == {"text", "reference"}
        text = require_condition(conditions, "text", TextEmbedCondition)
        reference = require_condition(conditions, "reference", ImageLatentCondition)
        assert text.attention_mask is not None
        return x_R + text.embeds.sum(1) / text.attention_mask.sum(1, keepdim=True) + reference.latents.flatten(1)

    def to_vae(self, latents: Tensor) -> Tensor:
        raise AssertionError("no test decodes")

    def from_vae(self, latents: Tensor) -> Tensor:
        raise AssertionError("no test encodes")


class DistilledAdapter(EditAdapter):
    """Takes its guidance as an input instead of running twice."""

    used_params = frozenset({"distilled_guidance_scale"})
    used_sampler_kwargs = frozenset({"shift"})


def _params(**changes: Any) -> DiffusionSamplingParams:  # Any: whatever the field is
    fields: dict[str, Any] = {"guidance_scale": 1.0, **changes}
    return DiffusionSamplingParams(**fields)


def _primitives(*texts: str) -> dict[str, Primitive]:
    pixels = torch.stack([torch.full((3, 2, 2), 0.25 * (row + 1)) for row in range(len(texts))])
    return {"text": Texts(texts=list(texts)), "image": Images(pixels=pixels)}


def test_texts_of_different_lengths_are_cached_without_padding_and_padded_when_they_meet() -> None:
    cache = EmbeddingCache()
    bundle = EditBundle()
    adapter = EditAdapter(bundle, embedding_cache=cache)
    first = require_condition(adapter.encode(_primitives("ab"), _params()), "text", TextEmbedCondition)
    assert first.embeds.shape == (1, 2, 1)
    both = require_condition(adapter.encode(_primitives("wxyz", "ab"), _params()), "text", TextEmbedCondition)
    assert both.attention_mask is not None and both.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert both.embeds[1, :, 0].tolist() == [97.0, 98.0, 0.0, 0.0]
    assert isinstance(bundle.text, RaggedTextEncoders) and bundle.text.num_texts == 2


def test_a_second_stream_is_cached_with_its_text_and_has_a_negative_slot_too() -> None:
    bundle = EditBundle()
    bundle.text = TwoStreamTextEncoders()
    adapter = EditAdapter(bundle)
    params = _params(guidance_scale=2.0, negative_prompt="no 'x'")
    for _ in range(2):
        conditions = adapter.encode(_primitives("say 'hi'", "fog"), params)
        first, other = (
            require_condition(conditions, slot, TextEmbedCondition) for slot in ("text_2", "negative_text_2")
        )
        assert first.attention_mask is not None and first.attention_mask.tolist() == [[1, 1], [0, 0]]
        assert first.embeds.tolist() == [[[2.0, 2.0], [2.0, 2.0]], [[0.0, 0.0], [0.0, 0.0]]]
        assert other.embeds.tolist() == [[[1.0, 1.0]], [[1.0, 1.0]]]
    assert bundle.text.num_texts == 3
    without = require_condition(adapter.encode(_primitives("fog"), _params()), "text_2", TextEmbedCondition)
    assert without.embeds.shape == (1, 0, 2)


def test_a_slot_beside_the_text_reaches_guided_and_unguided_rows() -> None:
    """v = x + mean(text) + reference: 98 for "b", 97 for the negative "a", references 0.25 and 0.5."""
    adapter = EditAdapter(EditBundle())
    params = _params(guidance_scale=3.0, negative_prompt="a", sampler_kwargs={"guidance_interval": [0.5, 1.0]})
    conditions = adapter.encode(_primitives("b", "b"), params)
    velocity = adapter.bind(conditions, params)
    found = velocity(torch.zeros(2, 1), torch.tensor([0.75, 0.25]), torch.tensor([0, 1]))
    assert found.flatten().tolist() == [97.25 + 3 * 1.0, 98.5]
    del conditions["negative_text"]
    with pytest.raises(ContractError, match="conditions need 'negative_text'"):
        adapter.bind(conditions, params)


def test_inputs_that_a_family_would_leave_out_are_refused_by_name() -> None:
    class TextAlone(EditAdapter):
        read_slots = frozenset({"text"})

    with pytest.raises(ConfigError, match=r"Edit reads \['text'\] of a request, which also brings {'image': 'Images'}"):
        TextAlone(EditBundle()).encode(_primitives("ab"), _params())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guidance_scale": 4.0}, r"guidance_scale = 4.0 means nothing to Edit. Set sampling.guidance_scale: 1.0"),
        ({"num_frames": 5}, r"num_frames = 5 means nothing to Edit. Set sampling.num_frames: 1"),
        ({"max_sequence_length": 8}, r"max_sequence_length = 8 means nothing to Edit. .*max_sequence_length: null"),
        (
            {"sampler_kwargs": {"guidance_interval": [0, 1]}},
            r"\['guidance_interval'\] mean nothing to Edit.*'shift'",
        ),
    ],
)
def test_what_a_family_does_not_declare_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    adapter = DistilledAdapter(EditBundle())
    adapter.check_params(_params(distilled_guidance_scale=3.5, sampler_kwargs={"shift": 2.0}))
    with pytest.raises(ConfigError, match=message):
        adapter.check_params(_params(**changes))


# Two components that train ------------------------------------------------------------------------------------------


class TwoExperts(DiffusersBundle):
    """Two transformers of one pipeline, as Wan 2.2 has."""

    family = "Experts"
    pipeline_classes = ("StableDiffusion3Pipeline",)
    components = {
        "transformer": trained(SD3Transformer2DModel),
        "transformer_2": trained(SD3Transformer2DModel, is_optional=True),
        "text_encoder_3": text_encoder(transformers.T5EncoderModel),
        "tokenizer_3": processor(),
    }
    text_class = PlainTextEncoders
    block_class_names = ("JointTransformerBlock",)
    lora_target_modules = ("attn.to_q",)


@pytest.fixture
def two_experts(sd3_folder: Path, tmp_path: Path) -> TwoExperts:
    folder = Path(shutil.copytree(sd3_folder, tmp_path / "experts"))
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer_2"] = index["transformer"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return TwoExperts(str(folder))


def test_every_expert_is_exported_with_its_own_weights(two_experts: TwoExperts, tmp_path: Path) -> None:
    modules = two_experts.trainable_modules()
    assert list(modules) == ["transformer", "transformer_2"]
    with torch.no_grad():
        for offset, module in enumerate(modules.values(), start=1):
            for parameter in module.parameters():
                parameter.add_(0.01 * offset)
    # As sharding does; the export must name the class that was loaded.
    modules["transformer_2"].__class__ = type("Wrapped", (SD3Transformer2DModel,), {})
    state = {name: {key: value.detach() for key, value in m.named_parameters()} for name, m in modules.items()}
    two_experts.export_merged(str(tmp_path / "merged"), state)
    found = TwoExperts(str(tmp_path / "merged")).trainable_modules()
    for name, module in modules.items():
        assert torch.equal(found[name].get_parameter("proj_out.bias"), module.get_parameter("proj_out.bias"))
        config = json.loads((tmp_path / "merged" / name / "config.json").read_text())
        assert config["_class_name"] == "SD3Transformer2DModel"
    first, second = (expert.get_parameter("proj_out.bias") for expert in found.values())
    assert not torch.equal(first, second)

    with pytest.raises(ContractError, match=r"trains \['transformer', 'transformer_2'\]; got .*\['transformer'\]"):
        two_experts.export_merged(str(tmp_path / "half"), {"transformer": state["transformer"]})
    with pytest.raises(CheckpointError, match=r"does not fit the transformer_2 of"):
        two_experts.export_merged(str(tmp_path / "wrong"), {**state, "transformer_2": {"lora": torch.ones(1)}})


def test_the_lora_file_names_the_expert_of_each_weight(two_experts: TwoExperts, tmp_path: Path) -> None:
    key = "transformer_blocks.0.attn.to_q.lora_A.weight"
    state = {"transformer": {key: torch.ones(2, 32)}, "transformer_2": {key: torch.zeros(2, 32)}}
    two_experts.export_lora(str(tmp_path), state, rank=2, alpha=4, target_modules=["attn.to_q"])
    weights = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    assert {name: tensor.max().item() for name, tensor in weights.items()} == {
        f"transformer.{key}": 1.0,
        f"transformer_2.{key}": 0.0,
    }
    with pytest.raises(ContractError, match="no LoRA weights of transformer_2"):
        two_experts.export_lora(str(tmp_path), {**state, "transformer_2": {}}, rank=2, alpha=4, target_modules=[])
