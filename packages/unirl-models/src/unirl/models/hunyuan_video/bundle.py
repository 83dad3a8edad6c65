"""The modules of a HunyuanVideo pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from typing import Any

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.diffusers_pipeline.lora_targets import JOINT_ATTENTION, JOINT_FEED_FORWARD
from unirl.models.diffusers_pipeline.token_plans import HUNYUAN_TOKENS
from unirl.models.extras import from_extra
from unirl.models.hunyuan_video.image_text import HunyuanVideoImageTextEncoders
from unirl.models.hunyuan_video.text import HunyuanVideoTextEncoders
from unirl.types.errors import ConfigError

with from_extra("diffusers"):
    from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo
    from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoTransformer3DModel
    from transformers import CLIPTextModel, LlamaModel, LlavaForConditionalGeneration


class HunyuanVideoBundle(DiffusersBundle):
    """Transformer, VAE, Llama, CLIP and tokenizers of one checkpoint, see `DiffusersBundle`."""

    family = "HunyuanVideo"
    takes_attention_backend = True
    pipeline_classes = ("HunyuanVideoPipeline",)
    components = {
        "transformer": trained(HunyuanVideoTransformer3DModel),
        "vae": autoencoder(AutoencoderKLHunyuanVideo),
        "text_encoder": text_encoder(LlamaModel),
        "text_encoder_2": text_encoder(CLIPTextModel),
        "tokenizer": processor(),
        "tokenizer_2": processor(),
    }
    text_class = HunyuanVideoTextEncoders
    block_class_names = ("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock")
    spreads_tokens = True
    token_plan = HUNYUAN_TOKENS
    # Attention of all blocks and of the text refiner, and the feed-forward layers of the two-stream blocks.
    lora_target_modules = (*JOINT_ATTENTION, *JOINT_FEED_FORWARD)
    frame_divisor = 4
    recipe_rules = "unirl.models.hunyuan_video.rules"
    released_guidance = 6.0
    """Value of the guidance input that the checkpoint was published with."""


class HunyuanVideoImageBundle(HunyuanVideoBundle):
    """A checkpoint that makes videos which begin with a given image, see `HunyuanVideoBundle`.

    Raises ConfigError if its transformer reads images in a way that is not supported.
    """

    family = "HunyuanVideo I2V"
    pipeline_classes = ("HunyuanVideoImageToVideoPipeline",)
    components = {
        **HunyuanVideoBundle.components,
        "text_encoder": text_encoder(LlavaForConditionalGeneration),
        "image_processor": processor(),
    }
    text_class = HunyuanVideoImageTextEncoders
    text: HunyuanVideoImageTextEncoders
    # Of the two kinds of transformers each has its own.
    # Blocks that replace tokens of the first frame find them by their place in the whole.
    spreads_tokens = False
    token_plan = None
    block_class_names = (
        *HunyuanVideoBundle.block_class_names,
        "HunyuanVideoTokenReplaceTransformerBlock",
        "HunyuanVideoTokenReplaceSingleTransformerBlock",
    )
    reads_media = True
    needs_media = True
    most_images = 1

    @property
    def replaces_first_frame(self) -> bool:
        """True if the image stands where the first latent frame is, not in channels next to the noise."""
        return self.transformer.config["image_condition_type"] == "token_replace"

    @property
    def image_token_stride(self) -> int:
        """One of so many tokens that the text encoder has of the image is read."""
        return 4 if self.replaces_first_frame else 2

    @property
    def text_options(self) -> dict[str, Any]:  # Any: as in the base
        """The processor of images, which the text encoder sees."""
        return {"image_processor": self.processors["image_processor"]}

    def check_index(self) -> None:
        """Raises ConfigError for a transformer that reads no image, or other channels than it says."""
        config = self.folder.config("transformer")
        kind, latents = config.get("image_condition_type"), config.get("out_channels", 16)
        channels = {"latent_concat": 2 * latents + 1, "token_replace": latents}
        if config.get("in_channels", 16) != channels.get(kind):
            raise ConfigError(
                f"{self.folder.path}: transformer/config.json has image_condition_type = {kind!r} and in_channels = "
                f"{config.get('in_channels')}; known are {channels} (kind: channels). Use a checkpoint of image to "
                "video, or HunyuanVideoBundle for one of text alone."
            )
