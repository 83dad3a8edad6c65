"""OpenVLA-OFT as a pipeline: chunks of moves as tokens, all drawn from one pass.

Legend: see `unirl.models.action.heads`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import functional

from unirl.models.action.heads import TokensPipeline
from unirl.models.action.openvla.bundle import OpenVLABundle
from unirl.models.action.openvla.configuration import NUM_TOKENS
from unirl.models.evaluation_mode import evaluating
from unirl.types.actions import Observations
from unirl.types.errors import ConfigError, ContractError

EMPTY = "\u2581"
"""Llama's token of a space, with which a prompt ends."""


class OpenVLAActionPipeline(TokensPipeline[OpenVLABundle]):
    """Tokens of moves by OpenVLA-OFT. A number has 256 tokens, the last ones of the vocabulary, for 255 centres of bins
    between -1 and 1; the first two tokens stand for the same one.

    Features are the mean of the hidden states that the chunk is said from.
    """

    def __init__(self, bundle: OpenVLABundle) -> None:
        super().__init__(bundle)
        self._network = bundle.network
        robot = bundle.robot
        self._action = torch.tensor([robot.action_offset, robot.action_scale], device=bundle.device)

    def encode_prompts(self, texts: Sequence[str]) -> Tensor:
        """[n, max_text_tokens] int64, -1 after the end."""
        tokenizer, most = self._bundle.tokenizer, self._bundle.max_text_tokens
        space = tokenizer.get_vocab().get(EMPTY)
        rows = []
        for text in texts:
            prompt = f"In: What action should the robot take to {text.strip().lower()}?\nOut: "
            ids = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False).input_ids]
            if space is not None and ids[-1] != space:
                ids.append(space)
            if len(ids) > most:
                raise ConfigError(
                    f"the task {text[:60]!r} has {len(ids)} tokens with its frame, bundle.max_text_tokens is {most}. "
                    "Raise it, or shorten the task."
                )
            rows.append([*ids, *[-1] * (most - len(ids))])
        return torch.tensor(rows, dtype=torch.long)

    def features(self, seen: Observations) -> Tensor:
        """[n, W] float32."""
        return self._logits(seen)[0]

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients."""
        return evaluating(self._bundle)

    def _logits(self, seen: Observations) -> tuple[Tensor, Tensor]:
        if seen.images is None or seen.prompts is None:
            raise ContractError("OpenVLA sees an image and reads a task; this observation lacks one of them")
        features, logits = self._network(self._pixels(seen.images), seen.prompts)
        length, size = self.chunk_shape
        return features, logits.unflatten(1, (-1, size))[:, :length]

    def _pixels(self, images: Tensor) -> Tensor:
        """[n, 6, h, w] of uint8 [n, 3, H, W], resized without keeping the aspect ratio, as OpenVLA does."""
        side = self._bundle.shape.image_side
        pixels = images.float()
        if images.shape[-2:] != (side, side):
            pixels = functional.interpolate(pixels, (side, side), mode="bicubic", align_corners=False, antialias=True)
            pixels = pixels.round().clamp(0, 255)
        return ((pixels / 255).repeat(1, 2, 1, 1) - self._bundle.means) / self._bundle.stds

    def _moves(self, tokens: Tensor) -> Tensor:
        # Token 32000 - d stands for centre d - 1 of the 255 between 256 edges, and d = 256 for the last centre too.
        centre = (NUM_TOKENS - 1 - tokens).clamp(max=NUM_TOKENS - 2)
        numbers = (2 * centre + 1) / (NUM_TOKENS - 1) - 1
        return (self._action[0] + self._action[1] * numbers.float()).clamp(-1, 1)
