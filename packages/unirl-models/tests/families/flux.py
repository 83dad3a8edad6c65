"""FLUX.1 dev, schnell and Kontext as families of the table."""

from typing import Any

import diffusers
from torch import Tensor

from unirl.models.flux.bundle import FluxBundle, FluxFillBundle, FluxKontextBundle
from unirl.models.flux.pipeline import FluxFillPipeline, FluxKontextPipeline, FluxPipeline
from unirl.models.patches import packed_2x2, unpacked_2x2
from unirl.models.tiny.flux1 import fill, kontext, parts, pipeline
from unirl.types.media import ImageLists

from .kit import Family, Published, Request, seeded, stock_call
from .tiny_parts import certain, one_picture_each, picture_and_mask_each, to_pil


def schnell() -> Any:
    """A static shift of 1 and no guidance."""
    pipeline_class: Any = diffusers.FluxPipeline
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)
    return pipeline_class(**{**parts(guidance_embeds=False), "scheduler": scheduler})


def certain_fill() -> Any:
    """The stock pipeline draws from the posterior of the image, ours takes its mode: here they are the same."""
    built = fill()
    built.vae = certain(built.vae)
    return built


def call(request: Request) -> dict[str, Any]:
    params = request.params
    guidance = params.distilled_guidance_scale
    return stock_call(
        request,
        guidance="true_cfg_scale",
        max_sequence_length=params.max_sequence_length,
        latents=packed_2x2(request.noise),
        **({} if guidance is None else {"guidance_scale": guidance}),
    )


def kontext_call(request: Request) -> dict[str, Any]:
    """The stock pipeline of one sample; it would sample a megapixel otherwise, whatever height and width say."""
    images = request.inputs["image"]
    assert isinstance(images, ImageLists)
    return {
        **call(request),
        "image": to_pil(images.images[0][0]),
        "max_area": request.params.height * request.params.width,
        "_auto_resize": False,
    }


def fill_call(request: Request) -> dict[str, Any]:
    images, masks = request.inputs["image"], request.inputs["mask"]
    assert isinstance(images, ImageLists) and isinstance(masks, ImageLists)
    fields = call(request)
    del fields["negative_prompt"], fields["true_cfg_scale"]
    return {
        **fields,
        "image": [to_pil(image) for (image,) in images.images],
        "mask_image": [to_pil(mask) for (mask,) in masks.images],
    }


def from_stock(latents: Tensor, request: Request) -> Tensor:
    return unpacked_2x2(latents, *request.noise.shape[-2:])


PARAMS = {"max_sequence_length": 32, "distilled_guidance_scale": 3.5}


FAMILIES = [
    Family(
        name="flux_dev",
        bundle=FluxBundle,
        pipeline=FluxPipeline,
        tiny=seeded(pipeline),
        params=PARAMS,
        call=call,
        from_stock=from_stock,
        published=(Published("black-forest-labs/FLUX.1-dev", 11.9),),
    ),
    Family(
        name="flux_schnell",
        bundle=FluxBundle,
        pipeline=FluxPipeline,
        tiny=seeded(schnell),
        params={"max_sequence_length": 32, "guidance_scale": 1.0, "negative_prompt": None},
        call=call,
        from_stock=from_stock,
        unguided=None,
        published=(Published("black-forest-labs/FLUX.1-schnell", 11.9),),
    ),
    Family(
        name="flux_kontext",
        bundle=FluxKontextBundle,
        pipeline=FluxKontextPipeline,
        tiny=seeded(kontext),
        params={**PARAMS, "sampler_kwargs": {"keeps_reference_size": True}},
        call=kontext_call,
        from_stock=from_stock,
        inputs=one_picture_each,
        is_latent_batch=False,
        published=(Published("black-forest-labs/FLUX.1-Kontext-dev", 11.9),),
    ),
    Family(
        name="flux_fill",
        bundle=FluxFillBundle,
        pipeline=FluxFillPipeline,
        tiny=seeded(certain_fill),
        params={**PARAMS, "guidance_scale": 1.0, "negative_prompt": None},
        call=fill_call,
        from_stock=from_stock,
        inputs=picture_and_mask_each,
        unguided=None,
        published=(Published("black-forest-labs/FLUX.1-Fill-dev", 11.9),),
    ),
]
