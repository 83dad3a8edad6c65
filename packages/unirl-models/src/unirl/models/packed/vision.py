"""How unified models see images: SigLIP over patches of any grid, and the way of its features into the decoder.

Images lie end to end and attend each to itself. Names of weights are those of the published checkpoint.
Legend: N patches of all images, D width of the tower.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

Grid = tuple[int, int]
"""Rows and columns of patches, or of latent tokens."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The tower that sees images."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int
    num_channels: int
    layer_norm_eps: float
    patches_per_side: int
    """Rows, and columns, of the table of positions."""

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return self.num_channels * self.patch_size**2


class VisionAttention(nn.Module):
    """Every patch of an image attends to all of them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._num_heads = config.num_attention_heads
        width = config.hidden_size
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, lengths: Sequence[int], num_keys: Sequence[int] | None = None) -> Tensor:
        """[N, D] of images of these numbers of patches. num_keys: how many of an image are attended to, None all."""
        q, k, v = (
            project(x).unflatten(-1, (self._num_heads, -1)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        outputs, start = [], 0
        for (length, keys), equal in itertools.groupby(zip(lengths, num_keys or lengths, strict=True)):
            count = len(list(equal))
            part = slice(start, start + count * length)
            query, key, value = (each[part].unflatten(0, (count, length)).transpose(1, 2) for each in (q, k, v))
            seen = scaled_dot_product_attention(query, key[:, :, :keys], value[:, :, :keys])
            outputs.append(seen.transpose(1, 2).flatten(0, 1))
            start = part.stop
        return self.out_proj(torch.cat(outputs).flatten(1))


class VisionMLP(nn.Module):
    """Two layers with the tanh form of GELU between; the connector to the decoder is one too."""

    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, out)

    def forward(self, x: Tensor) -> Tensor:
        """[N, width] to [N, out]."""
        return self.fc2(gelu(self.fc1(x), approximate="tanh"))


class VisionLayer(nn.Module):
    """A block of the tower."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = VisionAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = VisionMLP(config.hidden_size, config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor, lengths: Sequence[int], num_keys: Sequence[int] | None = None) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), lengths, num_keys)
        return x + self.mlp(self.layer_norm2(x))


class VisionEmbeddings(nn.Module):
    """Patches and where they stand."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(config.patch_width, config.hidden_size)
        self.position_embedding = nn.Embedding(config.patches_per_side**2, config.hidden_size)


class VisionTransformer(nn.Module):
    """Embeddings, blocks and a final norm."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(config)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_hidden_layers))
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, patches: Tensor, places: Tensor, lengths: Sequence[int]) -> Tensor:
        """[N, D] of patches [N, numbers] at `places` [N] of the table of positions, of images of these `lengths`."""
        x = self.embeddings.patch_embedding(patches) + self.embeddings.position_embedding(places)
        return self.encoded(x, lengths)

    def encoded(self, x: Tensor, lengths: Sequence[int], num_keys: Sequence[int] | None = None) -> Tensor:
        """[N, D] of embedded patches [N, D], see `VisionAttention`."""
        for layer in self.encoder.get_submodule("layers").children():
            x = layer(x, lengths, num_keys)
        return self.post_layernorm(x)


class VisionModel(nn.Module):
    """The tower, by its published name."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.vision_model = VisionTransformer(config)

    def forward(self, patches: Tensor, places: Tensor, lengths: Sequence[int]) -> Tensor:
        return self.vision_model(patches, places, lengths)


def grid_places(grids: Sequence[Grid], table_side: int, device: torch.device | None = None) -> Tensor:
    """int64 [rows * columns of all grids], their places in a square table of positions, row by row, one grid after the
    other. Equal grids are computed once."""
    sides = torch.arange(max(itertools.chain(*grids)), device=device)
    places = {grid: (sides[: grid[0], None] * table_side + sides[: grid[1]]).flatten() for grid in set(grids)}
    return torch.cat([places[grid] for grid in grids])
