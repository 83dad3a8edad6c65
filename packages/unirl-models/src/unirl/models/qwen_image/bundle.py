"""The modules of a Qwen-Image pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from typing import Any

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.qwen_image.one_frame import convolve_images_in_2d
from unirl.models.qwen_image.text import QwenImageTextEncoders
from unirl.types.errors import ConfigError

try:
    import diffusers
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLForConditionalGeneration
except ImportError as error:
    raise ImportError(
        "unirl.models.qwen_image needs diffusers and transformers: pip install 'unirl-models[diffusers]'"
    ) from error


class QwenImageBundle(DiffusersBundle):
    """Transformer, VAE, Qwen2.5-VL and tokenizer of one checkpoint, see `DiffusersBundle`."""

    family = "Qwen-Image"
    pipeline_classes = ("QwenImagePipeline",)
    components = {
        "transformer": trained(QwenImageTransformer2DModel),
        "vae": autoencoder(AutoencoderKLQwenImage),
        "text_encoder": text_encoder(Qwen2_5_VLForConditionalGeneration),
        "tokenizer": processor(),
    }
    text_class = QwenImageTextEncoders
    block_class_names = ("QwenImageTransformerBlock",)
    # The projections of the joint attention, image and text side.
    lora_target_modules = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )

    # Any: the keywords of DiffusersBundle.
    def __init__(self, pretrained_model: str, **options: Any) -> None:
        super().__init__(pretrained_model, **options)
        convolve_images_in_2d(self.vae)
        if self.transformer.config["guidance_embeds"]:
            # Its timestep embedding takes no guidance, so the stock pipeline fails too.
            raise ConfigError(
                f"{pretrained_model} says guidance_embeds: true, which the QwenImageTransformer2DModel of diffusers "
                f"{diffusers.__version__} cannot run. Use a checkpoint without, and sampling.guidance_scale."
            )
