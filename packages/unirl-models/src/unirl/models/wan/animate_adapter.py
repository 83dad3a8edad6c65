"""Wan Animate: the character of an image moves as a pose video and a face video say.

Equal to WanAnimatePipeline of diffusers for one segment. Shape letters: see `unirl.models`; f latent frames, S pixels
of a side of the face video.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.references import clips_of, grey_scale, letterboxed, pictures_of, resized_clip
from unirl.models.embedding_cache import Embedding
from unirl.models.wan.bundle import WanAnimateBundle
from unirl.models.wan.image_adapter import GREY, WanImageAdapter
from unirl.types.conditions import NEGATIVE, Condition, ImageLatentCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Images, Primitive, Videos, pixel_bytes
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

SCENE = ("background", "mask")
"""Slots of the video in which a character is replaced, and of where, white, it is."""


class WanAnimateAdapter(WanImageAdapter):
    """Conditions besides those of `WanAdapter`: "image" [4 + C, 1 + f, h, w], "image_embeds" of CLIP, "pose"
    [C, f, h, w], and "face" [3, F, S, S] uint8, which is black in "negative_face".

    "image": the latents of the reference image before those of the scene, under a mask of what is given. Without a
    scene, whose frames are then grey, the character moves in the reference image.
    Slots of a request: "image", one per sample; the videos "pose" and "face"; "background" and "mask" together, to put
    the character into a scene. Videos have the sampled number of frames and any size, and are resized. One segment is
    sampled: the stock pipeline makes a longer video of several, each beginning with frames that it decoded before.
    """

    _bundle: WanAnimateBundle
    read_slots = WanImageAdapter.read_slots | {*WanAnimateBundle.needed_videos, *SCENE}

    @property
    def bundle(self) -> WanAnimateBundle:
        return self._bundle

    def num_references(self, params: DiffusionSamplingParams) -> int:
        """The reference image is one latent frame."""
        del params
        return 1

    def check_params(self, params: DiffusionSamplingParams) -> None:
        """Raises ConfigError for a video of one frame, too."""
        super().check_params(params)
        if params.num_frames == 1:
            raise ConfigError("num_frames = 1 moves nothing. Set sampling.num_frames to 5 or more.")

    def encode_media(self, media: Images | Videos) -> Tensor:
        """Raises ConfigError: latents of a video lack the frame of its reference image."""
        raise ConfigError(
            f"{self.bundle.pretrained_model} cannot encode given videos, whose reference image is not in them. Sample "
            "them instead: unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine."
        )

    def encode_inputs(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """The image, the videos of motion and the scene of each sample."""
        samples = pictures_of(primitives, self.bundle.family, fewest=1, most=1) or []
        pose, face = (self._motion(primitives, slot, params) for slot in self.bundle.needed_videos)
        scenes = self._scenes(primitives, params, len(samples))
        keys = [self.media_key("image", params, *sample, *scene) for sample, scene in zip(samples, scenes, strict=True)]
        rows = self.encoded_once(keys, lambda place: self._given(samples[place][0], scenes[place], params))
        poses = self.encoded_once(
            [self.media_key("pose", params, frames) for frames in pose],
            lambda place: {"latents": self._latents_of(resized_clip(pose[place], params.height, params.width))},
        )
        side = self.bundle.face_size
        # In bytes, which hold a resized image exactly: a clip of 77 frames of 512 x 512 has 60 million.
        faces = torch.stack([pixel_bytes(resized_clip(frames, side, side)) for frames in face]).movedim(1, 2)
        faces = faces.to(self.bundle.device)
        conditions: dict[str, Condition] = {
            "image": self.stacked(rows),
            "image_embeds": self.image_embeds(samples),
            "pose": self.stacked(poses),
            "face": ImageLatentCondition(latents=faces),
        }
        if params.uses_guidance:
            conditions[NEGATIVE + "face"] = ImageLatentCondition(latents=torch.zeros_like(faces))
        return conditions

    def inputs_beside_text(self, x_R: Tensor, conditions: Conditions) -> dict[str, Tensor]:
        """Latents next to the given ones, the features of the image, and both videos of motion."""
        face = require_condition(conditions, "face", ImageLatentCondition).latents.to(x_R.device)
        return {
            **super().inputs_beside_text(x_R, conditions),
            "pose_hidden_states": require_condition(conditions, "pose", ImageLatentCondition).latents,
            "face_pixel_values": face.float() / 255 * 2 - 1,
        }

    def transformer_options(self, params: DiffusionSamplingParams) -> dict[str, Tensor | int]:
        """Faces are read in batches that hold frames of one row alone, so that no row depends on its neighbours."""
        most = self.bundle.transformer.config["motion_encoder_batch_size"]
        whole = [size for size in range(1, most + 1) if params.num_frames % size == 0]
        return {"motion_encode_batch_size": max(whole)}

    def _motion(self, primitives: Mapping[str, Primitive], slot: str, params: DiffusionSamplingParams) -> list[Tensor]:
        clips = clips_of(primitives, slot, params.num_frames)
        if clips is None:
            raise ConfigError(
                f"{self.bundle.family} needs videos in the slots {list(self.bundle.needed_videos)} of a request, which "
                f"has {sorted(primitives)}. Name them in the data."
            )
        return clips

    def _scenes(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams, count: int
    ) -> list[tuple[Tensor, ...]]:
        """Background and mask of each sample; nothing where the request has neither."""
        background, mask = (clips_of(primitives, slot, params.num_frames) for slot in SCENE)
        if (background is None) != (mask is None):
            raise ConfigError(
                f"a character is put into a video 'background' where a video 'mask' is white; the request has "
                f"{sorted(primitives)}. Give both or neither."
            )
        if background is None or mask is None:
            return [()] * count
        return list(zip(background, mask, strict=True))

    def _given(self, picture: Tensor, scene: tuple[Tensor, ...], params: DiffusionSamplingParams) -> Embedding:
        """Conditions of one sample, encoded alone so that nothing depends on the batch."""
        reference = self._latents_of(letterboxed(picture, params.height, params.width)[None])
        size = reference.shape[-2:]
        if scene:
            frames, place = (resized_clip(clip, params.height, params.width) for clip in scene)
            is_kept = 1 - torch.stack([grey_scale(frame) for frame in place])
            is_kept = torch.nn.functional.interpolate(is_kept[:, None], size=size, mode="nearest")[:, 0]
        else:
            frames = torch.full((params.num_frames, 3, params.height, params.width), GREY)
            is_kept = torch.zeros(params.num_frames, *size)
        latents = self._latents_of(frames)
        given = [self.masked(reference, torch.ones(1, *size)), self.masked(latents, is_kept)]
        return {"latents": torch.cat(given, dim=1)}
