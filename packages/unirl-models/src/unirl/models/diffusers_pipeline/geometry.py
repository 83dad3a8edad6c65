"""How pixels and frames become latents and tokens, and the sizes that do."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.models.adapter import check_multiples
from unirl.types.errors import ConfigError
from unirl.types.sampling import DiffusionSamplingParams


@dataclass(frozen=True)
class Geometry:
    """Factors of a checkpoint."""

    channels: int
    """Channels of a latent."""
    vae_factor: int
    """Pixels per latent element on a side."""
    patch: int = 1
    """Latent elements per token on a side."""
    frame_factor: int | None = None
    """Frames per latent frame after the first, which stands alone; None for images, whose latents have no frames."""
    frame_patch: int = 1
    """Latent frames per token."""

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """(C, h, w), or (C, f, h, w) with f = (F - 1) / frame_factor + 1.

        Raises ConfigError if height, width or num_frames do not divide, naming sizes that do.
        """
        factor = self.vae_factor
        check_multiples(params, factor * self.patch, reason=f"VAE {factor} x patch {self.patch}")
        area = (params.height // factor, params.width // factor)
        if self.frame_factor is None:
            return self.channels, *area
        return self.channels, self._latent_frames(params.num_frames, self.frame_factor), *area

    def num_tokens(self, params: DiffusionSamplingParams) -> int:
        """Tokens of one sample after patching."""
        shape = self.latent_shape(params)
        frames = 1 if self.frame_factor is None else shape[1] // self.frame_patch
        return frames * (shape[-2] // self.patch) * (shape[-1] // self.patch)

    def _latent_frames(self, num_frames: int, factor: int) -> int:
        step = factor * self.frame_patch
        # The first latent frame stands for one frame, so a first patch of several stands for fewer than the others.
        first = 1 + factor * (self.frame_patch - 1)
        if num_frames < first or (num_frames - first) % step:
            below = first + max(num_frames - first, 0) // step * step
            raise ConfigError(
                f"num_frames = {num_frames} is not {step} k + {first} (VAE {factor} frames x patch {self.frame_patch})."
                f" Use num_frames = {below} or {below + step}."
            )
        return (num_frames - 1) // factor + 1


@dataclass(frozen=True)
class ChunkedGeometry(Geometry):
    """Factors of a VAE that takes so many frames at a time, and a shorter last part: frames are frame_factor k + tail.

    `frame_factor` is the frames of a chunk, all of which have as many latent frames.
    """

    chunk_latents: int = 1
    """Latent frames of a chunk."""
    tail_frames: int = 1
    """Frames of the last part."""
    tail_latents: int = 1
    """Latent frames of the last part."""

    def _latent_frames(self, num_frames: int, factor: int) -> int:
        count, left = divmod(num_frames - self.tail_frames, factor)
        if count < 1 or left:
            below = factor * max(count, 1) + self.tail_frames
            raise ConfigError(
                f"num_frames = {num_frames} is not {factor} k + {self.tail_frames} with k of 1 or more (chunks of the "
                f"VAE). Use num_frames = {below} or {below + factor}."
            )
        return count * self.chunk_latents + self.tail_latents
