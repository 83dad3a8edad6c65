"""ImageReward: how much people like an image for a prompt, by a BLIP that reads the prompt while looking.

Legend: b samples, T tokens, D width of the text tower.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from unirl.reward.base import LocalScorer
from unirl.reward.card import Normalisation, ScorerCard
from unirl.reward.local.pixels import check_pixels, to_pictures
from unirl.reward.local.preprocess import CropPreprocessing, at_least_float32
from unirl.reward.local.pretrained import (
    check_dtype,
    check_source,
    load_state,
    load_transformers,
    on_one_line,
    source_file,
)
from unirl.types.bounds import PositiveInt
from unirl.types.errors import ConfigError
from unirl.types.precision import DTYPES
from unirl.types.reward import RewardRequest

REWARD_MEAN = 0.16717362830052426
REWARD_STD = 1.0333394966054072
"""Over the authors' test set; the published score is the raw output less the mean, divided by this."""
NUM_TOKENS = 35
"""Longer prompts are cut and shorter ones padded, as published."""
HEAD_WIDTH = 64
"""Width of an attention head of BLIP's image tower, base and large alike."""
VISION_EPS = 1e-6
"""Layer-norm epsilon of BLIP's image tower; transformers' own default is 1e-5."""

_VISION = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj": "embeddings.patch_embedding",
    "norm": "post_layernorm",
}
_VISION_BLOCK = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


class ImageRewardScorer(LocalScorer):
    """(head(text tower(prompt, image)) - REWARD_MEAN) / REWARD_STD, about -2.3 to 2.

    normalise: (score + 2) / 4, about 0 to 1.
    model: folder or hub id with ImageReward.pt and med_config.json, as published. tokenizer: folder or hub id of the
    BERT tokenizer; the two words that BLIP adds to it never occur in a prompt.
    dtype: of the two towers, "fp32", "bf16" or "fp16"; the head runs in fp32. Needs the extra `clip`.
    Images go through CLIP's processor on PIL (shortest edge and centre crop); with gradients through
    `CropPreprocessing`, which differs by what rounding to bytes does.
    Names and layout of the checkpoint are those of the image-reward package 1.5: with random weights this class gives
    the values of that package's code bit for bit. The published weights themselves were not at hand.
    Raises ConfigError if weights cannot be loaded or do not fit, ImportError without transformers.
    Source: ImageReward (arXiv 2304.05977).
    """

    is_differentiable: ClassVar[bool] = True
    model_billions = 0.442
    card = ScorerCard(
        name="image_reward",
        summary="how much people like an image for a prompt",
        media=("image",),
        needs="prompt",
        typical="standard deviations, -2.3 to 2",
        normalisation=Normalisation(4, offset=2),
        extra="clip",
        source="ImageReward, arXiv 2304.05977",
    )

    def __init__(
        self,
        *,
        model: str = "THUDM/ImageReward",
        tokenizer: str = "google-bert/bert-base-uncased",
        normalise: bool = False,
        dtype: str = "fp32",
        device: str = "cpu",
        name: str = "image_reward",
        batch_size: PositiveInt = 8,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size, device=device, normalise=normalise)
        check_dtype(dtype, name)
        transformers = load_transformers(f"scorer {name}")
        option = f"scorer {name}: model"
        state = load_state(model, "ImageReward.pt", option)
        settings = json.loads(source_file(model, "med_config.json", option).read_text(encoding="utf-8"))
        check_source(tokenizer, f"scorer {name}: tokenizer")
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
        except (OSError, ValueError) as error:
            raise ConfigError(f"scorer {name}: cannot load tokenizer {tokenizer!r}: {error}") from error
        try:
            vision, text, head = towers(transformers, state, settings)
        except (KeyError, RuntimeError) as error:
            raise ConfigError(
                f"{option} = {model!r} holds other weights than ImageReward's: {on_one_line(error)}"
            ) from error
        for module in (vision, text):
            module.to(device=device, dtype=DTYPES[dtype])
        self._modules = [module.eval().requires_grad_(False) for module in (vision, text, head.to(device))]
        side = vision.config.image_size
        self._processor = transformers.CLIPImageProcessorPil(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}
        )
        self._preprocess = CropPreprocessing.of(self._processor, f"scorer {name}")

    def modules(self) -> list[nn.Module]:
        """The image tower, the text tower and the head."""
        return self._modules

    def score_batch(self, request: RewardRequest) -> Tensor:
        """Standardised reward, float32 [b]."""
        ready = self._processor(images=to_pictures(request.pixels), return_tensors="pt")
        return self._scores(request.prompts, ready["pixel_values"])

    def score_batch_with_gradient(self, request: RewardRequest) -> Tensor:
        """Standardised reward [b] with gradients to the pixels."""
        check_pixels(request.pixels)
        return self._scores(request.prompts, self._preprocess(request.pixels))

    def _scores(self, prompts: list[str], input_bCHW: Tensor) -> Tensor:
        vision, text, head = self._modules
        tokens = self._tokenizer(
            prompts, padding="max_length", truncation=True, max_length=NUM_TOKENS, return_tensors="pt"
        ).to(self.device)
        dtype = next(vision.parameters()).dtype
        seen = vision(pixel_values=input_bCHW.to(self.device, dtype)).last_hidden_state
        read = text(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=seen,
            is_decoder=False,
        ).last_hidden_state
        raw_b = head(at_least_float32(read[:, 0])).squeeze(-1)
        return (raw_b - REWARD_MEAN) / REWARD_STD


def towers(
    transformers: Any,  # Any: optional
    state: Mapping[str, Tensor],
    text_settings: Mapping[str, Any],  # Any: a JSON file
) -> tuple[Any, Any, nn.Sequential]:
    """Image tower, text tower and head with the weights of `state`, sized by them and by `text_settings`.

    state: "blip.visual_encoder.*", "blip.text_encoder.*" and "mlp.layers.<i>.*"; the projections that only BLIP's own
    training used are left out. text_settings: the BERT settings of med_config.json.
    Raises KeyError or RuntimeError naming weights that are missing, unknown or of another shape.
    """
    vision_state = _named_as_transformers(_under(state, "blip.visual_encoder."))
    text_state = _under(state, "blip.text_encoder.")
    text_state.pop("embeddings.position_ids", None)  # a buffer, not a weight
    head_state = _under(state, "mlp.layers.")
    patch = vision_state["embeddings.patch_embedding.weight"]
    num_patches = vision_state["embeddings.position_embedding"].shape[1] - 1
    width = patch.shape[0]
    vision = transformers.BlipVisionModel(
        transformers.BlipVisionConfig(
            hidden_size=width,
            intermediate_size=vision_state["encoder.layers.0.mlp.fc1.weight"].shape[0],
            num_hidden_layers=1 + max(int(key.split(".")[2]) for key in vision_state if ".layers." in key),
            num_attention_heads=max(width // HEAD_WIDTH, 1),
            image_size=math.isqrt(num_patches) * patch.shape[-1],
            patch_size=patch.shape[-1],
            layer_norm_eps=VISION_EPS,
        )
    )
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    names += ("max_position_embeddings", "layer_norm_eps", "hidden_act")
    text = transformers.BlipTextModel(
        transformers.BlipTextConfig(
            **{key: text_settings[key] for key in names},
            encoder_hidden_size=width,
            is_decoder=True,  # with cross-attention; it still reads in both directions
        ),
        add_pooling_layer=False,
    )
    # Published between dropouts, which count as layers: 0, 2, 4, 6, 7.
    places = sorted({int(key.split(".")[0]) for key in head_state})
    shapes = [head_state[f"{place}.weight"].shape for place in places]
    head = nn.Sequential(*(nn.Linear(shape[1], shape[0]) for shape in shapes))
    vision.load_state_dict(vision_state)
    text.load_state_dict(text_state)
    head.load_state_dict(
        {f"{i}.{kind}": head_state[f"{p}.{kind}"] for i, p in enumerate(places) for kind in ("weight", "bias")}
    )
    return vision, text, head


def _under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _named_as_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of BLIP's image tower under transformers' names; unknown names pass, so that loading names them."""
    found = {}
    for name, value in state.items():
        stem, _, kind = name.rpartition(".")
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)", stem)
        if block is not None:
            found[f"encoder.layers.{block[1]}.{_VISION_BLOCK.get(block[2], block[2])}.{kind}"] = value
        elif name in _VISION:
            found[_VISION[name]] = value
        else:
            found[f"{_VISION.get(stem, stem)}.{kind}"] = value
    return found
