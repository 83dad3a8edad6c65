"""The modules of a Qwen-Image pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.diffusers_pipeline.lora_targets import JOINT_ATTENTION
from unirl.models.extras import from_extra
from unirl.models.qwen_image.one_frame import convolve_images_in_2d
from unirl.models.qwen_image.text import QwenImageTextEncoders
from unirl.models.token_plan import IMAGE, TEXT, TokenPlan, Tokens
from unirl.types.errors import ConfigError

with from_extra("diffusers"):
    import diffusers
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLForConditionalGeneration


class QwenImageBundle(DiffusersBundle):
    """Transformer, VAE, Qwen2.5-VL and tokenizer of one checkpoint, see `DiffusersBundle`."""

    family = "Qwen-Image"
    takes_attention_backend = True
    pipeline_classes = ("QwenImagePipeline",)
    components = {
        "transformer": trained(QwenImageTransformer2DModel),
        "vae": autoencoder(AutoencoderKLQwenImage),
        "text_encoder": text_encoder(Qwen2_5_VLForConditionalGeneration),
        "tokenizer": processor(),
    }
    text_class = QwenImageTextEncoders
    block_class_names = ("QwenImageTransformerBlock",)
    spreads_tokens = True
    token_plan = TokenPlan(
        arguments={
            "transformer_blocks.0": {"hidden_states": IMAGE, "encoder_hidden_states": TEXT},
            "transformer_blocks.*": {"modulate_index": IMAGE, "encoder_hidden_states_mask": TEXT},
        },
        outputs={"pos_embed": {0: Tokens("image", 0), 1: Tokens("text", 0)}},
        attention={"transformer_blocks.*.attn": ("text", "image")},
        whole_again={"proj_out": IMAGE},
    )
    lora_target_modules = JOINT_ATTENTION

    def after_loading(self) -> None:
        """Raises ConfigError for a transformer that embeds its guidance."""
        convolve_images_in_2d(self.vae)
        if self.transformer.config["guidance_embeds"]:
            # Its timestep embedding takes no guidance, so the stock pipeline fails too.
            raise ConfigError(
                f"{self.pretrained_model} says guidance_embeds: true, which the QwenImageTransformer2DModel of "
                f"diffusers {diffusers.__version__} cannot run. Use a checkpoint without, and sampling.guidance_scale."
            )


class QwenImageInpaintBundle(QwenImageBundle):
    """Any checkpoint of Qwen-Image, to paint into an image; see `QwenImageBundle`."""

    pipeline_classes = ("QwenImageInpaintPipeline", "QwenImagePipeline")
    needs_mask = True
    reads_media = True
    needs_media = True
    most_images = 1
