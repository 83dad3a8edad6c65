"""The modules of a Sana pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.diffusers_pipeline.lora_targets import SELF_AND_CROSS_ATTENTION
from unirl.models.extras import from_extra
from unirl.models.sana.text import SanaTextEncoders
from unirl.types.errors import ConfigError

with from_extra("diffusers"):
    from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
    from diffusers.models.transformers.sana_transformer import SanaTransformer2DModel
    from transformers import Gemma2Model


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
    lora_target_modules = SELF_AND_CROSS_ATTENTION
    latent_divisor = 32

    def check_index(self) -> None:
        """Raises ConfigError for a transformer that embeds its guidance."""
        if self.folder.config("transformer").get("guidance_embeds"):
            raise ConfigError(
                f"{self.folder.path} embeds its guidance (Sana-Sprint), which SanaPipeline does not give. Use a "
                "checkpoint with guidance_embeds: false."
            )
