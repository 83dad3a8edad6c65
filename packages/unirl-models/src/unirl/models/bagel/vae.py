"""The autoencoder of FLUX.1, which BAGEL uses; names of weights are those of the published checkpoint.

Legend: B images, C H W channels, height and width of any level.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import interpolate, pad, silu

from unirl.models.bagel.configuration import VAEConfig
from unirl.models.packed.autoencoder import EPS, Level, Middle, PackedAutoEncoder


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
        self.norm_out = nn.GroupNorm(config.groups, widths[-1], EPS)
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
        self.norm_out = nn.GroupNorm(config.groups, widths[0], EPS)
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Pixels, about -1 to 1."""
        x = self.mid(self.conv_in(x))
        for level in reversed(list(self.up)):
            x = level(x)
        return self.conv_out(silu(self.norm_out(x)))


class AutoEncoder(PackedAutoEncoder):
    """FLUX.1's."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__(Encoder(config), Decoder(config), scale=config.scale, shift=config.shift)
        self.config = config
