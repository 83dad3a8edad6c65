"""Vision transformers in timm's layout and by its names, up to the layer whose patches OpenVLA reads.

Legend: n images, P patches, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from unirl.models.action.openvla.configuration import TowerShape

EPSILON = 1e-6


class LayerScale(nn.Module):
    """Scales a branch. Its name is OpenVLA's, which transformers does not rename."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        """[n, P, W]."""
        return x * self.scale_factor


class Attention(nn.Module):
    """Self-attention with one projection to queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[n, P, W]."""
        queries, keys, values = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(functional.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    """Two layers with GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[n, P, W]."""
        return self.fc2(functional.gelu(self.fc1(x)))


class TowerBlock(nn.Module):
    """A pre-norm block."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=EPSILON)
        self.attn = Attention(shape.width, shape.heads)
        self.ls1 = LayerScale(shape.width) if shape.has_class else nn.Identity()
        self.norm2 = nn.LayerNorm(shape.width, eps=EPSILON)
        self.mlp = Perceptron(shape.width, shape.hidden)
        self.ls2 = LayerScale(shape.width) if shape.has_class else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[n, P, W]."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """A convolution over patches."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, shape.width, shape.patch, shape.patch)

    def forward(self, pixels: Tensor) -> Tensor:
        """[n, P, W] of [n, 3, h, w]."""
        return self.proj(pixels).flatten(2).transpose(1, 2)


class Tower(nn.Module):
    """All blocks but the last, without the norm: what timm's `get_intermediate_layers(n={depth - 2})` gives."""

    def __init__(self, shape: TowerShape, image_side: int) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbed(shape)
        self.pos_embed = nn.Parameter(torch.zeros(1, (image_side // shape.patch) ** 2, shape.width))
        if shape.has_class:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width))
            self.reg_token = nn.Parameter(torch.zeros(1, shape.registers, shape.width))
        self.blocks = nn.ModuleList(TowerBlock(shape) for _ in range(shape.depth - 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """[n, P, W] of [n, 3, h, w]."""
        x = self.patch_embed(pixels) + self.pos_embed
        num_before = 0
        if self.shape.has_class:
            before = torch.cat([self.cls_token, self.reg_token], dim=1)
            num_before = before.shape[1]
            x = torch.cat([before.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return x[:, num_before:]


class VisionBackbone(nn.Module):
    """DINOv2 and SigLIP, side by side."""

    def __init__(self, towers: tuple[TowerShape, TowerShape], image_side: int) -> None:
        super().__init__()
        self.featurizer, self.fused_featurizer = (Tower(shape, image_side) for shape in towers)

    def forward(self, pixels: Tensor) -> Tensor:
        """[n, P, sum of widths] of [n, 6, h, w], the three channels of each tower."""
        first, second = pixels.split(3, dim=1)
        return torch.cat([self.featurizer(first), self.fused_featurizer(second)], dim=2)


class Projector(nn.Module):
    """Patches as tokens of the language model."""

    def __init__(self, vision: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision, 4 * vision)
        self.fc2 = nn.Linear(4 * vision, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, patches: Tensor) -> Tensor:
        """[n, P, width]."""
        return self.fc3(functional.gelu(self.fc2(functional.gelu(self.fc1(patches)))))
