"""The modules of a FLUX.2 Klein pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.diffusers_pipeline.lora_targets import JOINT_ATTENTION
from unirl.models.diffusers_pipeline.token_plans import FLUX_TOKENS
from unirl.models.experts import RankFollowing
from unirl.models.extras import from_extra
from unirl.models.flux2_klein.text import Flux2KleinTextEncoders

with from_extra("diffusers"):
    from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
    from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
    from transformers import Qwen3ForCausalLM


class Flux2KleinBundle(RankFollowing, DiffusersBundle):
    """Transformer, VAE, Qwen3 and tokenizer of one checkpoint, see `DiffusersBundle`."""

    family = "FLUX.2 Klein"
    takes_attention_backend = True
    pipeline_classes = ("Flux2KleinPipeline",)
    components = {
        "transformer": trained(Flux2Transformer2DModel),
        "vae": autoencoder(AutoencoderKLFlux2),
        "text_encoder": text_encoder(Qwen3ForCausalLM),
        "tokenizer": processor(),
    }
    text_class = Flux2KleinTextEncoders
    block_class_names = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    spreads_tokens = True
    token_plan = FLUX_TOKENS
    # Attention and feed-forward of the double blocks, image and text side, and the fused input of the single ones.
    lora_target_modules = (
        *JOINT_ATTENTION,
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
        "attn.to_qkv_mlp_proj",
    )
    latent_patch = 2
    recipe_rules = "unirl.models.flux2_klein.rules"
    reads_media = True
    most_images = 4

    @property
    def is_distilled(self) -> bool:
        """True if the checkpoint takes few steps and no guidance, as its index says."""
        return bool(self.folder.index.get("is_distilled"))
