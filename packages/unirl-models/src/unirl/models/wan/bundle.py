"""The modules of a Wan pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.wan.text import WanTextEncoders

try:
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
    from transformers import UMT5EncoderModel
except ImportError as error:
    raise ImportError(
        "unirl.models.wan needs diffusers and transformers: pip install 'unirl-models[diffusers]'"
    ) from error


class WanBundle(DiffusersBundle):
    """Transformer, VAE, UMT5 and tokenizer of a checkpoint that makes videos of text, see `DiffusersBundle`."""

    family = "Wan"
    pipeline_classes = ("WanPipeline",)
    components = {
        "transformer": trained(WanTransformer3DModel),
        "vae": autoencoder(AutoencoderKLWan),
        "text_encoder": text_encoder(UMT5EncoderModel),
        "tokenizer": processor(),
    }
    text_class = WanTextEncoders
    block_class_names = ("WanTransformerBlock",)
    # Self attention and attention to the text.
    lora_target_modules = (
        "attn1.to_q",
        "attn1.to_k",
        "attn1.to_v",
        "attn1.to_out.0",
        "attn2.to_q",
        "attn2.to_k",
        "attn2.to_v",
        "attn2.to_out.0",
    )
    frame_divisor = 4
