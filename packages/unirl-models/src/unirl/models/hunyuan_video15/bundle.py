"""The modules of a HunyuanVideo 1.5 pipeline folder, and what training needs to know of them."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, frozen, processor, text_encoder, trained
from unirl.models.diffusers_pipeline.lora_targets import JOINT_ATTENTION, JOINT_FEED_FORWARD
from unirl.models.extras import from_extra
from unirl.models.hunyuan_video15.text import HunyuanVideo15TextEncoders
from unirl.models.token_plan import IMAGE, TEXT, TokenPlan, Tokens
from unirl.types.errors import ConfigError

with from_extra("diffusers"):
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import (
        AutoencoderKLHunyuanVideo15,
        HunyuanVideo15AttnBlock,
    )
    from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15Transformer3DModel
    from transformers import Qwen2_5_VLTextModel, SiglipVisionModel, T5EncoderModel

# Of a guider that does no more than classifier-free guidance at a scale.
_PLAIN_GUIDER = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}


class HunyuanVideo15Bundle(DiffusersBundle):
    """Transformer, VAE, the text part of Qwen2.5-VL, ByT5 and tokenizers of one checkpoint, see `DiffusersBundle`."""

    family = "HunyuanVideo 1.5"
    takes_attention_backend = True
    pipeline_classes = ("HunyuanVideo15Pipeline",)
    components = {
        "transformer": trained(HunyuanVideo15Transformer3DModel),
        "vae": autoencoder(AutoencoderKLHunyuanVideo15),
        "text_encoder": text_encoder(Qwen2_5_VLTextModel),
        "text_encoder_2": text_encoder(T5EncoderModel),
        "tokenizer": processor(),
        "tokenizer_2": processor(),
    }
    text_class = HunyuanVideo15TextEncoders
    block_class_names = ("HunyuanVideo15TransformerBlock",)
    spreads_tokens = True
    token_plan = TokenPlan(
        arguments={
            "transformer_blocks.0": {"hidden_states": IMAGE, "encoder_hidden_states": TEXT},
            "transformer_blocks.*": {"attention_mask": TEXT},
        },
        outputs={"rope": {0: Tokens("image", 0), 1: Tokens("image", 0)}},
        attention={"transformer_blocks.*.attn": ("image", "text")},
        whole_again={"proj_out": IMAGE},
        needs_parts=("text",),
        masks_queries=True,
    )
    # Attention and feed-forward layers of both streams and of the text refiner.
    lora_target_modules = (*JOINT_ATTENTION, *JOINT_FEED_FORWARD)
    frame_divisor = 4
    decodes_at_once = True
    is_distilled = False
    """True if the checkpoint was distilled to work without classifier-free guidance."""

    def after_loading(self) -> None:
        self.vae.enable_slicing()  # its attention takes one video at a time
        for module in self.vae.modules():
            if isinstance(module, HunyuanVideo15AttnBlock):
                module.prepare_causal_attention_mask = causal_attention_mask

    def check_index(self) -> None:
        """Raises ConfigError for a mean-flow transformer and for a guider that does more than one scale says."""
        self.refuse_mean_flow()
        guider = self.folder.config("guider", "guider_config.json")
        self.is_distilled = not guider.get("enabled", True)
        other = {name: guider.get(name, plain) for name, plain in _PLAIN_GUIDER.items()}
        if self.folder.class_of("guider") != "ClassifierFreeGuidance" or other != _PLAIN_GUIDER:
            raise ConfigError(
                f"the guider of {self.pretrained_model} is a {self.folder.class_of('guider')} with {other}; this "
                f"family knows ClassifierFreeGuidance with {_PLAIN_GUIDER}. Edit guider/guider_config.json."
            )


class HunyuanVideo15ImageBundle(HunyuanVideo15Bundle):
    """A checkpoint that makes videos which begin with a given image, see `HunyuanVideo15Bundle`."""

    pipeline_classes = ("HunyuanVideo15ImageToVideoPipeline",)
    components = {
        **HunyuanVideo15Bundle.components,
        "image_encoder": frozen(SiglipVisionModel),
        "feature_extractor": processor(),
    }
    reads_media = True
    needs_media = True
    most_images = 1


def causal_attention_mask(
    n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> Tensor:
    """0 from each token to those of its frame and of earlier ones, else -inf, [B, N, N] or [N, N], N = n_frame n_hw.

    Equal to that of diffusers' block, which writes it row by row: 50,000 operations for 121 frames of 480p.
    """
    num_tokens = n_frame * n_hw
    mask = torch.full((num_tokens, num_tokens), float("-inf"), dtype=dtype, device=device)
    for start in range(0, num_tokens, n_hw):
        mask[start : start + n_hw, : start + n_hw] = 0
    return mask if batch_size is None else mask.unsqueeze(0).expand(batch_size, -1, -1)
