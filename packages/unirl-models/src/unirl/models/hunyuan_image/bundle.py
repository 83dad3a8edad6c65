"""The modules of a HunyuanImage 2.1 pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.diffusers_pipeline.lora_targets import JOINT_ATTENTION, JOINT_FEED_FORWARD
from unirl.models.diffusers_pipeline.token_plans import HUNYUAN_TOKENS
from unirl.models.extras import from_extra
from unirl.models.hunyuan_image.text import HunyuanImageTextEncoders

with from_extra("diffusers"):
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanimage import AutoencoderKLHunyuanImage
    from diffusers.models.transformers.transformer_hunyuanimage import HunyuanImageTransformer2DModel
    from transformers import Qwen2_5_VLForConditionalGeneration, T5EncoderModel


class HunyuanImageBundle(DiffusersBundle):
    """Transformer, VAE, Qwen2.5-VL, ByT5 and tokenizers of one checkpoint, see `DiffusersBundle`."""

    family = "HunyuanImage 2.1"
    takes_attention_backend = True
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
    spreads_tokens = True
    token_plan = HUNYUAN_TOKENS
    # Attention of all blocks and of the text refiner, and the feed-forward layers of the two-stream blocks.
    lora_target_modules = (*JOINT_ATTENTION, *JOINT_FEED_FORWARD)
    latent_divisor = 32

    def check_index(self) -> None:
        """Raises ConfigError for a mean-flow transformer (the released distilled checkpoint is one)."""
        self.refuse_mean_flow()
