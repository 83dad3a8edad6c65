"""Tiny random checkpoints in the layouts that the scorers load, and the scorers built on them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from unirl.reward.local.images.clip import CLIPRewardScorer
from unirl.reward.local.images.hpsv2 import HPSv2RewardScorer
from unirl.reward.local.images.image_reward import ImageRewardScorer
from unirl.reward.local.images.pickscore import PickScoreRewardScorer
from unirl.reward.worlds.shapes_gradient import ShapesGradientScorer

SIDE = 16
"""Pixels of a model's input."""
SHAPES_PROMPTS = ["a red circle", "three blue squares", "a red circle left of a blue square", "a green triangle"]
TEXT_SETTINGS: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "encoder_width": 768,
    "type_vocab_size": 2,
}


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Matrices of scale 0.3, norms near 1, everything else of scale 0.1."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        is_norm = len(shape) == 1 and name.endswith("weight")
        found[name] = torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1) + float(is_norm)
    return found


def open_clip_state(width: int = 32, context: int = 24, vocabulary: int = 514) -> dict[str, torch.Tensor]:
    """A CLIP model under open_clip's names, two blocks a tower, patches of 8 x 8."""
    shapes: dict[str, tuple[int, ...]] = {
        "positional_embedding": (context, width),
        "text_projection": (width, 16),
        "token_embedding.weight": (vocabulary, width),
        "ln_final.weight": (width,),
        "ln_final.bias": (width,),
        "visual.class_embedding": (width,),
        "visual.positional_embedding": ((SIDE // 8) ** 2 + 1, width),
        "visual.proj": (width, 16),
        "visual.conv1.weight": (width, 3, 8, 8),
    }
    shapes |= {f"visual.{name}.{kind}": (width,) for name in ("ln_pre", "ln_post") for kind in ("weight", "bias")}
    for tower in ("", "visual."):
        for block in (f"{tower}transformer.resblocks.{i}" for i in range(2)):
            shapes |= {f"{block}.{name}.{kind}": (width,) for name in ("ln_1", "ln_2") for kind in ("weight", "bias")}
            for name, rows, columns in (("mlp.c_fc", width, width), ("mlp.c_proj", width, width)):
                shapes |= {f"{block}.{name}.weight": (rows, columns), f"{block}.{name}.bias": (rows,)}
            shapes |= {f"{block}.attn.in_proj_weight": (3 * width, width), f"{block}.attn.in_proj_bias": (3 * width,)}
            shapes |= {f"{block}.attn.out_proj.weight": (width, width), f"{block}.attn.out_proj.bias": (width,)}
    return random_tensors(shapes) | {"logit_scale": torch.tensor(4.0)}


def image_reward_state(width: int = 64) -> dict[str, torch.Tensor]:
    """ImageReward under the names of its package: two blocks a tower, patches of 8 x 8, a small head."""
    text, vision = TEXT_SETTINGS["hidden_size"], "blip.visual_encoder."
    shapes: dict[str, tuple[int, ...]] = {
        f"{vision}cls_token": (1, 1, width),
        f"{vision}pos_embed": (1, (SIDE // 8) ** 2 + 1, width),
        f"{vision}patch_embed.proj.weight": (width, 3, 8, 8),
        f"{vision}patch_embed.proj.bias": (width,),
        f"{vision}norm.weight": (width,),
        f"{vision}norm.bias": (width,),
        "blip.vision_proj.weight": (8, width),
        "blip.text_proj.weight": (8, text),
        "blip.text_encoder.embeddings.word_embeddings.weight": (TEXT_SETTINGS["vocab_size"], text),
        "blip.text_encoder.embeddings.position_embeddings.weight": (TEXT_SETTINGS["max_position_embeddings"], text),
        "blip.text_encoder.embeddings.LayerNorm.weight": (text,),
        "blip.text_encoder.embeddings.LayerNorm.bias": (text,),
    }

    def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}

    for i in range(2):
        block = f"{vision}blocks.{i}"
        shapes |= linear(f"{block}.attn.qkv", 3 * width, width) | linear(f"{block}.attn.proj", width, width)
        shapes |= linear(f"{block}.mlp.fc1", 96, width) | linear(f"{block}.mlp.fc2", width, 96)
        shapes |= {f"{block}.{name}.{kind}": (width,) for name in ("norm1", "norm2") for kind in ("weight", "bias")}
        layer = f"blip.text_encoder.encoder.layer.{i}"
        for attention, source in (("attention", text), ("crossattention", width)):
            shapes |= linear(f"{layer}.{attention}.self.query", text, text)
            shapes |= linear(f"{layer}.{attention}.self.key", text, source)
            shapes |= linear(f"{layer}.{attention}.self.value", text, source)
            shapes |= linear(f"{layer}.{attention}.output.dense", text, text)
        shapes |= linear(f"{layer}.intermediate.dense", TEXT_SETTINGS["intermediate_size"], text)
        shapes |= linear(f"{layer}.output.dense", text, TEXT_SETTINGS["intermediate_size"])
        for norm in ("attention.output", "crossattention.output", "output"):
            shapes |= {f"{layer}.{norm}.LayerNorm.{kind}": (text,) for kind in ("weight", "bias")}
    for place, rows, columns in ((0, 20, text), (2, 10, 20), (4, 6, 10), (6, 4, 6), (7, 1, 4)):
        shapes |= linear(f"mlp.layers.{place}", rows, columns)
    return random_tensors(shapes) | {"blip.text_encoder.embeddings.position_ids": torch.arange(40)[None]}


def write_hpsv2(folder: Path) -> None:
    """The published file of HPSv2.1, in tiny."""
    torch.save({"state_dict": open_clip_state()}, folder / "HPS_v2.1_compressed.pt")


def write_image_reward(folder: Path) -> None:
    """The published files of ImageReward, in tiny, and a BERT tokenizer."""
    torch.save(image_reward_state(), folder / "ImageReward.pt")
    (folder / "med_config.json").write_text(json.dumps(TEXT_SETTINGS))
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters)]
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)


def differentiable_scorer(kind: str, clip_folder: str, folder: Path):
    """One of "clip", "pickscore", "hpsv2", "image_reward", "shapes_gradient" on tiny random weights."""
    if kind == "clip":
        return CLIPRewardScorer(model=clip_folder, batch_size=2)
    if kind == "pickscore":
        return PickScoreRewardScorer(model=clip_folder, processor=clip_folder, batch_size=2)
    if kind == "hpsv2":
        write_hpsv2(folder)
        return HPSv2RewardScorer(checkpoint=str(folder), model=clip_folder, batch_size=2)
    if kind == "image_reward":
        write_image_reward(folder)
        return ImageRewardScorer(model=str(folder), tokenizer=str(folder), batch_size=2)
    return ShapesGradientScorer(output="log_probability", batch_size=2)
