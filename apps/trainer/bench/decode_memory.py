"""What decoding holds at once: the autoencoders of the families at their released sizes. Prints Markdown.

    uv run python apps/trainer/bench/decode_memory.py [NAME ...]

Nothing is computed: operators run on the meta device, and the tensors that they make are counted (workspaces of
convolutions come on top). Float32, one sample, with and without `bundle.vae_tile_pixels: 256`, and at once with the
activations that a gradient to the latents needs. Those that hold all frames of a video also with
`bundle.vae_tile_frames`.
"""

# ruff: noqa: INP001 - a script, no package
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import AutoencoderKLCogVideoX
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo
from diffusers.models.autoencoders.autoencoder_kl_hunyuanimage import AutoencoderKLHunyuanImage
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import AutoencoderKLLTX2Video
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import AutoencoderKLMiniMaxH3
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

from unirl.models.allocations import Allocations
from unirl.models.diffusers_pipeline.tiling import decoded_in_spans, work_in_tiles
from unirl.models.releases.configurations import settings_of

TILE = 256
KL = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
}
WAN_22 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
HUNYUAN_IMAGE = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 64,
    "block_out_channels": (128, 256, 512, 512, 1024, 1024),
    "layers_per_block": 2,
    "spatial_compression_ratio": 32,
    "sample_size": 384,
}
SANA = {
    "latent_channels": 32,
    "encoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
    "decoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
    "encoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "decoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
    "decoder_layers_per_block": (3, 3, 3, 3, 3, 3),
    "encoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
    "decoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
    "downsample_block_type": "Conv",
    "upsample_block_type": "interpolate",
    "decoder_norm_types": "rms_norm",
    "decoder_act_fns": "silu",
}
LTX_23 = settings_of("diffusers/LTX-2.3-Diffusers", "vae", "AutoencoderKLLTX2Video")
AUTOENCODERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {  # Any: classes of diffusers
    "SD3, FLUX.1, Z-Image": (lambda: AutoencoderKL(**KL, latent_channels=16), (16, 128, 128)),
    "SDXL": (lambda: AutoencoderKL(**KL, latent_channels=4), (4, 128, 128)),
    "FLUX.2": (lambda: AutoencoderKLFlux2(), (32, 128, 128)),
    "Qwen-Image": (lambda: AutoencoderKLQwenImage(), (16, 1, 128, 128)),
    "Sana": (lambda: AutoencoderDC(**SANA), (32, 32, 32)),
    "HunyuanImage 2.1": (lambda: AutoencoderKLHunyuanImage(**HUNYUAN_IMAGE), (64, 32, 32)),
    "Wan 2.1, A14B": (lambda: AutoencoderKLWan(), (16, 5, 60, 104)),
    "Wan 2.2 TI2V": (lambda: AutoencoderKLWan(**WAN_22), (48, 5, 44, 80)),
    "HunyuanVideo": (lambda: AutoencoderKLHunyuanVideo(), (16, 2, 60, 104)),
    "HunyuanVideo 1.5": (lambda: AutoencoderKLHunyuanVideo15(), (32, 2, 30, 30)),
    "LTX-2": (
        lambda: AutoencoderKLLTX2Video(spatial_compression_ratio=32, temporal_compression_ratio=8),
        (128, 4, 16, 24),
    ),
    "LTX-2.3": (lambda: AutoencoderKLLTX2Video(**LTX_23), (128, 4, 16, 24)),
    # In tiles of 256 pixels at any size, as it was released.
    "MiniMax-H3": (lambda: AutoencoderKLMiniMaxH3(), (24, 7, 24, 42)),
    "CogVideoX": (lambda: AutoencoderKLCogVideoX(), (16, 5, 60, 90)),
}
"""Name -> the autoencoder, and the shape of a sample's latents."""
AT_ONCE: dict[str, tuple[tuple[int, ...], int, int]] = {
    "HunyuanVideo 1.5": ((32, 9, 30, 30), 9, 4),
    "LTX-2": ((128, 16, 16, 24), 49, 8),
    "LTX-2.3": ((128, 16, 16, 24), 49, 8),
}
"""Those that hold all frames of a video -> latents of a longer one, frames of a span, and per latent frame."""


def counted(
    make: Callable[[], Any],
    shape: tuple[int, ...],
    tile: int | None,
    *,
    has_gradient: bool = False,
    span: tuple[int, int] | None = None,
) -> tuple[int, Any]:
    """Peak bytes of decoding a sample, and its media. span: its frames, and those per latent frame."""
    with torch.device("meta"):
        vae = make().eval().requires_grad_(False)
        latents = torch.empty(1, *shape, requires_grad=has_gradient)
        if tile is not None:
            work_in_tiles(vae, tile)
        with torch.set_grad_enabled(has_gradient), Allocations() as allocations:

            def decode(part: Any) -> Any:  # Any: as above
                return vae.decode(part, return_dict=False)[0]

            if span is None:
                media = decode(latents)
            else:
                media = decoded_in_spans(decode, latents, num_frames=span[0], factor=span[1])
    return allocations.peak_bytes, media


def main() -> None:
    """Print a row per autoencoder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(AUTOENCODERS))
    write = sys.stdout.write
    write("| autoencoder | media | at once, GB | kB per pixel of a frame | tiles, GB | with gradient, GB |\n")
    write("|---|---|---|---|---|---|\n")
    names = parser.parse_args().names
    for name in names:
        make, shape = AUTOENCODERS[name]
        whole, media = counted(make, shape, None)
        tiled, _ = counted(make, shape, TILE)
        trained, _ = counted(make, shape, None, has_gradient=True)
        size = " x ".join(map(str, media.shape[2:]))
        per_pixel = whole / (media.shape[-2] * media.shape[-1]) / 1e3
        write(f"| {name} | {size} | {whole / 1e9:.2f} | {per_pixel:.1f} | {tiled / 1e9:.2f} | {trained / 1e9:.1f} |\n")
        sys.stdout.flush()
    write("\n| autoencoder | media | at once, GB | tiles, GB | spans of frames, GB | both, GB |\n")
    write("|---|---|---|---|---|---|\n")
    for name in [each for each in AT_ONCE if each in names]:
        shape, frames, factor = AT_ONCE[name]
        found = [
            counted(AUTOENCODERS[name][0], shape, tile, span=span)
            for span in (None, (frames, factor))
            for tile in (None, TILE)
        ]
        size = " x ".join(map(str, found[0][1].shape[2:]))
        whole, tiled, spans, both = (f"{each / 1e9:.2f}" for each, _ in found)
        write(f"| {name} | {size} | {whole} | {tiled} | {spans} (of {frames}) | {both} |\n")


if __name__ == "__main__":
    main()
