"""HPSv2: which image people prefer for a prompt, by a CLIP ViT-H/14 tuned on their choices.

Legend: b samples, D width of a tower.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from unirl.reward.card import ScorerCard
from unirl.reward.local.images.clip import CLIPModelScorer
from unirl.reward.local.pixels import to_bytes
from unirl.reward.local.preprocess import PadPreprocessing
from unirl.reward.local.pretrained import (
    check_dtype,
    check_source,
    load_complete,
    load_state,
    load_transformers,
    on_one_line,
)
from unirl.types.bounds import Bounds, PositiveInt, bounded
from unirl.types.errors import ConfigError

_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_OUTSIDE_BLOCKS = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    "logit_scale": "logit_scale",
}
_PROJECTIONS = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
"""open_clip multiplies by these from the right, transformers holds them as weights of linear layers."""
_IN_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+?)(?:\.|_)(weight|bias)")


@bounded("scorer")
class HPSv2RewardScorer(CLIPModelScorer):
    """cos(image, prompt) * `scale` under the HPSv2 or HPSv2.1 weights.

    checkpoint: folder or hub id with `file`, the published weights in the names of open_clip. None: `model` itself
    holds the weights. file: HPS_v2.1_compressed.pt or HPS_v2_compressed.pt.
    model: folder or hub id of the CLIP ViT-H/14 in transformers' format, for its configuration and tokenizer.
    scale: 1 gives the published cosine, about 0.2 to 0.35; papers often print 100 times that.
    dtype: of the two towers, "fp32", "bf16" or "fp16". Needs the extra `clip`.
    An image becomes 224 x 224 with black bars, by antialiased bicubic resizing of float pixels, as the hpsv2 package
    does with torchvision 0.17 and later; before, it did not antialias. So `score` and `score_with_gradient` differ only
    by the rounding of pixels to bytes that `score` starts with.
    With random weights model and images agree with the code of the hpsv2 package 1.2.0 bit for bit; the published
    weights themselves were not at hand.
    Raises ConfigError if weights cannot be loaded or do not fit, ImportError without transformers.
    Source: Human Preference Score v2 (arXiv 2306.09341).
    """

    model_billions = 0.986
    card = ScorerCard(
        name="hpsv2",
        summary="which image people prefer for a prompt; HPSv2.1, or 2 by `file`",
        media=("image",),
        needs="prompt",
        low=-1,
        high=1,
        typical="cosine, 0.2 to 0.35",
        extra="clip",
        source="HPSv2, arXiv 2306.09341",
    )

    def __init__(
        self,
        *,
        checkpoint: str | None = "xswu/HPSv2",
        file: str = "HPS_v2.1_compressed.pt",
        model: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        scale: Annotated[float, Bounds()] = 1.0,
        dtype: str = "fp32",
        device: str = "cpu",
        name: str = "hpsv2",
        batch_size: PositiveInt = 8,
    ) -> None:
        check_dtype(dtype, name)
        if scale == 0:
            raise ConfigError(f"scorer {name}: scale = {scale} must be a number other than 0")
        transformers = load_transformers(f"scorer {name}")
        check_source(model, f"scorer {name}: model")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(model)
            config = transformers.CLIPConfig.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"scorer {name}: cannot load model {model!r}: {error}") from error
        if checkpoint is None:
            what = f"scorer {name}: model"
            loaded = load_complete(transformers.CLIPModel, model, what, device=device, dtype=torch.float32)
        else:
            loaded = transformers.CLIPModel(config)
            option = f"scorer {name}: checkpoint"
            state = from_open_clip(load_state(checkpoint, file, option))
            try:
                loaded.load_state_dict(state)
            except RuntimeError as error:
                raise ConfigError(
                    f"{option} = {checkpoint!r}: {file} does not fit model {model!r}: {on_one_line(error)}"
                ) from error
        super().__init__(
            model=loaded,
            tokenizer=tokenizer,
            scale=scale,
            dtype=dtype,
            device=device,
            name=name,
            batch_size=batch_size,
        )
        self._preprocess = PadPreprocessing(loaded.config.vision_config.image_size)

    def model_input(self, pixels_bCHW: Tensor) -> Tensor:
        """Model input from the pixels rounded to bytes."""
        rounded = torch.from_numpy(to_bytes(pixels_bCHW)).permute(0, 3, 1, 2).float() / 255
        return self._preprocess(rounded)

    def model_input_with_gradient(self, pixels_bCHW: Tensor) -> Tensor:
        """Model input from the float pixels."""
        return self._preprocess(pixels_bCHW)


def from_open_clip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of an open_clip CLIP model under the names of transformers' CLIPModel.

    Names that are not known pass unchanged, so that loading names them.
    """
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        block = _IN_BLOCK.fullmatch(name)
        stem, _, kind = name.rpartition(".")
        if block is not None:
            tower = "vision_model" if block[1] else "text_model"
            layer = f"{tower}.encoder.layers.{block[2]}"
            if block[3] == "attn.in_proj":
                for part, piece in zip("qkv", value.chunk(3), strict=True):
                    found[f"{layer}.self_attn.{part}_proj.{block[4]}"] = piece
            else:
                found[f"{layer}.{_BLOCK.get(block[3], block[3])}.{block[4]}"] = value
        elif name in _PROJECTIONS:
            found[_PROJECTIONS[name]] = value.T
        elif name in _OUTSIDE_BLOCKS:
            found[_OUTSIDE_BLOCKS[name]] = value
        elif stem in _OUTSIDE_BLOCKS:
            found[f"{_OUTSIDE_BLOCKS[stem]}.{kind}"] = value
        elif name != "attn_mask":  # the causal mask, a buffer
            found[name] = value
    return found
