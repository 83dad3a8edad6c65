"""Wan from images: the first frame of a video is given, or the first and the last.

Equal to WanImageToVideoPipeline of diffusers. Shape letters: see `unirl.models`; f latent frames, D width of features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.references import as_pil, pictures_of, resized
from unirl.models.diffusers_pipeline.text import weights_digest
from unirl.models.embedding_cache import Embedding
from unirl.models.wan.adapter import WanAdapter
from unirl.models.wan.bundle import WanImageBundle
from unirl.sde.known_latents import towards
from unirl.types.conditions import Condition, ImageEmbedCondition, ImageLatentCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Primitive, Videos
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

GREY = 0.5
"""Pixel value of the frames that are not given; 0 for the VAE."""
CLIP_TEXT_TOKENS = 512
"""Where features of images end and text begins: the attention of Wan 2.1 counts them from the end."""


class WanImageAdapter(WanAdapter[WanImageBundle]):
    """Conditions besides those of `WanAdapter`: "image", and "image_embeds" of Wan 2.1.

    "image": latents of the video whose other frames are grey, under a mask of the given frames, [4 + 16, f, h, w]; of
    TI2V-5B those of the first frame alone. "image_embeds": CLIP features of each image, one after the other.
    The slot "image" of a request brings the first frame of each sample, or the first and the last; they are resized to
    the sampled size. Equal images are encoded once.
    """

    read_slots = WanAdapter.read_slots | {"image"}

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError for another text length than that which Wan 2.1 counts on, too."""
        super().check_params(params)
        counts_tokens = self.bundle.transformer.config["added_kv_proj_dim"] is not None
        if counts_tokens and self.sequence_length(params) != CLIP_TEXT_TOKENS:
            raise ConfigError(
                f"max_sequence_length = {params.max_sequence_length}: the transformer of "
                f"{self.bundle.pretrained_model} needs {CLIP_TEXT_TOKENS}. Set sampling.max_sequence_length: null."
            )

    def encode_inputs(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """The images of each sample as latents of a video and as features."""
        fewest, most = self.bundle.num_images
        samples = pictures_of(primitives, self.bundle.family, fewest=fewest, most=most) or []
        if params.num_frames == 1 and any(len(sample) > 1 for sample in samples):
            raise ConfigError("num_frames = 1 has no last frame. Set sampling.num_frames or give one image per sample.")
        keys = [self.media_key("image", params, *sample) for sample in samples]
        rows = self.encoded_once(keys, lambda place: self._given_latents(samples[place], params))
        conditions: dict[str, Condition] = {"image": self.stacked(rows)}
        if "image_encoder" in self.bundle.modules:
            conditions["image_embeds"] = self.image_embeds(samples)
        return conditions

    def image_embeds(self, samples: Sequence[list[Tensor]]) -> ImageEmbedCondition:
        """CLIP features of the images of each sample."""
        keys = [self.media_key("image", None, *sample, fingerprint=self._clip_fingerprint) for sample in samples]
        rows = self.encoded_once(keys, lambda place: self._features(samples[place]))
        return ImageEmbedCondition(embeds=torch.stack([row["embeds"] for row in rows]).to(self.bundle.device))

    def inputs_beside_text(self, x_R: Tensor, conditions: Conditions) -> dict[str, Tensor]:
        """Latents next to the given ones or in their place, and the features of each image."""
        given = require_condition(conditions, "image", ImageLatentCondition).latents.to(x_R.device)
        if self.bundle.masks_timesteps:
            inputs = {"hidden_states": torch.cat([given.to(x_R.dtype), x_R[:, :, 1:]], dim=2)}
        else:
            inputs = {"hidden_states": torch.cat([x_R, given.to(x_R.dtype)], dim=1)}
        if "image_encoder" in self.bundle.modules:
            embeds = require_condition(conditions, "image_embeds", ImageEmbedCondition).embeds
            # The transformer joins the two images of each sample itself.
            inputs["encoder_hidden_states_image"] = embeds.unflatten(1, (self.bundle.num_images[0], -1)).flatten(0, 1)
        return inputs

    def timesteps(self, x_R: Tensor, sigma_R: Tensor) -> Tensor:
        """For TI2V-5B [R, L], 0 for the tokens of the first frame."""
        timestep_R = super().timesteps(x_R, sigma_R)
        if not self.bundle.masks_timesteps:
            return timestep_R
        frames, height, width = x_R.shape[-3:]
        per_frame = (height // self.geometry.patch) * (width // self.geometry.patch)
        is_free = torch.arange(frames * per_frame, device=x_R.device) >= per_frame
        return timestep_R[:, None] * is_free

    def predict_by(
        self, name: str, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams
    ) -> Tensor:
        """For TI2V-5B, whose first frame is given, the velocity there leads to it, see `unirl.sde.known_latents`."""
        velocity = super().predict_by(name, x_R, sigma_R, conditions, params)
        if not self.bundle.masks_timesteps:
            return velocity
        given = require_condition(conditions, "image", ImageLatentCondition).latents.to(x_R.device)
        first = towards(given, x_R[:, :, :1], sigma_R)
        return torch.cat([first, velocity[:, :, 1:].to(first.dtype)], dim=2)

    def _given_latents(self, sample: list[Tensor], params: DiffusionSamplingParams) -> Embedding:
        """Conditions of one sample, encoded alone so that nothing depends on the batch."""
        pictures = [resized(picture, params.height, params.width) for picture in sample]
        if self.bundle.masks_timesteps:
            return {"latents": self._latents_of(pictures[0][None])}
        frames = torch.full((params.num_frames, 3, params.height, params.width), GREY)
        frames[0] = pictures[0]
        is_given = torch.zeros(params.num_frames)
        is_given[0] = 1
        if len(pictures) > 1:
            frames[-1], is_given[-1] = pictures[1], 1
        latents = self._latents_of(frames)
        return {"latents": self.masked(latents, is_given[:, None, None].expand(-1, *latents.shape[-2:]))}

    def masked(self, latents: Tensor, is_given: Tensor) -> Tensor:
        """[4 + C, f, h, w]: latents [C, f, h, w] under a mask [F, h, w] of the frames that they stand for."""
        # The first latent frame is one frame, which stands for all of its mask.
        group = self.geometry.frame_factor or 1
        mask = torch.cat([is_given[:1].expand(group, -1, -1), is_given[1:]]).unflatten(0, (-1, group)).movedim(1, 0)
        return torch.cat([mask.to(latents), latents])

    def _latents_of(self, frames: Tensor) -> Tensor:
        """[C, f, h, w] of frames [F, 3, H, W]."""
        return self.vae_latents(Videos.pack(frames=[frames]))[0]

    @cached_property
    def _clip_fingerprint(self) -> str:
        return weights_digest(self.bundle.modules["image_encoder"]).hex()

    @torch.no_grad()
    def _features(self, sample: list[Tensor]) -> Embedding:
        """[L, D] of the images, one after the other: the last hidden state but one."""
        encoder = self.bundle.modules["image_encoder"]
        inputs = self.bundle.processors["image_processor"](
            images=[as_pil(each) for each in sample], return_tensors="pt"
        )
        pixels = inputs.pixel_values.to(self.bundle.device, encoder.dtype)
        return {"embeds": encoder(pixels, output_hidden_states=True).hidden_states[-2].flatten(0, 1)}
