"""The autoencoder of FLUX.1, which BAGEL uses; names of weights are those of the published checkpoint.

Legend: B images, C H W channels, height and width of any level. Blocks that take `convolution` work with frames too.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import interpolate, pad, scaled_dot_product_attention, silu

from unirl.models.bagel.configuration import VAEConfig

_EPS = 1e-6

Convolution = type[nn.Conv2d] | type[nn.Conv3d]


class ResidualBlock(nn.Module):
    """Two convolutions, and one of size 1 where the channels change."""

    def __init__(self, channels: int, out: int, groups: int, convolution: Convolution = nn.Conv2d) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels, _EPS)
        self.conv1 = convolution(channels, out, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, out, _EPS)
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
        self.norm = nn.GroupNorm(groups, channels, _EPS)
        self.q, self.k, self.v, self.proj_out = (convolution(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W]."""
        normed = self.norm(x)
        q, k, v = (project(normed).flatten(2).mT[:, None] for project in (self.q, self.k, self.v))
        seen = scaled_dot_product_attention(q, k, v)[:, 0].mT.unflatten(2, x.shape[2:])
        return x + self.proj_out(seen)


class Halving(nn.Module):
    """A convolution of stride 2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, C, H / 2, W / 2]."""
        return self.conv(pad(x, (0, 1, 0, 1)))


class Doubling(nn.Module):
    """Nearest neighbours, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to [B, C, 2 H, 2 W]."""
        return self.conv(interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """Residual blocks at one size, and the change to the next."""

    def __init__(
        self, channels: int, out: int, blocks: int, groups: int, resample: tuple[str, nn.Module] | None
    ) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            ResidualBlock(channels if place == 0 else out, out, groups) for place in range(blocks)
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


class Encoder(nn.Module):
    """Pixels [B, 3, H, W] to moments [B, 2 C, H / factor, W / factor]."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        widths = [config.channels * multiplier for multiplier in config.multipliers]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(3, config.channels, 3, padding=1)
        self.down = nn.ModuleList(
            Level(
                widths[max(place - 1, 0)] if place else config.channels,
                width,
                config.blocks,
                config.groups,
                ("downsample", Halving(width)) if place < last else None,
            )
            for place, width in enumerate(widths)
        )
        self.mid = Middle(widths[-1], config.groups)
        self.norm_out = nn.GroupNorm(config.groups, widths[-1], _EPS)
        self.conv_out = nn.Conv2d(widths[-1], 2 * config.latent_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Moments, means first."""
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """Latents [B, C, H / factor, W / factor] to pixels [B, 3, H, W]."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        widths = [config.channels * multiplier for multiplier in config.multipliers]
        self.conv_in = nn.Conv2d(config.latent_channels, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1], config.groups)
        self.up = nn.ModuleList(
            Level(
                widths[min(place + 1, len(widths) - 1)],
                width,
                config.blocks + 1,
                config.groups,
                ("upsample", Doubling(width)) if place else None,
            )
            for place, width in enumerate(widths)
        )
        self.norm_out = nn.GroupNorm(config.groups, widths[0], _EPS)
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Pixels, about -1 to 1."""
        x = self.mid(self.conv_in(x))
        for level in reversed(list(self.up)):
            x = level(x)
        return self.conv_out(silu(self.norm_out(x)))


class AutoEncoder(nn.Module):
    """Images in [-1, 1] to latents and back."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def encode(self, pixels: Tensor) -> Tensor:
        """The mode of the latents [B, C, h, w] of pixels [B, 3, H, W], scaled as the decoder of text is trained on."""
        mean, _ = self.encoder(pixels).chunk(2, dim=1)
        return self.config.scale * (mean - self.config.shift)

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] of scaled latents."""
        return self.decoder(latents / self.config.scale + self.config.shift)
