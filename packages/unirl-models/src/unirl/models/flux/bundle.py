"""The modules of a FLUX.1 pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.diffusers_pipeline.lora_targets import JOINT_ATTENTION
from unirl.models.diffusers_pipeline.token_plans import FLUX_TOKENS
from unirl.models.experts import RankFollowing
from unirl.models.extras import from_extra
from unirl.models.flux.text import FluxTextEncoders

with from_extra("diffusers"):
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
    from transformers import CLIPTextModel, T5EncoderModel


class FluxBundle(RankFollowing, DiffusersBundle):
    """FLUX.1 dev and schnell, see `DiffusersBundle`."""

    family = "FLUX.1"
    takes_attention_backend = True
    pipeline_classes = ("FluxPipeline",)
    components = {
        "transformer": trained(FluxTransformer2DModel),
        "vae": autoencoder(AutoencoderKL),
        "text_encoder": text_encoder(CLIPTextModel),
        "text_encoder_2": text_encoder(T5EncoderModel),
        "tokenizer": processor(),
        "tokenizer_2": processor(),
    }
    text_class = FluxTextEncoders
    block_class_names = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    spreads_tokens = True
    token_plan = FLUX_TOKENS
    # The projections of the attention of both kinds of blocks, image and text side.
    lora_target_modules = JOINT_ATTENTION
    latent_patch = 2
    recipe_rules = "unirl.models.flux.rules"
    released_guidance = 3.5
    """Value of the guidance input that the checkpoint was published with."""
    takes_second_forward = True
    """True if classifier-free guidance on top is known to the stock pipeline."""

    @property
    def is_distilled(self) -> bool:
        """True if the checkpoint takes no guidance at all, neither as an input nor by a second forward (schnell)."""
        return not self.transformer.config["guidance_embeds"]


class FluxKontextBundle(FluxBundle):
    """FLUX.1 Kontext, which changes an image as the text says."""

    family = "FLUX.1 Kontext"
    pipeline_classes = ("FluxKontextPipeline",)
    released_guidance = 2.5
    reads_media = True
    needs_media = True
    most_images = 1


class FluxFillBundle(FluxBundle):
    """FLUX.1 Fill, which fills a hole in an image."""

    family = "FLUX.1 Fill"
    pipeline_classes = ("FluxFillPipeline",)
    released_guidance = 30.0
    needs_mask = True
    takes_second_forward = False
    reads_media = True
    needs_media = True
    most_images = 1
