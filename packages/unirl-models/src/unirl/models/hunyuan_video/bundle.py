"""The modules of a HunyuanVideo pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.components import autoencoder, processor, text_encoder, trained
from unirl.models.hunyuan_video.text import HunyuanVideoTextEncoders

try:
    from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo
    from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoTransformer3DModel
    from transformers import CLIPTextModel, LlamaModel
except ImportError as error:
    raise ImportError(
        "unirl.models.hunyuan_video needs diffusers and transformers: pip install 'unirl-models[diffusers]'"
    ) from error


class HunyuanVideoBundle(DiffusersBundle):
    """Transformer, VAE, Llama, CLIP and tokenizers of one checkpoint, see `DiffusersBundle`."""

    family = "HunyuanVideo"
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
    frame_divisor = 4
