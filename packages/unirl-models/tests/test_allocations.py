"""Bytes that tensors take at once, on cases counted by hand and on autoencoders of true size."""

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import AutoencoderKLHunyuanVideo15
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch import Tensor

from unirl.models.allocations import Allocations
from unirl.models.diffusers_pipeline.tiling import decoded_in_spans, work_in_tiles
from unirl.types.errors import ConfigError

MIB = 2**20


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storages_count_once_while_they_live_and_inputs_never(device: str) -> None:
    given = torch.ones(MIB // 4, device=device)  # 1 MiB
    with Allocations() as counted:
        double = given + given
        view = double.view(2, -1)[0]
        assert (counted.num_bytes, counted.peak_bytes) == (MIB, MIB)
        given.add_(1)
        third = double + given
        del double
        assert counted.num_bytes == 2 * MIB, "the view keeps its storage"
        del view, third
        assert (counted.num_bytes, counted.peak_bytes) == (0, 2 * MIB)


def decoded(vae: AutoencoderKL | AutoencoderKLWan | AutoencoderKLHunyuanVideo15, latents: Tensor) -> tuple[int, Tensor]:
    with torch.no_grad(), Allocations() as counted:
        pixels = vae.decode(latents, return_dict=False)[0]
    return counted.peak_bytes, pixels


def sd3_vae() -> AutoencoderKL:
    with torch.device("meta"):
        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            latent_channels=16,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )


def test_tiles_decode_a_picture_of_a_megapixel_in_a_tenth_of_the_memory() -> None:
    """Stable Diffusion 3's autoencoder at its true size."""
    vae = sd3_vae()
    latents = torch.empty(1, 16, 128, 128, device="meta")
    whole, pixels = decoded(vae, latents)
    work_in_tiles(vae, 256)
    tiled, same = decoded(vae, latents)
    assert pixels.shape == same.shape == (1, 3, 1024, 1024)
    assert tiled < 0.1 * whole, (tiled, whole)


def test_a_tile_that_cannot_overlap_by_whole_latents_is_refused() -> None:
    with pytest.raises(ConfigError, match="vae_tile_pixels = 200 is not divisible by 32, .*The nearest that is: 192"):
        work_in_tiles(sd3_vae(), 200)


def frame_by_frame(latents: Tensor) -> Tensor:
    """Stands for a decoder of 4 frames per latent one: frame k of latent frame i is 10 i + k; of the first the last."""
    frames = (latents[:, :, :, None] + torch.arange(4.0).view(4, 1, 1)).flatten(2, 3)
    return frames[:, :, 3:]


@pytest.mark.parametrize("num_frames", [9, 13, 17, 33])
@pytest.mark.parametrize("num_latents", [2, 3, 4, 5, 8, 16])
def test_spans_of_frames_are_joined_in_their_places(num_frames: int, num_latents: int) -> None:
    latents = 10 * torch.arange(float(num_latents)).view(1, 1, -1, 1, 1).expand(1, 1, -1, 2, 2)
    lengths: list[int] = []

    def decode(span: Tensor) -> Tensor:
        lengths.append(span.shape[2])
        return frame_by_frame(span)

    found = decoded_in_spans(decode, latents, num_frames=num_frames, factor=4)
    assert torch.equal(found, frame_by_frame(latents))
    assert max(lengths) <= (num_frames - 1) // 4 + 1 and min(lengths) >= 2


def test_spans_go_over_into_each_other_evenly() -> None:
    """Decoders that see more of the video differ at the seams: here each call is brighter than the one before."""
    calls = iter(range(9))
    found = decoded_in_spans(
        lambda span: torch.full((1, 1, 4 * span.shape[2] - 3, 1, 1), float(next(calls))),
        torch.zeros(1, 1, 6, 1, 1),
        num_frames=13,
        factor=4,
    )
    expected = [0.0] * 9 + [0.2, 0.4, 0.6, 0.8] + [1.0] * 8
    assert found.flatten().tolist() == pytest.approx(expected)


@pytest.mark.matrix
def test_a_span_bounds_the_memory_of_a_decoder_that_holds_all_frames() -> None:
    """HunyuanVideo 1.5 at its true size, 33 frames of 480 x 480: what 9 frames take, and all pixels twice."""
    with torch.device("meta"):
        vae = AutoencoderKLHunyuanVideo15()
        nine, few = decoded(vae, torch.empty(1, 32, 3, 30, 30))
        latents = torch.empty(1, 32, 9, 30, 30)
        with torch.no_grad(), Allocations() as counted:
            pixels = decoded_in_spans(
                lambda span: vae.decode(span, return_dict=False)[0], latents, num_frames=9, factor=4
            )
    assert few.shape == (1, 3, 9, 480, 480) and pixels.shape == (1, 3, 33, 480, 480)
    assert counted.peak_bytes <= nine + 2 * 4 * pixels.numel()
    assert counted.peak_bytes < 0.35 * 23.4e9, "what all frames take at once, docs/results/performance.md"


def test_wan_decodes_frame_by_frame() -> None:
    """Its true size at 480 x 832: 16 more frames take their own pixels, joined twice, and no more."""
    with torch.device("meta"):
        vae = AutoencoderKLWan()
        peaks, pixels = zip(*(decoded(vae, torch.empty(1, 16, frames, 60, 104)) for frames in (3, 7)), strict=True)
    assert pixels[1].shape == (1, 3, 25, 480, 832)
    more_bytes = 4 * (pixels[1].numel() - pixels[0].numel())
    assert peaks[1] - peaks[0] <= 2 * more_bytes
    assert peaks[1] < 9e9
