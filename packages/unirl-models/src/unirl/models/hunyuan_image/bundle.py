"""The modules of a HunyuanImage 2.1 pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.hunyuan_image.text import HunyuanImageTextEncoders
from unirl.types.errors import ConfigError

try:
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanimage import AutoencoderKLHunyuanImage
    from diffusers.models.transformers.transformer_hunyuanimage import HunyuanImageTransformer2DModel
    from transformers import Qwen2_5_VLForConditionalGeneration, T5EncoderModel
except ImportError as error:
    raise ImportError(
        "unirl.models.hunyuan_image needs diffusers and transformers: pip install 'unirl-models[diffusers]'"
    ) from error


class HunyuanImageBundle(DiffusersBundle):
    """Transformer, VAE, Qwen2.5-VL, ByT5 and tokenizers of one checkpoint, see `DiffusersBundle`."""

    family = "HunyuanImage 2.1"
    pipeline_classes = ("HunyuanImagePipeline",)
    components = {
        "transformer": trained(HunyuanImageTransformer2DModel),
        "vae": autoencoder(AutoencoderKLHunyuanImage),
        "text_encoder": text_encoder(Qwen2_5_VLForConditionalGeneration),
        "text_encoder_2": text_encoder(T5EncoderModel),
        "tokenizer": processor(),
        "tokenizer_2": processor(),
    }
    text_class = HunyuanImageTextEncoders
    block_class_names = ("HunyuanImageTransformerBlock", "HunyuanImageSingleTransformerBlock")
    # Attention of all blocks and of the text refiner, and the feed-forward layers of the two-stream blocks.
    lora_target_modules = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )
    latent_divisor = 32

    def check_index(self) -> None:
        """Raises ConfigError for a mean-flow transformer (the released distilled checkpoint is one)."""
        if self.folder.config("transformer").get("use_meanflow"):
            raise ConfigError(
                f"{self.pretrained_model} is a mean-flow checkpoint, whose velocity depends on the next noise level "
                "too. Use one with use_meanflow: false in transformer/config.json."
            )
