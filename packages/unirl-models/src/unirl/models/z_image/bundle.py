"""The modules of a Z-Image pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from typing import Any

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.extras import from_extra
from unirl.models.z_image.text import ZImageTextEncoders

with from_extra("diffusers"):
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
    from transformers import Qwen3Model


class ZImageBundle(DiffusersBundle):
    """Transformer, VAE, Qwen3 and tokenizer of one checkpoint, see `DiffusersBundle`.

    is_distilled: true for Z-Image-Turbo, which samples without guidance; nothing in its folder says so.
    """

    family = "Z-Image"
    takes_attention_backend = True
    pipeline_classes = ("ZImagePipeline",)
    components = {
        "transformer": trained(ZImageTransformer2DModel),
        "vae": autoencoder(AutoencoderKL),
        "text_encoder": text_encoder(Qwen3Model, "Qwen3ForCausalLM"),
        "tokenizer": processor(),
    }
    text_class = ZImageTextEncoders
    block_class_names = ("ZImageTransformerBlock",)
    lora_target_modules = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")
    latent_patch = 2
    recipe_rules = "unirl.models.z_image.rules"

    # Any: the keywords of DiffusersBundle.
    def __init__(self, pretrained_model: str, *, is_distilled: bool = False, **options: Any) -> None:
        self.is_distilled = is_distilled
        super().__init__(pretrained_model, **options)
