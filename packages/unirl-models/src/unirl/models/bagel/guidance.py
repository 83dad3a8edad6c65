"""BAGEL's guidance over three contexts: everything, all but the prompt, and the prompt alone.

    g = v_text_free + s_text (v - v_text_free),   g' = v_image_free + s_image (g - v_image_free)
and the result shrinks to at most the length of v. Where s_image is 1, g' is g. Rows are guided one by one.
Legend: R rows, L tokens, D width of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from unirl.models.guidance import INTERVAL_KEY, Guidance, extrapolate
from unirl.types.errors import ConfigError
from unirl.types.sampling import DiffusionSamplingParams

Renorm = Literal["global", "channel", "text_channel"]

IMAGE_SCALE_KEY = "guidance_scale_image"
RENORM_KEY = "guidance_renorm"
RENORM_MIN_KEY = "guidance_renorm_min"
SAMPLER_KWARGS = frozenset({INTERVAL_KEY, IMAGE_SCALE_KEY, RENORM_KEY, RENORM_MIN_KEY})
"""What of `sampler_kwargs` this guidance reads."""

_EPS = 1e-8


@dataclass(frozen=True)
class ContextGuidance(Guidance):
    """Guidance by the prompt (`scale`) and by the given images.

    A row is guided where low < sigma <= high, as in the published code.
    """

    image_scale: float = 1.0
    """At most 1 means none. It acts on guided rows alone, so `scale` must be above 1 too."""
    renorm: Renorm = "global"
    """Lengths over all numbers of a row, over those of a token, or over those of a token before image guidance."""
    renorm_min: float = 0.0
    """Smallest factor that a velocity is shrunk by."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.renorm not in get_args(Renorm):
            raise ConfigError(f"{RENORM_KEY} = {self.renorm!r} must be one of {', '.join(get_args(Renorm))}")
        if not 0 <= self.renorm_min <= 1:
            raise ConfigError(f"{RENORM_MIN_KEY} = {self.renorm_min} must lie in 0..1")
        if self.image_scale > 1 and not self.is_on:
            raise ConfigError(
                f"{IMAGE_SCALE_KEY} = {self.image_scale} acts on rows that the prompt guides, but guidance_scale = "
                f"{self.scale}. Raise sampling.guidance_scale above 1, or set {IMAGE_SCALE_KEY}: 1."
            )

    @classmethod
    def from_params(cls, params: DiffusionSamplingParams) -> Self:
        """What sampling parameters ask for; the defaults of `sampler_kwargs` are those of the fields."""
        plain = Guidance.from_params(params)
        extra = params.sampler_kwargs
        return cls(
            scale=plain.scale,
            interval=plain.interval,
            image_scale=float(extra.get(IMAGE_SCALE_KEY, 1.0)),
            renorm=extra.get(RENORM_KEY, "global"),
            renorm_min=float(extra.get(RENORM_MIN_KEY, 0.0)),
        )

    @property
    def uses_images(self) -> bool:
        """True if guided rows need a velocity without the images."""
        return self.image_scale > 1

    def guided_rows(self, sigma_R: Tensor) -> list[int]:
        """Which rows are guided."""
        if not self.is_on:
            return []
        low, high = self.interval
        return ((sigma_R > low) & (sigma_R <= high)).nonzero().flatten().tolist()

    def guided(self, v: Tensor, text_free: Tensor, image_free: Tensor | None = None) -> Tensor:
        """The guided velocity of rows [R, L, D] that are guided, float32."""
        g = extrapolate(v, text_free, self.scale)
        if self.renorm == "text_channel":
            g = shrunk(g, v, self.renorm, self.renorm_min)
        if image_free is not None:
            g = extrapolate(g, image_free, self.image_scale)
        return g if self.renorm == "text_channel" else shrunk(g, v, self.renorm, self.renorm_min)


def shrunk(g: Tensor, v: Tensor, renorm: Renorm, smallest: float) -> Tensor:
    """g times clamp(|v| / |g|, smallest, 1). g, v: [R, L, D]."""
    dims = (1, 2) if renorm == "global" else (2,)
    norm_v, norm_g = (torch.linalg.vector_norm(each, dim=dims, keepdim=True) for each in (v, g))
    return g * (norm_v / (norm_g + _EPS)).clamp(smallest, 1.0)
