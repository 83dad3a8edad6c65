"""Blocks of autoencoders; those that take `convolution` work with frames too.

Legend: B images, C H W channels, height and width of any level.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

EPS = 1e-6

Convolution = type[nn.Conv2d] | type[nn.Conv3d]


class ResidualBlock(nn.Module):
    """Two convolutions, and one of size 1 where the channels change."""

    def __init__(self, channels: int, out: int, groups: int, convolution: Convolution = nn.Conv2d) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels, EPS)
        self.conv1 = convolution(channels, out, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, out, EPS)
        self.conv2 = convolution(out, out, 3, padding=1)
        self.nin_shortcut = nn.Identity() if channels == out else convolution(channels, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, out, H, W]."""
        inner = self.conv1(silu(self.norm1(x)))
        return self.nin_shortcut(x) + self.conv2(silu(self.norm2(inner)))


class AttentionBlock(nn.Module):
    """One head over all places of an image."""

    def __init__(self, channels: int, groups: int, convolution: Convolution = nn.Conv2d) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, EPS)
        self.q, self.k, self.v, self.proj_out = (convolution(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W]."""
        normed = self.norm(x)
        q, k, v = (project(normed).flatten(2).mT[:, None] for project in (self.q, self.k, self.v))
        seen = scaled_dot_product_attention(q, k, v)[:, 0].mT.unflatten(2, x.shape[2:])
        return x + self.proj_out(seen)


class Level(nn.Module):
    """Residual blocks at one size, and the change to the next."""

    def __init__(
        self,
        channels: int,
        out: int,
        blocks: int,
        groups: int,
        resample: tuple[str, nn.Module] | None,
        convolution: Convolution = nn.Conv2d,
    ) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            ResidualBlock(channels if place == 0 else out, out, groups, convolution) for place in range(blocks)
        )
        if resample is not None:
            self.add_module(*resample)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, out, *]."""
        for block in self.block:
            x = block(x)
        for name, module in self.named_children():
            x = x if name == "block" else module(x)
        return x


class Middle(nn.Module):
    """Two residual blocks around attention."""

    def __init__(self, channels: int, groups: int, convolution: Convolution = nn.Conv2d) -> None:
        super().__init__()
        self.block_1 = ResidualBlock(channels, channels, groups, convolution)
        self.attn_1 = AttentionBlock(channels, groups, convolution)
        self.block_2 = ResidualBlock(channels, channels, groups, convolution)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W]."""
        return self.block_2(self.attn_1(self.block_1(x)))


class PackedAutoEncoder(nn.Module):
    """Images in [-1, 1] to latents and back."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module, *, scale: float, shift: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self._scale = scale
        self._shift = shift

    def encode(self, pixels: Tensor) -> Tensor:
        """The mode of the latents [B, C, h, w] of pixels [B, 3, H, W], scaled as the decoder of text is trained on."""
        mean, _ = self.moments(pixels).chunk(2, dim=1)
        return self._scale * (mean - self._shift)

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] of scaled latents [B, C, h, w]."""
        return self.decoded(latents / self._scale + self._shift)

    def moments(self, pixels: Tensor) -> Tensor:
        """Means and deviations [B, 2 C, h, w]."""
        return self.encoder(pixels)

    def decoded(self, latents: Tensor) -> Tensor:
        """Pixels of latents that are not scaled."""
        return self.decoder(latents)
