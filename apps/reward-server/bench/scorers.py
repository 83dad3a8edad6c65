"""Scorers whose cost is known."""

# ruff: noqa: INP001 - a script's helper, no package
from __future__ import annotations

import time

import torch
from torch import Tensor

from unirl.reward.base import LocalScorer
from unirl.types.reward import RewardRequest


class NullScorer(LocalScorer):
    """The mean of the first row of pixels: next to no work, and a number that tells samples apart."""

    def __init__(self, *, name: str = "null", batch_size: int = 64) -> None:
        super().__init__(name=name, batch_size=batch_size)

    def score_batch(self, request: RewardRequest) -> Tensor:
        """[b] float32."""
        return request.pixels[:, :, 0].mean((1, 2))


class SlowScorer(NullScorer):
    """As NullScorer, after a rest."""

    def __init__(self, *, seconds: float = 0.2, name: str = "slow", batch_size: int = 8) -> None:
        super().__init__(name=name, batch_size=batch_size)
        self.seconds = seconds

    def score_batch(self, request: RewardRequest) -> Tensor:
        """[b] float32."""
        time.sleep(self.seconds)
        return super().score_batch(request)


def tiny_clip(folder: str) -> None:
    """Save a random CLIP of two layers, 32 wide, for images of 224 x 224, where CLIPRewardScorer can load it."""
    import transformers
    from tokenizers import pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*symbols, *(symbol + "</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = transformers.CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[])
    torch.manual_seed(0)
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(words), "max_position_embeddings": 77, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.CLIPConfig(
        text_config=tower | text, vision_config=tower | {"image_size": 224, "patch_size": 16}, projection_dim=32
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    crop = {"height": 224, "width": 224}
    transformers.CLIPImageProcessorPil(size={"shortest_edge": 224}, crop_size=crop).save_pretrained(folder)
