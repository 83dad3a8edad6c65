"""A unified model as a language model: what its text adapters share."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.models.text_adapter import TextAdapter


class PackedTextAdapter(TextAdapter):
    """Reads texts and images, without a chat template; ids beyond the vocabulary stand for images."""

    read_media = frozenset({"image"})
    reads = "'text': Texts and 'image'"

    def num_image_tokens(self, prompt: Sequence[int]) -> int:
        return sum(token >= self.bundle.vocabulary_size for token in prompt)
