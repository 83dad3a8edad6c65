"""The modules of a Stable Diffusion 3 pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.diffusers_pipeline.lora_targets import JOINT_ATTENTION
from unirl.models.extras import from_extra
from unirl.models.sd3.text import SD3TextEncoders
from unirl.models.token_plan import IMAGE, TEXT, TokenPlan

with from_extra("diffusers"):
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
    from transformers import CLIPTextModelWithProjection, T5EncoderModel


class SD3Bundle(DiffusersBundle):
    """Transformer, VAE, text encoders and tokenizers of one checkpoint, see `DiffusersBundle`.

    load_t5: False leaves the T5 encoder out even where the checkpoint has it; its part of the sequence is zeros then,
    as in diffusers.
    """

    family = "SD3"
    pipeline_classes = ("StableDiffusion3Pipeline",)
    components = {
        "transformer": trained(SD3Transformer2DModel),
        "vae": autoencoder(AutoencoderKL),
        "text_encoder": text_encoder(CLIPTextModelWithProjection),
        "text_encoder_2": text_encoder(CLIPTextModelWithProjection),
        "text_encoder_3": text_encoder(T5EncoderModel, is_optional=True),
        "tokenizer": processor(),
        "tokenizer_2": processor(),
        "tokenizer_3": processor(is_optional=True),
    }
    text_class = SD3TextEncoders
    block_class_names = ("JointTransformerBlock",)
    lora_target_modules = JOINT_ATTENTION
    spreads_tokens = True
    token_plan = TokenPlan(
        arguments={"": {"block_controlnet_hidden_states": IMAGE}},
        outputs={"pos_embed": {0: IMAGE}, "context_embedder": {0: TEXT}},
        attention={"transformer_blocks.*.attn": ("image", "text"), "transformer_blocks.*.attn2": ("image",)},
        whole_again={"proj_out": IMAGE},
    )

    # Any: the keywords of DiffusersBundle.
    def __init__(self, pretrained_model: str, *, load_t5: bool = True, **options: Any) -> None:
        self._load_t5 = load_t5
        super().__init__(pretrained_model, **options)

    def leaves_out(self) -> Collection[str]:
        """T5, where the recipe says so or the folder has none."""
        has_t5 = self._load_t5 and self.folder.class_of("text_encoder_3") is not None
        return () if has_t5 else ("text_encoder_3", "tokenizer_3")

    @property
    def text_options(self) -> dict[str, Any]:  # Any: as in the base
        """The width of the joint attention, to which texts are padded."""
        return {"width": self.transformer.config["joint_attention_dim"]}

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent element on a side."""
        return 2 ** (len(self.vae.config["block_out_channels"]) - 1)
