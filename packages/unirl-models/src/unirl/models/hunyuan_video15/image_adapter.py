"""HunyuanVideo 1.5 from images: the first frame of a video is given.

Equal to HunyuanVideo15ImageToVideoPipeline of diffusers. Shape letters: see `unirl.models`; D width of features.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.diffusers_pipeline.references import as_pil, covered, pictures_of
from unirl.models.diffusers_pipeline.text import weights_digest
from unirl.models.embedding_cache import Embedding, content_key, tensor_digest
from unirl.models.hunyuan_video15.adapter import HunyuanVideo15Adapter
from unirl.types.conditions import Condition, ImageEmbedCondition, ImageLatentCondition
from unirl.types.media import Primitive, Videos
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams


class HunyuanVideo15ImageAdapter(HunyuanVideo15Adapter):
    """Conditions besides those of `HunyuanVideo15Adapter`: "image", latents of the first frame [C, 1, h, w], and
    "image_embeds", SigLIP features [L, D] of it.

    The slot "image" of a request brings one image per sample. It is made as large as the sampled size and its middle is
    taken, whatever its own size; the stock pipeline samples at a size that it derives from the image. Equal images are
    encoded once.
    """

    read_slots = HunyuanVideo15Adapter.read_slots | {"image"}

    def encode_inputs(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """The image of each sample as latents and as features."""
        samples = pictures_of(primitives, self.bundle.family, fewest=1, most=1) or []
        size = f"{params.height} x {params.width}"
        keys = [content_key(self._image_fingerprint, size, tensor_digest(picture)) for (picture,) in samples]
        rows = self.encoded_once(keys, lambda place: self._encode_picture(samples[place][0], params))
        embeds = torch.stack([row["embeds"] for row in rows]).to(self.bundle.device)
        return {"image": self.stacked(rows), "image_embeds": ImageEmbedCondition(embeds=embeds)}

    def given_frames(self, x_R: Tensor, conditions: Conditions) -> Tensor:
        """[R, C + 1, f, h, w]: latents of the first frame and a mask of it; zeros elsewhere."""
        first = require_condition(conditions, "image", ImageLatentCondition).latents.to(x_R)
        given = x_R.new_zeros(len(x_R), x_R.shape[1] + 1, *x_R.shape[2:])
        given[:, :, :1] = torch.cat([first, torch.ones_like(first[:, :1])], dim=1)
        return given

    def image_embeds(self, x_R: Tensor, conditions: Conditions) -> Tensor:
        """[R, L, D] features of the given image."""
        return require_condition(conditions, "image_embeds", ImageEmbedCondition).embeds.to(x_R.device)

    @cached_property
    def _image_fingerprint(self) -> str:
        """Names the VAE and the image encoder."""
        encoder = weights_digest(self.bundle.modules["image_encoder"]).hex()
        return f"{self.bundle.family} {self._vae_fingerprint} {encoder}"

    @torch.no_grad()
    def _encode_picture(self, picture: Tensor, params: DiffusionSamplingParams) -> Embedding:
        """Conditions of one image, encoded alone so that nothing depends on the batch."""
        picture = covered(picture, params.height, params.width)
        encoder = self.bundle.modules["image_encoder"]
        inputs = self.bundle.processors["feature_extractor"](images=as_pil(picture), return_tensors="pt")
        pixels = inputs.pixel_values.to(self.bundle.device, encoder.dtype)
        return {
            "latents": self.encode_media(Videos.pack(frames=[picture[None]]))[0],
            "embeds": encoder(pixel_values=pixels).last_hidden_state[0],
        }
