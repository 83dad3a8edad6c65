"""SD3 as a family of the table; what only it has is in test_sd3_bundle.py and test_sd3_parity.py."""

from typing import Any

import diffusers

from unirl.models.sd3.bundle import SD3Bundle
from unirl.models.sd3.controlnet import SD3ControlNetBundle, SD3ControlNetPipeline
from unirl.models.sd3.pipeline import SD3Pipeline
from unirl.types.media import ImageLists

from ..tiny import tiny_sd3
from .kit import Family, Published, Request, seeded, stock_call
from .tiny_parts import certain, one_picture_each, to_pil


def _call(request: Request) -> dict[str, object]:
    return stock_call(request, max_sequence_length=request.params.max_sequence_length)


def _controlled() -> Any:
    """With a ControlNet of one block."""
    parts = {**tiny_sd3().components}
    # The stock pipeline draws from the posterior of the image, ours takes its mode: here they are the same.
    parts["vae"] = certain(parts["vae"])
    for component in ("image_encoder", "feature_extractor"):
        parts.pop(component, None)
    pipeline_class: Any = diffusers.StableDiffusion3ControlNetPipeline
    # Of another transformer, whose configuration it changes.
    controlnet = diffusers.SD3ControlNetModel.from_transformer(
        tiny_sd3().transformer, num_layers=1, num_extra_conditioning_channels=0
    )
    return pipeline_class(**parts, controlnet=controlnet)


def _control_call(request: Request) -> dict[str, object]:
    images = request.inputs["image"]
    assert isinstance(images, ImageLists)
    return {
        **_call(request),
        "control_image": [to_pil(image) for (image,) in images.images],
        "controlnet_conditioning_scale": request.params.sampler_kwargs["controlnet_conditioning_scale"],
    }


FAMILIES = [
    Family(
        name="sd3",
        tiled_side=64,
        bundle=SD3Bundle,
        pipeline=SD3Pipeline,
        tiny=seeded(tiny_sd3),
        params={"height": 16, "width": 16, "max_sequence_length": 16},
        other_size={"height": 32, "width": 24},
        call=_call,
        schedule="diffusers",
        published=(
            Published("stabilityai/stable-diffusion-3.5-medium", 2.47),
            Published("stabilityai/stable-diffusion-3.5-large", 8.06),
        ),
    ),
    Family(
        name="sd3_controlnet",
        tiled_side=64,
        bundle=SD3ControlNetBundle,
        pipeline=SD3ControlNetPipeline,
        tiny=seeded(_controlled),
        params={
            "height": 16,
            "width": 16,
            "max_sequence_length": 16,
            "sampler_kwargs": {"controlnet_conditioning_scale": 0.7},
        },
        other_size={"height": 32, "width": 24},
        call=_control_call,
        schedule="diffusers",
        inputs=one_picture_each,
        published=(
            # The transformer of Stable Diffusion 3 medium, which trains, and the ControlNet, which stays frozen.
            Published("InstantX/SD3-Controlnet-Canny", 2.68, components=("transformer", "controlnet")),
        ),
    ),
]
