"""Z-Image and Z-Image-Turbo as families of the table."""

from collections.abc import Callable
from typing import Any

import diffusers
import transformers

from unirl.models.tiny.images import autoencoder_kl
from unirl.models.z_image.bundle import ZImageBundle
from unirl.models.z_image.pipeline import ZImagePipeline

from ..tiny_text import qwen3, text_tokenizer
from .kit import Family, Published, Request, seeded, stock_call


def tiny(shift: float) -> Callable[[], Any]:
    """One layer, and one of each refiner."""

    def made() -> Any:
        pipeline_class: Any = diffusers.ZImagePipeline
        return pipeline_class(
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=shift),
            vae=autoencoder_kl(),
            text_encoder=transformers.Qwen3Model(qwen3().config),
            tokenizer=text_tokenizer(),
            transformer=diffusers.ZImageTransformer2DModel(
                in_channels=4,
                dim=32,
                n_layers=1,
                n_refiner_layers=1,
                n_heads=2,
                n_kv_heads=2,
                cap_feat_dim=64,
                axes_dims=[8, 4, 4],
                axes_lens=[256, 32, 32],
            ),
        )

    return made


def call(request: Request) -> dict[str, Any]:
    """Without guidance the stock pipeline's scale is 0. It writes into the list of prompts."""
    params = request.params
    return stock_call(
        request,
        prompt=list(request.texts),
        guidance_scale=params.guidance_scale if params.uses_guidance else 0.0,
        max_sequence_length=params.max_sequence_length,
    )


# s = 2 is a scale of 3 as other families count it.
PARAMS = {"max_sequence_length": 96, "guidance_scale": 2.0}

FAMILIES = [
    Family(
        name="z_image",
        bundle=ZImageBundle,
        pipeline=ZImagePipeline,
        tiny=seeded(tiny(6.0)),
        params=PARAMS,
        call=call,
        # The class's defaults are the released sizes.
        published=(Published("Tongyi-MAI/Z-Image", 6.15),),
    ),
    Family(
        name="z_image_turbo",
        bundle=ZImageBundle,
        options={"is_distilled": True},
        pipeline=ZImagePipeline,
        tiny=seeded(tiny(3.0)),
        # Eight steps without guidance, as released.
        params={
            "max_sequence_length": 96,
            "guidance_scale": 1.0,
            "negative_prompt": None,
            "num_inference_steps": 8,
        },
        unguided=None,
        call=call,
        published=(Published("Tongyi-MAI/Z-Image-Turbo", 6.15),),
    ),
]
