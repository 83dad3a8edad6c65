"""Random text encoders, tokenizers and schedulers that several families share. Any: classes of both libraries."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from unirl.models.diffusers_pipeline.export import LORA_FILE
from unirl.types.media import ImageLists, Primitive


def load_lora_by_model(stock: Any, folder: Path) -> None:
    """For a pipeline class of diffusers without `load_lora_weights`: its transformer loads the file."""
    stock.transformer.load_lora_adapter(str(folder), prefix="transformer", weight_name=LORA_FILE)


def pictures(num_samples: int) -> dict[str, Primitive]:
    """One image, two of different sizes, one of another size, and so on; sides that are no multiples of 4."""
    generator = torch.Generator().manual_seed(5)
    sizes = [[(64, 70)], [(64, 64), (68, 64)], [(66, 72)]]
    samples = [[rounded(torch.rand(3, *size, generator=generator)) for size in sample] for sample in sizes]
    return {"image": ImageLists(images=samples[:num_samples])}


def rounded(picture: Tensor) -> Tensor:
    """As an image file holds it."""
    return (picture * 255).round() / 255


def to_pil(picture: Tensor) -> Image.Image:
    return Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy())


def certain(vae: Any) -> Any:
    """The autoencoder with next to no variance of its posterior (logarithm -30), which it keeps when saved."""
    head = vae.encoder.conv_out if vae.quant_conv is None else vae.quant_conv
    variances = slice(head.out_channels // 2, None)
    with torch.no_grad():
        head.weight[variances] = 0.0
        head.bias[variances] = -30.0
    return vae


def one_picture_each(num_samples: int) -> dict[str, Primitive]:
    """The first one of each sample, of three sizes."""
    images = pictures(num_samples)["image"]
    assert isinstance(images, ImageLists)
    return {"image": ImageLists(images=[sample[:1] for sample in images.images])}


def picture_and_mask_each(num_samples: int) -> dict[str, Primitive]:
    """Masks of other sizes than the images, of which a part is white."""
    generator = torch.Generator().manual_seed(6)
    masks = [
        (torch.rand(1, 20 + row, 24, generator=generator) > 0.5).float().expand(3, -1, -1) for row in range(num_samples)
    ]
    return {**one_picture_each(num_samples), "mask": ImageLists(images=[[mask] for mask in masks])}
