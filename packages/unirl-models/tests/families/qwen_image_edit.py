"""Qwen-Image-Edit and -Edit-Plus as families of the table.

The stock pipelines resize to a megapixel; here both sides resize to a small area.
"""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from torch import Tensor
from transformers import Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from unirl.models.patches import packed_2x2
from unirl.models.qwen_image_edit.bundle import QwenImageEditBundle, QwenImageEditPlusBundle
from unirl.models.qwen_image_edit.pipeline import QwenImageEditPipeline
from unirl.models.tiny.images import dynamic_scheduler
from unirl.types.media import ImageLists, Images, Primitive

from ..tiny_text import PATCH_SIZE, qwen_vl, text_tokenizer
from .kit import Family, Published, Request, seeded
from .qwen_image import from_stock, tiny_transformer, tiny_vae

AREA, CONDITION_AREA = 64 * 64, 32 * 32


class PictureProcessor(Qwen2VLProcessor):
    """The real processor without its part for videos, which needs torchvision and is never asked."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


def processor() -> Any:
    patch = PATCH_SIZE["qwen2_5_vl"]
    size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (4 * patch) ** 2}
    return PictureProcessor(Qwen2VLImageProcessorPil(patch_size=patch, size=size), text_tokenizer())


def small_areas(pipeline_class: Any, module: Any) -> Any:
    """The stock pipeline, resizing to AREA what it resizes to a megapixel, and to CONDITION_AREA what to less."""
    dimensions = module.calculate_dimensions

    def smaller(area: int, ratio: float) -> Any:
        return dimensions(AREA if area == 1024 * 1024 else CONDITION_AREA, ratio)

    class Small(pipeline_class):
        def __call__(self, *args: Any, **keywords: Any) -> Any:
            with mock.patch.object(module, "calculate_dimensions", smaller):
                return super().__call__(*args, **keywords)

        def save_pretrained(self, folder: Path, **keywords: Any) -> None:
            """As a published folder: everything by its real name, the processor of images in its own file."""
            super().save_pretrained(folder, **keywords)
            self.processor.image_processor.save_pretrained(folder / "processor")
            index = json.loads((folder / "model_index.json").read_text())
            index |= {"_class_name": pipeline_class.__name__, "processor": ["transformers", "Qwen2VLProcessor"]}
            (folder / "model_index.json").write_text(json.dumps(index))

    return Small


class SmallEdit(QwenImageEditBundle):
    def __init__(self, pretrained_model: str, **options: Any) -> None:
        super().__init__(pretrained_model, image_area=AREA, condition_area=AREA, **options)


class SmallEditPlus(QwenImageEditPlusBundle):
    def __init__(self, pretrained_model: str, **options: Any) -> None:
        super().__init__(pretrained_model, image_area=AREA, condition_area=CONDITION_AREA, **options)


EDIT = small_areas(diffusers.QwenImageEditPipeline, pipeline_qwenimage_edit)
EDIT_PLUS = small_areas(diffusers.QwenImageEditPlusPipeline, pipeline_qwenimage_edit_plus)


def noise_picture(height: int, width: int) -> Tensor:
    """[3, height, width] in [0, 1], in values of 8 bits; smooth, so that resizing keeps some of it."""
    generator = torch.Generator().manual_seed(1000 * height + width)
    coarse = torch.rand(1, 3, 6, 6, generator=generator)
    picture = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")[0]
    return (picture * 255).round() / 255


def to_pil(picture: Tensor) -> Image.Image:
    """The same image for a stock pipeline."""
    return Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy())


def tiny(pipeline_class: Any) -> Any:
    return pipeline_class(
        scheduler=dynamic_scheduler(max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02),
        vae=tiny_vae(),
        text_encoder=qwen_vl("qwen2_5_vl"),
        tokenizer=text_tokenizer(),
        processor=processor(),
        transformer=tiny_transformer(),
    )


def call(request: Request) -> dict[str, Any]:
    params = request.params
    pictures = pictures_of_one(request)
    return {
        "image": pictures if len(pictures) > 1 else pictures[0],
        "prompt": request.texts[0],
        "negative_prompt": request.negative[0],
        "true_cfg_scale": params.guidance_scale,
        "height": params.height,
        "width": params.width,
        "latents": packed_2x2(request.noise[:1]),
    }


def pictures_of_one(request: Request) -> list[Any]:
    images = request.inputs["image"]
    if isinstance(images, Images):
        return [to_pil(images.pixels[0])]
    assert isinstance(images, ImageLists)
    return [to_pil(picture) for picture in images.images[0]]


def one_each(num_samples: int) -> dict[str, Primitive]:
    """An image each, of three sizes and two aspect ratios."""
    sizes = [(64, 64), (40, 90), (128, 128)]
    return {"image": ImageLists(images=[[noise_picture(*size)] for size in sizes[:num_samples]])}


def several(num_samples: int) -> dict[str, Primitive]:
    """One image, three, and two."""
    sizes = [[(64, 64)], [(64, 64), (40, 90), (50, 50)], [(90, 40), (64, 64)]]
    return {"image": ImageLists(images=[[noise_picture(*s) for s in sample] for sample in sizes[:num_samples]])}


def family(name: str, bundle: Any, stock: Any, inputs: Any, hub_ids: tuple[str, ...]) -> Family:
    return Family(
        name=name,
        bundle=bundle,
        pipeline=QwenImageEditPipeline,
        tiny=seeded(lambda: tiny(stock)),
        stock=lambda folder: stock.from_pretrained(folder, processor=processor()),
        params={},
        call=call,
        from_stock=from_stock,
        inputs=inputs,
        is_latent_batch=False,
        # The class's defaults are the released sizes.
        published=tuple(Published(hub_id, 20.4) for hub_id in hub_ids),
    )


FAMILIES = [
    family("qwen_image_edit", SmallEdit, EDIT, one_each, ("Qwen/Qwen-Image-Edit",)),
    family(
        "qwen_image_edit_plus",
        SmallEditPlus,
        EDIT_PLUS,
        several,
        ("Qwen/Qwen-Image-Edit-2509", "Qwen/Qwen-Image-Edit-2511"),
    ),
]
