"""A random StableDiffusion3Pipeline of a few thousand parameters, with all of its stock parts."""

import importlib
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

diffusers: Any = importlib.import_module("diffusers")  # its names are lazy, with dummies for what is not installed


def byte_tokenizer(**special: str) -> transformers.PreTrainedTokenizerFast:
    """One token per byte."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet()) + sorted(set(special.values()))
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=77, **special)


def clip() -> tuple[transformers.PreTrainedTokenizerFast, transformers.CLIPTextModelWithProjection]:
    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="<e>", pad_token="<e>")
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=16,
        eos_token_id=tokenizer.eos_token_id,
    )
    return tokenizer, transformers.CLIPTextModelWithProjection(config)


def tiny_sd3() -> Any:
    """float32, 8 x 8 latents for 8 x 8 images, deterministic weights."""
    torch.manual_seed(0)
    (tokenizer, text_encoder), (tokenizer_2, text_encoder_2) = clip(), clip()
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=8,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=text_encoder,
        text_encoder_2=text_encoder_2,
        text_encoder_3=None,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer_2,
        tokenizer_3=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
