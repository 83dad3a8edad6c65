"""Small checkpoints of families of which none comes with the trainer, written where the matrix is measured.

Any stands for classes of diffusers and transformers, which type them as unions with placeholders.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

import unirl.worlds.shapes
from unirl.models.hunyuan_video15.text import SYSTEM_PROMPT, TEMPLATE_TOKENS

_END = "<|im_end|>"
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_qwen_image(folder: Path) -> None:
    """The Qwen-Image-Edit of the shapes world as a model that is given text alone: its parts are those of Qwen-Image.

    Trained on instructions: what it draws is no picture of a prompt, and depends on the prompt all the same.
    """
    (world,) = unirl.worlds.shapes.__path__
    shutil.copytree(Path(world) / "edits" / "checkpoint", folder, ignore=shutil.ignore_patterns("processor"))
    path = folder / "model_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    del index["processor"]
    path.write_text(json.dumps({**index, "_class_name": "QwenImagePipeline"}), encoding="utf-8")


def write_hunyuan_video15(folder: Path) -> None:
    """Random weights, seed 0: two blocks of two heads, a factor of 4 on a side and in time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _hunyuan_video15().save_pretrained(folder)


def _hunyuan_video15() -> Any:
    pipeline_class: Any = diffusers.HunyuanVideo15Pipeline
    transformer: Any = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,  # four of latents, four of given frames and a mask
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=16,
        text_embed_2_dim=12,
        image_embed_dim=12,
        rope_axes_dim=(2, 2, 4),
        target_size=16,
        task_type="t2v",
    )
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                parameter.mul_(2.0)  # or a random model hardly looks at its text
    vae: Any = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )
    text = transformers.Qwen2_5_VLTextModel(
        transformers.Qwen2_5_VLTextConfig(
            vocab_size=400,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,  # the state that is read is neither the first nor the last
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            initializer_range=0.2,
            rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        )
    )
    glyphs = transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=300, d_model=12, d_kv=6, d_ff=16, num_layers=2, num_heads=2)
    )
    return pipeline_class(
        text_encoder=text,
        tokenizer=_chat_tokenizer(),
        transformer=transformer,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=glyphs,
        tokenizer_2=_bytes({"<pad>": 0, "</s>": 1, "<unk>": 2}, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    )


def _bytes(first: dict[str, int], **special: Any) -> Any:
    """A tokenizer of single bytes, `first` before them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(
        models.BPE(vocab={**first, **{char: len(first) + i for i, char in enumerate(alphabet)}}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


def _chat_tokenizer() -> Any:
    """Bytes, and one word for the beginning of the template, so that the whole template has its published length."""
    tokenizer = _bytes({}, eos_token=_END, pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = _CHAT
    prefix = f"<|im_start|>system\n{SYSTEM_PROMPT}{_END}\n<|im_start|>user\n"
    lengths = {place: len(tokenizer(prefix[place:]).input_ids) for place in range(len(prefix))}
    cut = max(place for place, length in lengths.items() if length == TEMPLATE_TOKENS - 1)
    tokenizer.add_tokens([AddedToken(prefix[:cut], normalized=False, special=True)])
    return tokenizer
