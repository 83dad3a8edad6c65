"""BAGEL as one module: its state has the names of the published `ema.safetensors`.

Legend: I images, N tokens of all of them, D width of the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unirl.models.bagel.configuration import BagelConfig
from unirl.models.bagel.transformer import Qwen2MoTForCausalLM
from unirl.models.packed.vision import Grid, VisionMLP, VisionModel, grid_places

FREQUENCIES = 256
"""Cosines and sines that embed a noise level."""
MAX_PERIOD = 10000.0


class TimeEmbedder(nn.Module):
    """A noise level as a vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, sigma_R: Tensor) -> Tensor:
        """[R, D] of levels [R] in 0..1, which are not scaled; cosines and sines in float32."""
        half = FREQUENCIES // 2
        steps = torch.arange(half, device=sigma_R.device).float() / half
        angles = sigma_R.float()[:, None] * torch.exp(-math.log(MAX_PERIOD) * steps)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.mlp(waves.to(next(self.mlp.parameters()).dtype))


class PositionTable(nn.Module):
    """One vector per place of a square grid, stored with the checkpoint and never trained."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.side = side
        self.pos_embed = nn.Parameter(torch.zeros(side**2, width), requires_grad=False)

    def forward(self, places: Tensor) -> Tensor:
        """[N, D] of places [N]."""
        return self.pos_embed[places]


class Bagel(nn.Module):
    """The decoder, and the ways of images into it and out of it."""

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        self.config = config
        width, vision = config.language.hidden_size, config.vision
        self.language_model = Qwen2MoTForCausalLM(config.language)
        self.time_embedder = TimeEmbedder(width)
        self.vae2llm = nn.Linear(config.token_width, width)
        self.llm2vae = nn.Linear(width, config.token_width)
        self.latent_pos_embed = PositionTable(config.max_latent_size, width)
        self.vit_model = VisionModel(vision)
        self.connector = VisionMLP(vision.hidden_size, width, width)
        self.vit_pos_embed = PositionTable(vision.patches_per_side, width)

    def latent_tokens(self, tokens: Tensor, sigma_I: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[N, D] of latent tokens [N, numbers] of I images of these grids, each at its noise level."""
        places = grid_places(grids, self.latent_pos_embed.side, tokens.device)
        counts = torch.tensor([rows * columns for rows, columns in grids], device=tokens.device)
        embedded = self.vae2llm(tokens.to(self.vae2llm.weight.dtype))
        levels = self.time_embedder(sigma_I).repeat_interleave(counts, dim=0, output_size=len(tokens))
        return embedded + levels + self.latent_pos_embed(places)

    def visual_tokens(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[N, D] of patches [N, numbers] of images of these grids."""
        places = grid_places(grids, self.vit_pos_embed.side, patches.device)
        dtype = self.connector.fc1.weight.dtype
        seen = self.vit_model(patches.to(dtype), places, [rows * columns for rows, columns in grids])
        return self.connector(seen) + self.vit_pos_embed(places)
