"""The modules of a Stable Diffusion XL pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from typing import Any

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.extras import from_extra
from unirl.models.sdxl.text import SDXLTextEncoders
from unirl.types.errors import ConfigError

with from_extra("diffusers"):
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTextModelWithProjection


class SDXLBundle(DiffusersBundle):
    """U-Net, VAE, both CLIP encoders and their tokenizers of one checkpoint, see `DiffusersBundle`."""

    family = "SDXL"
    pipeline_classes = ("StableDiffusionXLPipeline",)
    components = {
        "unet": trained(UNet2DConditionModel),
        "vae": autoencoder(AutoencoderKL),
        "text_encoder": text_encoder(CLIPTextModel),
        "text_encoder_2": text_encoder(CLIPTextModelWithProjection),
        "tokenizer": processor(),
        "tokenizer_2": processor(),
    }
    text_class = SDXLTextEncoders
    # Neither lies in the other.
    block_class_names = ("BasicTransformerBlock", "ResnetBlock2D")
    # The projections of self- and cross-attention.
    lora_target_modules = ("to_q", "to_k", "to_v", "to_out.0")
    latent_divisor = 8
    latent_patch = 1

    def check_index(self) -> None:
        """Raises ConfigError for a U-Net with another conditioning (refiner, LCM), or latents normalised by channel."""
        unet, vae = self.folder.config("unet"), self.folder.config("vae")
        added, guided = unet.get("addition_embed_type"), unet.get("time_cond_proj_dim")
        if added != "text_time" or guided is not None:
            raise ConfigError(
                f"{self.folder.path}: a U-Net with addition_embed_type = {added!r} and time_cond_proj_dim = {guided} "
                "is not the base model, which has 'text_time' and null. Use that."
            )
        if vae.get("latents_mean") is not None:
            raise ConfigError(
                f"{self.folder.path}: latents with a mean per channel (latents_mean = {vae['latents_mean']}) belong to "
                "another noise process than SDXL's. Use a checkpoint without."
            )

    @property
    def unet(self) -> Any:  # Any: as in `DiffusersBundle.load`
        """The model that trains."""
        return self.modules["unet"]
