"""The modules of a Sana pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.sana.text import SanaTextEncoders
from unirl.types.errors import ConfigError

try:
    from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
    from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel
    from transformers import Gemma2Model
except ImportError as error:
    raise ImportError(
        "unirl.models.sana needs diffusers and transformers: pip install 'unirl-models[diffusers]'"
    ) from error


class SanaBundle(DiffusersBundle):
    """Transformer, deep-compression VAE, Gemma 2 and tokenizer of one checkpoint, see `DiffusersBundle`."""

    family = "Sana"
    pipeline_classes = ("SanaPipeline",)
    components = {
        "transformer": trained(SanaTransformer2DModel),
        "vae": autoencoder(AutoencoderDC),
        "text_encoder": text_encoder(Gemma2Model),
        "tokenizer": processor(),
    }
    text_class = SanaTextEncoders
    block_class_names = ("SanaTransformerBlock",)
    # Linear self-attention and attention over the text.
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
    latent_divisor = 32

    def check_index(self) -> None:
        """Raises ConfigError for a transformer that embeds its guidance."""
        if self.folder.config("transformer").get("guidance_embeds"):
            raise ConfigError(
                f"{self.folder.path} embeds its guidance (Sana-Sprint), which SanaPipeline does not give. Use a "
                "checkpoint with guidance_embeds: false."
            )
