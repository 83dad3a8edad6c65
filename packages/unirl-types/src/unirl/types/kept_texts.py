"""What an engine keeps of texts that it was told to end early, so that they go on without another prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class KeptTexts:
    """Keys and values of one batch of unfinished texts, which later weights continue: all tokens but the last have been
    read. Holds one batch; the next one that is kept replaces it.
    """

    def __init__(self) -> None:
        self._decoder: Any = None  # Any: the pipeline's own
        self._noise_keys: list[str] = []
        self._tokens: list[Tensor] = []
        self.was_held = False
        """True if the last `take` found what it asked for."""

    def keep(self, decoder: Any, noise_keys: Sequence[str], tokens: Sequence[Tensor]) -> None:  # Any: as above
        """Keep a batch. decoder: what continues it, with these rows. tokens: prompt and completion of each, int64."""
        self._decoder, self._noise_keys, self._tokens = decoder, list(noise_keys), list(tokens)

    def take(self, noise_keys: Sequence[str], tokens: Sequence[Tensor]) -> Any:  # Any: as above
        """The decoder of exactly these texts with these tokens, which is then no longer kept; None if others, or none,
        are."""
        self.was_held = (
            self._decoder is not None
            and self._noise_keys == list(noise_keys)
            and all(torch.equal(own, each) for own, each in zip(self._tokens, tokens, strict=True))
        )
        if not self.was_held:
            return None
        decoder = self._decoder
        self.forget()
        return decoder

    def forget(self) -> None:
        """Free what is kept."""
        self._decoder, self._noise_keys, self._tokens = None, [], []
