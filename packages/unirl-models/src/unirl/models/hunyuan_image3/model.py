"""The ways of images into the decoder of HunyuanImage3 and out of it. Names of weights are those published.

Legend: I images of one size, C channels, h w rows and columns of tokens, N tokens of all images, D width of the
decoder, T width of an embedded time step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, silu

from unirl.models.adapter import TIMESTEPS_PER_SIGMA
from unirl.models.hunyuan_image3.configuration import HunyuanImage3Config
from unirl.models.hunyuan_image3.layout import Grid
from unirl.models.hunyuan_image3.vae import AutoEncoder
from unirl.models.packed.given_images import GivenImage
from unirl.models.packed.vision import VisionConfig, VisionTransformer

FREQUENCIES = 256
"""Cosines and sines that embed a noise level."""
MAX_PERIOD = 10000.0
GROUPS = 32


class TimestepEmbedder(nn.Module):
    """A noise level as a vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, sigma_I: Tensor) -> Tensor:
        """[I, T] of noise levels [I]; cosines and sines of 1000 sigma in float32."""
        half = FREQUENCIES // 2
        rates = torch.exp(-math.log(MAX_PERIOD) * torch.arange(half, device=sigma_I.device).float() / half)
        angles = TIMESTEPS_PER_SIGMA * sigma_I.float()[:, None] * rates
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1).to(next(self.mlp.parameters()).dtype))


class ResidualBlock(nn.Module):
    """Two convolutions with scale and shift of a time step between them."""

    def __init__(self, channels: int, out: int, time_width: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(GROUPS, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(time_width, 2 * out))
        # The published names count a dropout that does nothing.
        self.out_layers = nn.Sequential(
            nn.GroupNorm(GROUPS, out), nn.SiLU(), nn.Identity(), nn.Conv2d(out, out, 3, padding=1)
        )
        self.skip_connection = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, time_IT: Tensor) -> Tensor:
        """[I, C, h, w] to [I, out, h, w]."""
        inner = self.in_layers(x)
        scale, shift = self.emb_layers(time_IT)[..., None, None].chunk(2, dim=1)
        inner = self.out_layers[3](silu(self.out_layers[0](inner) * (1 + scale) + shift))
        return self.skip_connection(x) + inner


class PatchEmbed(nn.Module):
    """Latents to tokens, one each."""

    def __init__(self, channels: int, inner: int, width: int) -> None:
        super().__init__()
        self.model = nn.ModuleList([nn.Conv2d(channels, inner, 3, padding=1), ResidualBlock(inner, width, width)])

    def forward(self, latents: Tensor, time_IT: Tensor) -> Tensor:
        """[I, h w, D] of latents [I, C, h, w], row by row."""
        convolution, block = self.model
        return block(convolution(latents), time_IT).flatten(2).mT


class FinalLayer(nn.Module):
    """Hidden states to velocities, one each."""

    def __init__(self, channels: int, inner: int, width: int) -> None:
        super().__init__()
        last = nn.Sequential(nn.GroupNorm(GROUPS, inner), nn.SiLU(), nn.Conv2d(inner, channels, 3, padding=1))
        self.model = nn.ModuleList([ResidualBlock(width, inner, width), last])

    def forward(self, hidden: Tensor, time_IT: Tensor, grid: Grid) -> Tensor:
        """[I, C, h, w] of hidden states [I, h w, D]."""
        block, last = self.model
        return last(block(hidden.mT.unflatten(2, grid), time_IT))


class NaflexVision(VisionTransformer):
    """SigLIP 2 for images of any grid: the table of positions is resized to each, and each is padded to one length."""

    def __init__(self, config: VisionConfig, most_patches: int) -> None:
        super().__init__(config)
        self._side = config.patches_per_side
        self._most_patches = most_patches

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:  # ty: ignore[incompatible-method-override] - other images
        """[I, most patches, width] of patches [N, numbers] of I images of these grids, one after the other.

        What is padded has no pixels and the first position; it sees the image, and the image does not see it.
        """
        table = self.embeddings.position_embedding.weight.float().T.unflatten(1, (self._side, self._side))[None]
        counts = [rows * columns for rows, columns in grids]
        images = []
        for image, grid in zip(patches.split(counts), grids, strict=True):
            places = interpolate(table, size=grid, mode="bilinear", align_corners=False, antialias=True)
            places = places[0].flatten(1).T.to(patches.dtype)
            missing = self._most_patches - len(image)
            padded = torch.cat([image, image.new_zeros(missing, image.shape[1])])
            images.append(self.embeddings.patch_embedding(padded) + torch.cat([places, places[:1].expand(missing, -1)]))
        encoded = self.encoded(torch.cat(images), [self._most_patches] * len(grids), counts)
        return encoded.unflatten(0, (len(grids), self._most_patches))


class Aligner(nn.Module):
    """Features of the vision tower to tokens."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, out), nn.GELU(), nn.Linear(out, out))

    def forward(self, features: Tensor) -> Tensor:
        """[..., D] of features [..., width]."""
        return self.layers(features)


class ImageParts(nn.Module):
    """All of the model but its decoder; nothing here trains."""

    def __init__(self, config: HunyuanImage3Config) -> None:
        super().__init__()
        width, channels = config.decoder.hidden_size, config.vae.latent_channels
        self.timestep_emb, self.time_embed, self.time_embed_2 = (TimestepEmbedder(width) for _ in range(3))
        self.patch_embed = PatchEmbed(channels, config.patch_width, width)
        self.final_layer = FinalLayer(channels, config.patch_width, width)
        self.vision_model = NaflexVision(config.vision, config.most_patches)
        self.vision_aligner = Aligner(config.vision.hidden_size, width)
        self.vae = AutoEncoder(config.vae)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all but the autoencoder."""
        return next(self.patch_embed.parameters()).dtype

    def latent_tokens(self, latents: Tensor, sigma_I: Tensor) -> Tensor:
        """[I, 1 + h w, D] of latents [I, C, h, w] at their noise levels: the token of the time step, then the image."""
        tokens = self.patch_embed(latents.to(self.dtype), self.time_embed(sigma_I))
        return torch.cat([self.timestep_emb(sigma_I)[:, None], tokens], dim=1)

    def velocity(self, hidden: Tensor, sigma_I: Tensor, grid: Grid) -> Tensor:
        """[I, C, h, w] float32 of the hidden states [I, h w, D] of the images."""
        return self.final_layer(hidden.to(self.dtype), self.time_embed_2(sigma_I), grid).float()

    def visual_tokens(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[I, most patches, D] of patches [N, numbers] of I images of these grids."""
        return self.vision_aligner(self.vision_model(patches.to(self.dtype), grids))

    def features(self, ids: Tensor, shown: Sequence[GivenImage], num_words: int) -> tuple[Tensor | None, Tensor | None]:
        """What stands for the ids [N] that are no words, and where; None of both without images.

        shown: all images, in the order of the ids.
        """
        if not shown:
            return None, None
        clean = torch.zeros(1, device=ids.device)
        visual = self.visual_tokens(torch.cat([image.patches for image in shown]), [image.grids[1] for image in shown])
        features = []
        for image, seen in zip(shown, visual, strict=True):
            latents = image.latents.T.unflatten(1, image.grids[0])[None]
            features += [self.latent_tokens(latents, clean)[0], seen]
        return torch.cat(features), (ids >= num_words).nonzero().flatten()
