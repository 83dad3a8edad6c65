"""The autoencoder of HunyuanImage3: convolutions over frames, whose changes of size carry a mean or repeat of channels.

Names of weights are those of the published checkpoint.
Legend: B images, C F H W channels, frames, height and width of any level.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu

from unirl.models.hunyuan_image3.configuration import VAEConfig
from unirl.models.packed.autoencoder import EPS, Level, Middle, PackedAutoEncoder


def folded(x: Tensor, frames: int) -> Tensor:
    """[B, 4 frames C, F / frames, H / 2, W / 2]: blocks of frames, rows and columns become channels, before C."""
    b, c, f, h, w = x.shape
    cells = x.reshape(b, c, f // frames, frames, h // 2, 2, w // 2, 2)
    return cells.permute(0, 3, 5, 7, 1, 2, 4, 6).flatten(1, 4)


def unfolded(x: Tensor, frames: int) -> Tensor:
    """The inverse of `folded`."""
    b, _, f, h, w = x.shape
    cells = x.reshape(b, frames, 2, 2, -1, f, h, w)
    return cells.permute(0, 4, 5, 1, 6, 2, 7, 3).reshape(b, -1, f * frames, h * 2, w * 2)


class Downsample(nn.Module):
    """Half the sides, and half the frames where `frames` is 2."""

    def __init__(self, channels: int, out: int, frames: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, out // (4 * frames), 3, padding=1)
        self._frames = frames
        self._out = out

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, F, H, W] to [B, out, *]."""
        shortcut = folded(x, self._frames).unflatten(1, (self._out, -1)).mean(2)
        return folded(self.conv(x), self._frames) + shortcut


class Upsample(nn.Module):
    """The sides doubled, and the frames where `frames` is 2."""

    def __init__(self, channels: int, out: int, frames: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, 4 * frames * out, 3, padding=1)
        self._frames = frames
        self._repeats = 4 * frames * out // channels

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, F, H, W] to [B, out, *]."""
        shortcut = unfolded(x.repeat_interleave(self._repeats, dim=1), self._frames)
        return unfolded(self.conv(x), self._frames) + shortcut


class Encoder(nn.Module):
    """Pixels [B, 3, F, H, W] to moments [B, 2 C, *]."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        widths, halvings = config.channels, config.num_halvings
        self.conv_in = nn.Conv3d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList()
        for place, width in enumerate(widths):
            frames = 2 if place >= halvings - config.num_temporal_halvings else 1
            is_halved = place < halvings
            resample = ("downsample", Downsample(width, widths[place + 1], frames)) if is_halved else None
            # A change of size also changes the channels, so every level begins with its own.
            self.down.append(Level(width, width, config.blocks, config.groups, resample, nn.Conv3d))
        self.mid = Middle(widths[-1], config.groups, nn.Conv3d)
        self.norm_out = nn.GroupNorm(config.groups, widths[-1], EPS)
        self.conv_out = nn.Conv3d(widths[-1], 2 * config.latent_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Moments, means first."""
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        x = self.mid(x)
        shortcut = x.unflatten(1, (self.conv_out.out_channels, -1)).mean(2)
        return self.conv_out(silu(self.norm_out(x))) + shortcut


class Decoder(nn.Module):
    """Latents [B, C, F, h, w] to pixels [B, 3, *]."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        widths = config.channels[::-1]
        self.conv_in = nn.Conv3d(config.latent_channels, widths[0], 3, padding=1)
        self.mid = Middle(widths[0], config.groups, nn.Conv3d)
        self.up = nn.ModuleList()
        for place, width in enumerate(widths):
            frames = 2 if place < config.num_temporal_halvings else 1
            is_doubled = place < config.num_halvings
            resample = ("upsample", Upsample(width, widths[place + 1], frames)) if is_doubled else None
            self.up.append(Level(width, width, config.blocks + 1, config.groups, resample, nn.Conv3d))
        self.norm_out = nn.GroupNorm(config.groups, widths[-1], EPS)
        self.conv_out = nn.Conv3d(widths[-1], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Pixels, about -1 to 1."""
        repeats = self.conv_in.out_channels // self.conv_in.in_channels
        x = self.mid(self.conv_in(x) + x.repeat_interleave(repeats, dim=1))
        for level in self.up:
            x = level(x)
        return self.conv_out(silu(self.norm_out(x)))


class AutoEncoder(PackedAutoEncoder):
    """An image is as many equal frames as become one latent frame, and the last of the frames that come out."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__(Encoder(config), Decoder(config), scale=config.scale, shift=config.shift)
        self.config = config

    def moments(self, pixels: Tensor) -> Tensor:
        return self.encoder(pixels[:, :, None].expand(-1, -1, self.config.temporal_factor, -1, -1)).squeeze(2)

    def decoded(self, latents: Tensor) -> Tensor:
        return self.decoder(latents[:, :, None])[:, :, -1]
