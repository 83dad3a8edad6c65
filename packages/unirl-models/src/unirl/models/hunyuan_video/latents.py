"""Latents of videos whose VAE names its factors: HunyuanVideo and 1.5."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.adapter import BundleT, TextConditionedAdapter
from unirl.models.diffusers_pipeline.geometry import Geometry
from unirl.types.media import Modality


class ScaledVideoLatents(TextConditionedAdapter[BundleT]):
    """What both generations share: geometry, and 24 frames per second."""

    modality = Modality.VIDEO
    fps = 24.0

    @property
    def geometry(self) -> Geometry:
        """For the released checkpoints (16, f, H / 8, W / 8) in patches of 1 x 2 x 2, and (32, f, H / 16, W / 16) in
        patches of 1 for 1.5; 4 frames a latent one."""
        transformer, vae = self.bundle.transformer.config, self.bundle.vae.config
        return Geometry(
            transformer["out_channels"],
            vae["spatial_compression_ratio"],
            transformer["patch_size"],
            vae["temporal_compression_ratio"],
            transformer["patch_size_t"],
        )
