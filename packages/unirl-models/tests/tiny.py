"""A random SD3 of about 60,000 parameters in the folder layout of the real one, built from its real classes.

Any stands for classes of diffusers and transformers, which their libraries type as unions with placeholders.
"""

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from unirl.models.tiny import text


def byte_tokenizer(first: dict[str, int], **special: str) -> Any:
    """As in `unirl.models.tiny.text`, of texts as long as CLIP's."""
    return text.byte_tokenizer(first, model_max_length=77, **special)


def clip_tokenizer() -> Any:
    """Bytes first, then begin and end of text, as CLIP's own order has it."""
    end = "<|endoftext|>"
    return byte_tokenizer({}, bos_token="<|startoftext|>", eos_token=end, pad_token=end, unk_token=end)


def t5_tokenizer() -> Any:
    """T5's special tokens, then bytes."""
    return text.t5_tokenizer(model_max_length=77)


def clip_encoder() -> Any:
    """Two layers of width 16."""
    config = transformers.CLIPTextConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=16,
        max_position_embeddings=77,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
        hidden_act="gelu",
    )
    return transformers.CLIPTextModelWithProjection(config)


def t5_encoder() -> Any:
    """Two layers of width 48: wider than both CLIP encoders together, as in the real model."""
    return transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=300, d_model=48, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    )


def tiny_autoencoder_kl() -> Any:
    """A factor of 2, four channels."""
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5305,
    )


def tiny_sd3(*, has_t5: bool = True) -> Any:
    """A pipeline of random weights, seed 0: an image of 32 pixels has latents [4, 16, 16] and 64 tokens."""
    torch.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=48,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=16,
    )
    vae = tiny_autoencoder_kl()
    pipeline_class: Any = diffusers.StableDiffusion3Pipeline
    pipeline = pipeline_class(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=clip_encoder(),
        text_encoder_2=clip_encoder(),
        text_encoder_3=t5_encoder() if has_t5 else None,
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        tokenizer_3=t5_tokenizer() if has_t5 else None,
    )
    return _quiet(pipeline)


def load_reference(folder: Path, *, has_t5: bool = True) -> Any:
    """diffusers' own pipeline of a folder."""
    pipeline_class: Any = diffusers.StableDiffusion3Pipeline
    without = {} if has_t5 else {"text_encoder_3": None, "tokenizer_3": None}
    return _quiet(pipeline_class.from_pretrained(folder, **without))


def _quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval()
    return pipeline
