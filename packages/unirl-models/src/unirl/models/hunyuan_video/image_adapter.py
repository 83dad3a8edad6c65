"""HunyuanVideo from images: the first frame of a video is given.

Equal to HunyuanVideoImageToVideoPipeline of diffusers. Shape letters: see `unirl.models`; f latent frames.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.references import distinct, picture_key, pictures_of, resized
from unirl.models.embedding_cache import content_key
from unirl.models.hunyuan_video.adapter import HunyuanVideoAdapter
from unirl.models.hunyuan_video.bundle import HunyuanVideoImageBundle
from unirl.sde.known_latents import towards
from unirl.types.conditions import Condition, ImageLatentCondition, TextEmbedCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Images, Primitive, Videos
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

IMAGE_SHARE = 0.001
"""Share of the image in the noise that a trajectory starts from, in every frame."""
LEAD_IN = 4
"""Frames that the model of joined channels makes before the video, and that are cut off."""
# The stock pipeline hands its choice to the prompt alone, so the negative one has its default.
KEPT_BESIDE_NEGATIVE = 2
"""One of so many tokens of the image is kept with a negative prompt."""
BLACK = torch.zeros(3, 16, 16)
"""A black image; its size is free, since the image processor resizes it."""


class HunyuanVideoImageAdapter(HunyuanVideoAdapter):
    """Conditions besides those of `HunyuanVideoAdapter`, whose text encoder sees the image (black with a negative
    prompt): "image", latents of the first frame [C, 1, h, w].

    Of the two released models one reads that frame next to the noise and makes `LEAD_IN` frames more than it shows, so
    `num_frames` of sampling are cut by so many; the other puts it where the first latent frame is.
    The slot "image" of a request brings one image per sample, which is resized to the sampled size. Equal images are
    encoded once.
    """

    _bundle: HunyuanVideoImageBundle
    read_slots = HunyuanVideoAdapter.read_slots | {"image"}

    @property
    def bundle(self) -> HunyuanVideoImageBundle:
        return self._bundle

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError, too, if all frames would be cut off."""
        super().check_params(params)
        if not self.bundle.replaces_first_frame and params.num_frames <= LEAD_IN:
            raise ConfigError(
                f"num_frames = {params.num_frames}: {self.bundle.pretrained_model} makes {LEAD_IN} frames that are cut "
                f"off before those of the video. Set sampling.num_frames to at least {LEAD_IN + 1}."
            )

    def encode_inputs(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """The image of each sample as latents."""
        pictures, samples = self._pictures(primitives)
        latents = self.image_latents([resized(picture, params.height, params.width) for picture in pictures])
        return {"image": ImageLatentCondition(latents=torch.stack([latents[place] for place in samples]))}

    def starting_latents(self, latents: Tensor, sigma: float, conditions: Conditions) -> Tensor:
        """Noise with a little of the image in every frame."""
        del sigma
        return torch.lerp(latents, self._first(latents, conditions).expand_as(latents), IMAGE_SHARE)

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Where the first latent frame is given, the velocity there leads to it, see `unirl.sde.known_latents`."""
        velocity = super().predict(x_R, sigma_R, conditions, params)
        if not self.bundle.replaces_first_frame:
            return velocity
        first = towards(self._first(x_R, conditions), x_R[:, :, :1], sigma_R)
        return torch.cat([first, velocity[:, :, 1:].to(first.dtype)], dim=2)

    def hidden_states(self, x_R: Tensor, conditions: Conditions) -> Tensor:
        """[R, 2 C + 1, f, h, w]: the latents, those of the first frame and a mask of it; or the latents with the first
        frame in its place."""
        first = self._first(x_R, conditions)
        if self.bundle.replaces_first_frame:
            return torch.cat([first, x_R[:, :, 1:]], dim=2)
        given = x_R.new_zeros(len(x_R), x_R.shape[1] + 1, *x_R.shape[2:])
        given[:, :, :1] = torch.cat([first, torch.ones_like(first[:, :1])], dim=1)
        return torch.cat([x_R, given], dim=1)

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images | Videos:
        """The video without what comes before it."""
        media = super().decode(latents, params)
        if self.bundle.replaces_first_frame or not isinstance(media, Videos):
            return media
        return Videos.pack(frames=[frames[LEAD_IN:] for frames in media.unpack("frames")], fps=self.fps)

    def encode_media(self, media: Images | Videos) -> Tensor:
        """Raises ConfigError for the model of joined channels: given videos lack the frames that it makes before."""
        if self.bundle.replaces_first_frame:
            return super().encode_media(media)
        raise ConfigError(
            f"{self.bundle.pretrained_model} cannot encode given videos: it makes {LEAD_IN} frames before those of a "
            "video, which these lack. Sample them, or use a checkpoint of image_condition_type 'token_replace'."
        )

    def _first(self, x_R: Tensor, conditions: Conditions) -> Tensor:
        """[R, C, 1, h, w]: latents of the first frame."""
        return require_condition(conditions, "image", ImageLatentCondition).latents.to(x_R)

    def _encode_texts(
        self, texts: list[str], length: int, primitives: Mapping[str, Primitive], *, is_negative: bool
    ) -> dict[str, TextEmbedCondition]:
        """Each distinct pair of a text and an image is encoded once."""
        pictures, samples = self._pictures(primitives)
        every = self.bundle.image_token_stride
        if is_negative:
            pictures, samples = [BLACK], [0] * len(texts)
            every = KEPT_BESIDE_NEGATIVE
        encoders, digests = self.bundle.text, [picture_key(picture) for picture in pictures]
        facts = (self.bundle.family.lower(), encoders.fingerprint, length, every)

        def encode(part: list[int]) -> dict[str, TextEmbedCondition]:
            seen = [pictures[samples[row]] for row in part]
            return {"text": encoders.encode_seen([texts[row] for row in part], seen, length, every=every)}

        keys = [content_key(*facts, text, digests[place]) for text, place in zip(texts, samples, strict=True)]
        return self._cached_streams(keys, encode)

    def _pictures(self, primitives: Mapping[str, Primitive]) -> tuple[list[Tensor], list[int]]:
        """The images that differ, and for each sample which is its own."""
        found = pictures_of(primitives, self.bundle.family, fewest=1, most=1)
        pictures, samples = distinct(found or [])
        return pictures, [place for (place,) in samples]
