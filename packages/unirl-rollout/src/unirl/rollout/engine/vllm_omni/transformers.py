"""Builds and calls vLLM-Omni's transformer of each family. Runs inside its workers.

Legend: B samples, L tokens, D width, p latent pixels on a side of a token.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unirl.rollout.engine.served_latents.call import SampleLatents
from unirl.rollout.engine.served_latents.folder import CONFIG_FILE
from unirl.rollout.engine.served_latents.tokens import as_tokens, from_tokens
from unirl.sde.known_latents import towards
from unirl.types.batch import rows_by
from unirl.types.errors import ContractError

_MODELS = "vllm_omni.diffusion.models"
_TIMESTEPS_PER_SIGMA = 1000.0
_CHANNELS_OF_SOUND = "channels_of_sound"
_FRAMES_PER_SECOND = 24.0
"""Rate by which LTX-2's attention places frames next to sound."""


Grids = tuple[tuple[int, int, int], ...]
"""(frames, rows, columns) in tokens of each image of a sample."""


@dataclass(frozen=True)
class Pictures:
    """Images of samples as tokens that stand after those of the latents, with the same sizes in every sample."""

    tokens: Tensor
    """[B, L, D] in the transformer's dtype."""
    grids: Grids

    def beside(self, inputs: dict[str, Any]) -> dict[str, Any]:  # Any: keywords of vLLM-Omni's transformers
        """Keywords of a forward on tokens with these images."""
        return {
            **inputs,
            "hidden_states": torch.cat([inputs["hidden_states"], self.tokens], dim=1),
            "img_shapes": [[*shapes, *self.grids] for shapes in inputs["img_shapes"]],
        }


@dataclass(frozen=True)
class PlacedPictures:
    """Images of samples as tokens that stand after those of the latents, each at a later time than the one before."""

    tokens: Tensor
    """[B, L, D] in the transformer's dtype."""
    grids: Grids
    time_between: int
    """On the first axis of the places; the latents stand at 0."""

    def beside(self, inputs: dict[str, Any]) -> dict[str, Any]:  # Any: keywords of vLLM-Omni's transformers
        """Keywords of a forward on tokens with these images."""
        placed = [inputs["img_ids"]]
        for number, grid in enumerate(self.grids, start=1):
            more = [1] * (placed[0].shape[1] - len(grid))
            own = _places(*grid, *more, device=placed[0].device)
            own[:, 0] += self.time_between * number
            placed.append(own)
        tokens = torch.cat([inputs["hidden_states"], self.tokens], dim=1)
        return {**inputs, "hidden_states": tokens, "img_ids": torch.cat(placed)}


@dataclass(frozen=True)
class Surroundings:
    """The image around a hole, and the hole, next to each token of the latents (FLUX.1 Fill)."""

    latents: Tensor
    """[B, C, h, w]."""

    def beside(self, inputs: dict[str, Any]) -> dict[str, Any]:  # Any: keywords of vLLM-Omni's transformers
        """Keywords of a forward on tokens with them."""
        x = inputs["hidden_states"]
        return {**inputs, "hidden_states": torch.cat([x, as_tokens(self.latents.to(x.dtype), 2)], dim=2)}


@dataclass(frozen=True)
class Frames:
    """Given frames of videos next to the latents, and the features of their images."""

    latents: Tensor
    """[B, C, f, h, w] with a mask of the given frames."""
    features: Tensor | None
    """[B, L, D] of the images of a sample, one after the other; None where the transformer reads none."""
    num_images: int

    def beside(self, inputs: dict[str, Any]) -> dict[str, Any]:  # Any: keywords of vLLM-Omni's transformers
        """Keywords of a forward with these frames."""
        x = inputs["hidden_states"]
        own = {**inputs, "hidden_states": torch.cat([x, self.latents.to(x.dtype)], dim=1)}
        if self.features is not None:
            # The transformer joins the images of a sample itself.
            features = self.features.to(x.dtype).unflatten(1, (self.num_images, -1))
            own["encoder_hidden_states_image"] = features.flatten(0, 1)
        return own


@dataclass(frozen=True)
class FirstFrame:
    """The first latent frame of videos, which stays as it is given."""

    latents: Tensor
    """[B, C, 1, h, w] in float32."""

    def beside(self, inputs: dict[str, Any]) -> dict[str, Any]:  # Any: keywords of vLLM-Omni's transformers
        """Keywords of a forward with the frame in its place, whose tokens have a timestep of 0."""
        x = inputs["hidden_states"]
        frames, height, width = x.shape[-3:]
        _, *sides = inputs["transformer"].config.patch_size
        per_frame = height * width // math.prod(sides)
        is_free = torch.arange(frames * per_frame, device=x.device) >= per_frame
        return {
            **inputs,
            "hidden_states": torch.cat([self.latents.to(x.dtype), x[:, :, 1:]], dim=2),
            "timestep": inputs["timestep"][:, None] * is_free,
        }

    def kept(self, velocity: Tensor, x: Tensor, sigma_B: Tensor) -> Tensor:
        """A velocity [B, C, f, h, w] at x with that to the frame in its place, see `unirl.sde.known_latents`."""
        first = towards(self.latents, x[:, :, :1], sigma_B)
        return torch.cat([first, velocity[:, :, 1:].to(first.dtype)], dim=2)


@dataclass(frozen=True)
class MaskedFirstFrame:
    """The first latent frame of videos, in the channels that HunyuanVideo 1.5 has for given frames and their mask."""

    latents: Tensor
    """[B, C, 1, h, w]."""
    features: Tensor
    """[B, L, D] of the image."""

    def beside(self, inputs: dict[str, Any]) -> dict[str, Any]:  # Any: keywords of vLLM-Omni's transformers
        """Keywords of a forward with the frame, whose channels are zeros without one."""
        x = inputs["hidden_states"].clone()
        first = torch.cat([self.latents, torch.ones_like(self.latents[:, :1])], dim=1)
        x[:, -first.shape[1] :, :1] = first.to(x.dtype)
        return {**inputs, "hidden_states": x, "image_embeds": self.features.to(x.dtype)}


@dataclass(frozen=True)
class VideoAndSound:
    """The two parts of a latent of LTX-2, one after the other: video [C, f, h, w], then sound [A, P, M]. Texts have
    features for each of them."""

    video: tuple[int, int, int, int]
    sound: tuple[int, int, int]
    text_width: int
    """Numbers of a text's token that are for the video."""

    def beside(self, inputs: dict[str, Any]) -> dict[str, Any]:  # Any: keywords of vLLM-Omni's transformers
        """Keywords of a forward on the tokens of both."""
        video, sound = inputs["hidden_states"].split([math.prod(self.video), math.prod(self.sound)], dim=1)
        _, frames, height, width = self.video
        text = inputs["encoder_hidden_states"]
        return {
            **inputs,
            "encoder_hidden_states": text[..., : self.text_width],
            "audio_encoder_hidden_states": text[..., self.text_width :],
            "hidden_states": video.unflatten(1, self.video).flatten(2).transpose(1, 2),
            "audio_hidden_states": sound.unflatten(1, self.sound).transpose(1, 2).flatten(2),
            "num_frames": frames,
            "height": height,
            "width": width,
            "audio_num_frames": self.sound[1],
            _CHANNELS_OF_SOUND: self.sound[0],
        }


Given = Pictures | PlacedPictures | Surroundings | Frames | FirstFrame | MaskedFirstFrame | VideoAndSound
"""What a forward needs to know of samples besides their latents and texts."""


@dataclass(frozen=True)
class Text:
    """An encoded prompt of every sample, on the device of the latents."""

    embeds: Tensor
    """[B, L, D] in the transformer's dtype."""
    mask: Tensor | None
    """[B, L]; None if there is no padding."""
    pooled: Tensor | None

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each text without padding."""
        num, length = self.embeds.shape[:2]
        return [length] * num if self.mask is None else self.mask.bool().sum(dim=1).tolist()

    def select(self, rows: list[int]) -> Text:
        """Some samples."""
        mask, pooled = (None if each is None else each[rows] for each in (self.mask, self.pooled))
        return Text(self.embeds[rows], mask, pooled)


Texts = Mapping[str, Text]
"""By slot: "text", and "text_2" in families with two separate encoders."""

Inputs = Callable[[Tensor, Tensor, Texts, Any], dict[str, Any]]  # Any: keywords of vLLM-Omni's transformers
"""(latents [B, ...] in the transformer's dtype, sigma float32 [B], texts, transformer) -> keywords of its forward."""


def _forward(transformer: Any, inputs: dict[str, Any]) -> Tensor:
    out: Tensor = transformer(**inputs, return_dict=False)[0]
    return out


def _mend_nothing(transformer: Any) -> None:
    del transformer


GivenFrames = Callable[[Tensor, Tensor | None, Any], Given]
"""(latents that are given, features of their images, transformer) -> what a forward gets of them."""


Streams = Callable[[Path, Any, SampleLatents], Given]
"""(pipeline folder, transformer, call) -> where the parts of a latent are."""


def _no_frames(latents: Tensor, features: Tensor | None, transformer: Any) -> Given:
    raise ContractError("this family has no given frames")


@dataclass(frozen=True)
class Native:
    """A transformer of vLLM-Omni."""

    module: str
    """Module path relative to vllm_omni.diffusion.models."""
    name: str
    inputs: Inputs
    token_side: int = 0
    """p if the transformer works on tokens, 0 if on latents."""
    normalises_guidance: bool = False
    """True if each token of a guided velocity is rescaled to the norm of the conditional one."""
    forward: Callable[[Any, dict[str, Any]], Tensor] = _forward
    """(transformer, keywords) -> its velocity, or tokens of it."""
    mend: Callable[[Any], None] = _mend_nothing
    """Corrects a transformer that was built."""
    pictures: Callable[[Tensor, Grids], Given] = Pictures
    """(tokens [B, L, D], their grids) -> what a forward gets of images that are tokens."""
    given_frames: GivenFrames = _no_frames
    streams: Streams | None = None
    """None where a latent is one image or video."""
    unguided_scale: float = 1.0
    """The trainer's guidance scale for samples without guidance; vLLM-Omni's is 1."""
    text_block: int = 0
    """Tokens of the blocks that texts are filled up to, if every token of a forward is attended to: rows whose texts
    fill as many blocks go together. 0 where masks are read, or all texts have one length."""
    renamed_layers: Mapping[str, str] = field(default_factory=dict)
    """Parts of linear-layer names in checkpoints -> vLLM-Omni's names. Its weight loaders rename them, its adapter
    loader does not."""

    def layer_name(self, name: str) -> str:
        """vLLM-Omni's name of a layer, a tensor, or a common suffix of layers."""
        for theirs, own in self.renamed_layers.items():
            name = name.replace(theirs, own)
        return name

    def rows_together(self, texts: Texts) -> list[list[int]]:
        """Rows of each forward."""
        if not self.text_block:
            return [list(range(len(next(iter(texts.values())).embeds)))]
        lengths = [text.lengths for text in texts.values()]
        blocks = [tuple(-(-length // self.text_block) for length in row) for row in zip(*lengths, strict=True)]
        return list(rows_by(blocks).values())

    def build(self, od_config: Any, folder: Path) -> Any:  # Any: vLLM-Omni's own
        """The transformer of a component's folder under a vLLM-Omni configuration, without weights."""
        model_class = getattr(importlib.import_module(f"{_MODELS}.{self.module}"), self.name)
        utils = importlib.import_module("vllm_omni.diffusion.utils.tf_utils")
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        sizes = utils.get_transformer_config_kwargs(type(od_config.tf_model_config).from_dict(config), model_class)
        own = {"od_config": od_config, "quant_config": od_config.quantization_config}
        taken = inspect.signature(model_class.__init__).parameters
        transformer = model_class(
            **{name: tuple(size) if isinstance(size, list) else size for name, size in sizes.items()},
            **{name: value for name, value in own.items() if name in taken},
        )
        self.mend(transformer)
        return transformer

    def velocity(self, out: Tensor, shape: torch.Size) -> Tensor:
        """Velocity [B, ...] from the transformer's output, whose first tokens are those of the latents."""
        if not self.token_side:
            return out
        height, width = shape[-2:]
        return from_tokens(out[:, : height * width // self.token_side**2], self.token_side, height, width)


def _sd3(x: Tensor, sigma_B: Tensor, texts: Texts, transformer: Any) -> dict[str, Any]:
    text = texts["text"]
    return {
        "hidden_states": x,
        "timestep": sigma_B * _TIMESTEPS_PER_SIGMA,
        "encoder_hidden_states": text.embeds,
        "pooled_projections": text.pooled,
    }


def _qwen_image(x: Tensor, sigma_B: Tensor, texts: Texts, transformer: Any) -> dict[str, Any]:
    text, (height, width) = texts["text"], x.shape[-2:]
    num, length = text.embeds.shape[:2]
    return {
        "hidden_states": as_tokens(x, 2),
        "timestep": sigma_B.to(x.dtype),
        "encoder_hidden_states": text.embeds,
        "encoder_hidden_states_mask": text.mask,
        "img_shapes": [[(1, height // 2, width // 2)]] * num,
        "txt_seq_lens": [length] * num,
    }


def _flux2_klein(x: Tensor, sigma_B: Tensor, texts: Texts, transformer: Any) -> dict[str, Any]:
    text, (height, width) = texts["text"], x.shape[-2:]
    return {
        "hidden_states": as_tokens(x, 1),
        "timestep": sigma_B,
        "encoder_hidden_states": text.embeds,
        "img_ids": _places(1, height, width, 1, device=x.device),
        "txt_ids": _places(1, 1, 1, text.embeds.shape[1], device=x.device),
    }


def _flux(x: Tensor, sigma_B: Tensor, texts: Texts, transformer: Any) -> dict[str, Any]:
    text, (height, width) = texts["text"], x.shape[-2:]
    return {
        "hidden_states": as_tokens(x, 2),
        "timestep": sigma_B,
        "encoder_hidden_states": text.embeds,
        "pooled_projections": text.pooled,
        "img_ids": _places(1, height // 2, width // 2, device=x.device),
        "txt_ids": torch.zeros(text.embeds.shape[1], 3, dtype=torch.int64, device=x.device),
    }


def _surroundings(latents: Tensor, features: Tensor | None, transformer: Any) -> Given:
    del features, transformer
    return Surroundings(latents)


def _mend_flux(transformer: Any) -> None:
    """vLLM-Omni's adapters look here for the layers that one product computes; its other transformers say it."""
    transformer.stacked_params_mapping = [
        (f".{whole}", f".{part}", place)
        for whole, parts in transformer.packed_modules_mapping.items()
        for place, part in enumerate(parts)
    ]


def _z_image(x: Tensor, sigma_B: Tensor, texts: Texts, transformer: Any) -> dict[str, Any]:
    text = texts["text"]
    return {
        "x": list(x[:, :, None].unbind(0)),
        "t": (_TIMESTEPS_PER_SIGMA - sigma_B * _TIMESTEPS_PER_SIGMA) / _TIMESTEPS_PER_SIGMA,
        "cap_feats": [row[:end] for row, end in zip(text.embeds, text.lengths, strict=True)],
    }


def _z_image_forward(transformer: Any, inputs: dict[str, Any]) -> Tensor:
    """From noise to image, of a single frame."""
    return -torch.stack(transformer(**inputs)[0])[:, :, 0]


def _wan(x: Tensor, sigma_B: Tensor, texts: Texts, transformer: Any) -> dict[str, Any]:
    return {
        "hidden_states": x,
        "timestep": sigma_B * _TIMESTEPS_PER_SIGMA,
        "encoder_hidden_states": texts["text"].embeds,
    }


def _wan_frames(latents: Tensor, features: Tensor | None, transformer: Any) -> Given:
    """Those of TI2V-5B have all channels that the transformer reads, and stay in their place."""
    if latents.shape[1] == transformer.config.in_channels:
        return FirstFrame(latents.float())
    return Frames(latents, features, num_images=1 if transformer.config.pos_embed_seq_len is None else 2)


def _mend_wan(transformer: Any) -> None:
    """vLLM-Omni normalises the features of images with its default, 1e-6; Wan does with torch's."""
    if (embedder := transformer.condition_embedder.image_embedder) is not None:
        embedder.norm1.eps = embedder.norm2.eps = 1e-5


def _hunyuan_video15(x: Tensor, sigma_B: Tensor, texts: Texts, transformer: Any) -> dict[str, Any]:
    text, glyphs = texts["text"], texts["text_2"]
    given_frames = x.new_zeros(len(x), x.shape[1] + 1, *x.shape[2:])
    image_width = transformer.image_embedder.norm_in.normalized_shape[0]
    return {
        "hidden_states": torch.cat([x, given_frames], dim=1),
        "timestep": (sigma_B * _TIMESTEPS_PER_SIGMA).to(x.dtype),
        "encoder_hidden_states": text.embeds,
        "encoder_attention_mask": _mask(text),
        "encoder_hidden_states_2": glyphs.embeds,
        "encoder_attention_mask_2": _mask(glyphs),
        "image_embeds": x.new_zeros(len(x), 0, image_width),
    }


def _hunyuan_frames(latents: Tensor, features: Tensor | None, transformer: Any) -> Given:
    if features is None:
        raise ContractError("HunyuanVideo 1.5 reads features of the given image, and the request has none")
    return MaskedFirstFrame(latents, features)


def _ltx2(x: Tensor, sigma_B: Tensor, texts: Texts, transformer: Any) -> dict[str, Any]:
    text, timestep_B = texts["text"], sigma_B * _TIMESTEPS_PER_SIGMA
    return {
        "hidden_states": x,
        "timestep": timestep_B[:, None],
        "sigma": timestep_B,
        "encoder_hidden_states": text.embeds,
        "encoder_attention_mask": _mask(text),
        "audio_encoder_attention_mask": _mask(text),
        "fps": _FRAMES_PER_SECOND,
    }


def _ltx2_streams(folder: Path, transformer: Any, call: SampleLatents) -> Given:
    time, side, _ = transformer.config.vae_scale_factors
    video = (
        transformer.config.in_channels,
        (call.num_frames - 1) // time + 1,
        call.height // side,
        call.width // side,
    )
    vae, connectors = (
        json.loads((folder / name / CONFIG_FILE).read_text(encoding="utf-8")) for name in ("audio_vae", "connectors")
    )
    rest, width = math.prod(call.noise_shape) - math.prod(video), transformer.config.audio_in_channels
    channels = vae["latent_channels"]
    text_width = connectors["video_connector_num_attention_heads"] * connectors["video_connector_attention_head_dim"]
    return VideoAndSound(video, (channels, rest // width, width // channels), text_width)


def _ltx2_forward(transformer: Any, inputs: dict[str, Any]) -> Tensor:
    """[B, N] as a latent lies."""
    inputs = dict(inputs)
    channels = inputs.pop(_CHANNELS_OF_SOUND)
    video, sound = transformer(**inputs, return_dict=False)
    sound = sound.unflatten(2, (channels, -1)).transpose(1, 2)
    return torch.cat([video.transpose(1, 2).flatten(1), sound.flatten(1)], dim=1)


def _mask(text: Text) -> Tensor:
    return torch.ones(text.embeds.shape[:2], device=text.embeds.device) if text.mask is None else text.mask


def _places(*sizes: int, device: torch.device) -> Tensor:
    """Coordinates [product of sizes, number of axes] of tokens, the last axis fastest."""
    return torch.cartesian_prod(*(torch.arange(size, device=device) for size in sizes))


_QWEN_IMAGE = Native(
    "qwen_image.qwen_image_transformer",
    "QwenImageTransformer2DModel",
    _qwen_image,
    token_side=2,
    normalises_guidance=True,
    renamed_layers={"to_out.0": "to_out"},
)
_FLUX = Native("flux.flux_transformer", "FluxTransformer2DModel", _flux, token_side=2, mend=_mend_flux)
_WAN = Native(
    "wan2_2.wan2_2_transformer",
    "WanTransformer3DModel",
    _wan,
    mend=_mend_wan,
    given_frames=_wan_frames,
    renamed_layers={"to_out.0": "to_out", "ffn.net.0.": "ffn.net_0.", "ffn.net.2": "ffn.net_2"},
)
_HUNYUAN_VIDEO15 = Native(
    "hunyuan_video.hunyuan_video_15_transformer",
    "HunyuanVideo15Transformer3DModel",
    _hunyuan_video15,
    given_frames=_hunyuan_frames,
)
NATIVE: Mapping[str, Native] = {
    "StableDiffusion3Pipeline": Native("sd3.sd3_transformer", "SD3Transformer2DModel", _sd3),
    "QwenImagePipeline": _QWEN_IMAGE,
    "QwenImageEditPipeline": _QWEN_IMAGE,
    "QwenImageEditPlusPipeline": _QWEN_IMAGE,
    "FluxPipeline": _FLUX,
    "FluxKontextPipeline": replace(_FLUX, pictures=partial(PlacedPictures, time_between=1)),
    "FluxFillPipeline": replace(_FLUX, given_frames=_surroundings),
    "Flux2KleinPipeline": Native(
        "flux2_klein.flux2_klein_transformer",
        "Flux2Transformer2DModel",
        _flux2_klein,
        token_side=1,
        pictures=partial(PlacedPictures, time_between=10),
    ),
    "ZImagePipeline": Native(
        "z_image.z_image_transformer",
        "ZImageTransformer2DModel",
        _z_image,
        forward=_z_image_forward,
        unguided_scale=0.0,
        text_block=32,
    ),
    "WanPipeline": _WAN,
    "WanImageToVideoPipeline": _WAN,
    "HunyuanVideo15Pipeline": _HUNYUAN_VIDEO15,
    "HunyuanVideo15ImageToVideoPipeline": _HUNYUAN_VIDEO15,
    "LTX2Pipeline": Native(
        "ltx2.ltx2_transformer",
        "LTX2VideoTransformer3DModel",
        _ltx2,
        forward=_ltx2_forward,
        streams=_ltx2_streams,
    ),
}
"""Pipeline class in a checkpoint's index -> transformer."""
