"""Rewards for text in an image that matches what the prompt asks for, whatever engine reads it.

Source: Flow-GRPO (arXiv 2505.05470), section 4.1, visual text rendering.
"""

from __future__ import annotations

import re
from abc import abstractmethod

import torch
from PIL import Image
from torch import Tensor

from unirl.reward.base import LocalScorer
from unirl.reward.local.pixels import to_pictures
from unirl.types.errors import ContractError
from unirl.types.reward import RewardRequest

_QUOTED = re.compile('"([^"]*)"|\u201c([^\u201d]*)\u201d')


class OCRScorer(LocalScorer):
    """1 - edit distance / length, between what the prompt quotes and what is read; subclasses read.

    The target is the text between the prompt's first pair of double quotes, straight or curly; a prompt without one
    raises ContractError under every failure policy. An image that cannot be read is a failed sample; one in which no
    text is found has an empty text, and so 0.
    """

    @abstractmethod
    def read(self, pictures: list[Image.Image]) -> list[str]:
        """All text of each RGB image, its lines joined. Raises RuntimeError if reading fails."""

    def score_batch(self, request: RewardRequest) -> Tensor:
        """float32 [b] in [0, 1]."""
        targets = [quoted(prompt, self.name) for prompt in request.prompts]
        found = self.read(to_pictures(request.pixels))
        return torch.tensor([similarity(target, text) for target, text in zip(targets, found, strict=True)])


def quoted(prompt: str, scorer: str) -> str:
    """The text that a prompt quotes first. Raises ContractError if it quotes none."""
    match = _QUOTED.search(prompt)
    target = (match[1] or match[2] or "") if match else ""
    if not target.strip():
        raise ContractError(
            f"scorer {scorer}: the prompt {prompt!r} quotes no text. Put what the image should say in double quotes, "
            'as in: a sign that says "Open".'
        )
    return target


def similarity(target: str, text: str) -> float:
    """1 where `text` contains `target`, else 1 - min(distance, length) / length of the target.

    Both without white space and in lower case; distance is Levenshtein's, to the whole text.
    Raises ImportError without rapidfuzz.
    """
    try:
        from rapidfuzz.distance import Levenshtein
    except ModuleNotFoundError as error:
        raise ImportError("OCR scorers need rapidfuzz. Install it with: pip install 'unirl-reward[ocr]'") from error
    target, text = (re.sub(r"\s", "", each).lower() for each in (target, text))
    if target in text:
        return 1.0
    return 1.0 - min(Levenshtein.distance(target, text), len(target)) / len(target)
