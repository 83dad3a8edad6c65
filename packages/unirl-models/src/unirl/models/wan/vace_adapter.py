"""Wan VACE: a video is filled where its mask says so, and follows reference images.

Equal to WanVACEPipeline of diffusers. Shape letters: see `unirl.models`; f latent frames, N reference images, s
pixels per latent element on a side, Z channels of the VAE.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.references import clips_of, pictures_of, resized
from unirl.models.embedding_cache import Embedding
from unirl.models.wan.adapter import WanAdapter
from unirl.models.wan.bundle import WanVACEBundle
from unirl.types.conditions import Condition, ImageLatentCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Primitive, Videos
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

NUM_REFERENCES_KEY = "num_reference_images"
"""Name in `sampler_kwargs` of how many images every sample brings; each a frame of latents, before the video's."""
SCALE_KEY = "conditioning_scale"
"""Name in `sampler_kwargs` of the weight of what is given; 1 by default."""


class WanVACEAdapter(WanAdapter[WanVACEBundle]):
    """Conditions besides those of `WanAdapter`: "control" [2 Z + s^2, N + f, h, w].

    Slots of a request: "video", of the sampled size, grey where there is none; "mask", a video of one channel or three,
    above 0.5 where frames are made anew, all of them where there is none; "image", the reference images. Equal samples
    are encoded once.
    """

    used_sampler_kwargs = WanAdapter.used_sampler_kwargs | {NUM_REFERENCES_KEY, SCALE_KEY}
    read_slots = WanAdapter.read_slots | {"image", "video", "mask"}

    def num_references(self, params: DiffusionSamplingParams) -> int:
        """N. Raises ConfigError if it is no number of images."""
        count = params.sampler_kwargs.get(NUM_REFERENCES_KEY, 0)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"sampler_kwargs.{NUM_REFERENCES_KEY} = {count!r} must be 0 or a number of images")
        return count

    def encode_inputs(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """Latents of what is kept, of what is made anew, and the mask, of each sample."""
        count = self.num_references(params)
        references = pictures_of(primitives, self.bundle.family, fewest=count, most=count)
        videos, masks = (self._frames(primitives, slot, params) for slot in ("video", "mask"))
        if masks is not None and videos is None:
            raise ConfigError(f"{self.bundle.family} VACE got a mask of no video. Give the slot 'video' or no 'mask'.")
        present = [part for part in (references, videos, masks) if part is not None]
        samples = [
            (
                [] if references is None else references[row],
                None if videos is None else videos[row],
                None if masks is None else masks[row],
            )
            for row in range(len(present[0]) if present else 1)
        ]
        keys = [self.media_key("control", params, video, mask, *given) for given, video, mask in samples]
        control = self.stacked(self.encoded_once(keys, lambda place: self._control(params, *samples[place])))
        if not present:  # text alone: the same for every sample
            control = control.select([0] * primitives["text"].batch_size)
        return {"control": control}

    def inputs_beside_text(self, x_R: Tensor, conditions: Conditions) -> dict[str, Tensor]:
        """What is given, for the blocks of the control branch."""
        return {"control_hidden_states": require_condition(conditions, "control", ImageLatentCondition).latents}

    def transformer_options(self, params: DiffusionSamplingParams) -> dict[str, Tensor | int]:
        """The weight of each of those blocks."""
        layers = len(self.bundle.transformer.config["vace_layers"])
        scale = float(params.sampler_kwargs.get(SCALE_KEY, 1.0))
        return {"control_hidden_states_scale": torch.full((layers,), scale, device=self.bundle.device)}

    def _frames(
        self, primitives: Mapping[str, Primitive], slot: str, params: DiffusionSamplingParams
    ) -> list[Tensor] | None:
        """[F, 3, H, W] of each sample, None where the request has no such slot."""
        clips = clips_of(primitives, slot, params.num_frames)
        for row, frames in enumerate(clips or []):
            if tuple(frames.shape[-2:]) != (params.height, params.width):
                raise ConfigError(
                    f"the {slot} of sample {row} is (height, width) = {tuple(frames.shape[-2:])}; sampled are "
                    f"{(params.height, params.width)}. Resize it, or change sampling.height and width."
                )
        return clips

    def _control(
        self, params: DiffusionSamplingParams, references: list[Tensor], video: Tensor | None, mask: Tensor | None
    ) -> Embedding:
        """Conditions of one sample."""
        size = (params.num_frames, 3, params.height, params.width)
        # In the VAE's range of -1 to 1, where what is blanked is 0.
        frames = torch.zeros(size) if video is None else video * 2 - 1
        is_new = torch.ones(size) if mask is None else (mask > 0.5).float()
        latents = torch.cat([self._latents_of(frames * (1 - is_new)), self._latents_of(frames * is_new)])
        for reference in references:
            single = self._latents_of(self._canvas(reference, params)[None])
            latents = torch.cat([torch.cat([single, torch.zeros_like(single)]), latents], dim=1)
        return {"latents": torch.cat([latents, self._mask_latents(is_new, latents)])}

    def _latents_of(self, frames: Tensor) -> Tensor:
        """[Z, f, h, w] of frames [F, 3, H, W] in the VAE's range."""
        return self.encode_media(Videos.pack(frames=[frames / 2 + 0.5]))[0]

    def _mask_latents(self, is_new: Tensor, latents: Tensor) -> Tensor:
        """[s^2, N + f, h, w] of a mask [F, 3, H, W]: every pixel of a latent element, of the nearest frame."""
        side = self.geometry.vae_factor
        pixels = is_new[:, 0].unflatten(2, (-1, side)).unflatten(1, (-1, side)).permute(2, 4, 0, 1, 3).flatten(0, 1)
        count = (len(is_new) - 1) // (self.geometry.frame_factor or 1) + 1
        size = (count, *pixels.shape[-2:])
        nearest = torch.nn.functional.interpolate(pixels[None], size=size, mode="nearest-exact")[0]
        blank = nearest.new_zeros(len(nearest), latents.shape[1] - count, *nearest.shape[-2:])
        return torch.cat([blank, nearest], dim=1).to(latents)

    def _canvas(self, reference: Tensor, params: DiffusionSamplingParams) -> Tensor:
        """[3, H, W]: the reference in the middle, as large as fits, white around it; in the VAE's range."""
        side = self.geometry.vae_factor
        rounded = resized(reference, *(max(length // side, 1) * side for length in reference.shape[-2:])) * 2 - 1
        scale = min(params.height / rounded.shape[-2], params.width / rounded.shape[-1])
        height, width = (int(length * scale) for length in rounded.shape[-2:])
        small = torch.nn.functional.interpolate(rounded[None], size=(height, width), mode="bilinear")[0]
        top, left = (params.height - height) // 2, (params.width - width) // 2
        canvas = torch.ones(3, params.height, params.width)
        canvas[:, top : top + height, left : left + width] = small
        return canvas
