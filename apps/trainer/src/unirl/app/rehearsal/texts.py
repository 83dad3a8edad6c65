"""Completions of full length, of which three tokens are decoded: the others cost what the third did."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from unirl.models.ar import Decoder
from unirl.models.packed.language import TextCache
from unirl.models.text_adapter import TextAdapter
from unirl.models.text_pipeline import AutoregressivePipeline
from unirl.rehearsal.repeats import Repeats, replaced
from unirl.types.errors import ContractError
from unirl.types.kept_texts import KeptTexts
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

FEW = 2
"""Tokens of a completion that are drawn after separate forwards: after the prompt, and after the first token."""


@contextmanager
def longest_texts(pipelines: Iterable[object], repeats: Repeats) -> Generator[None]:
    """Within it every completion has as many tokens as its parameters allow, the most that a rollout can hold."""
    with ExitStack() as stack:
        for pipeline in pipelines:
            if isinstance(pipeline, AutoregressivePipeline):
                stack.enter_context(replaced(pipeline, "generate", _generating(pipeline, repeats)))
        yield


def _generating(pipeline: AutoregressivePipeline, repeats: Repeats) -> Callable[..., TextSegment]:
    sampled, remembered, decoded = pipeline.generate, pipeline.remember, pipeline.decoder

    @torch.no_grad()
    def generate(
        conditions: Conditions,
        params: ARSamplingParams,
        *,
        noise_keys: Sequence[str],
        any_rank: Callable[[bool], bool] | None = None,
        num_begun: Sequence[int] | None = None,
        is_ending: Callable[[], bool] | None = None,
        kept: KeptTexts | None = None,
    ) -> TextSegment:
        del any_rank, num_begun, is_ending, kept
        # Nothing ends early, and all ranks end together.
        tokens = FirstTokens(repeats, params.max_new_tokens)
        with (
            tokens,
            replaced(pipeline, "decoder", lambda *given: tokens.of(decoded(*given))),
            replaced(pipeline, "remember", lambda *_: None),
            replaced(pipeline.adapter, "prompt_keys", keys_of_groups(pipeline.adapter, params.samples_per_prompt)),
        ):
            sampled(conditions, params, noise_keys=noise_keys, any_rank=_always, is_ending=tokens.are_decoded)
        num, num_tokens, device = len(noise_keys), params.max_new_tokens, tokens.device
        segment = TextSegment.pack(
            tokens=list(torch.zeros(num, num_tokens, dtype=torch.long, device=device)),
            log_probs=None if params.is_greedy else list(torch.zeros(num, num_tokens, device=device)),
            status=torch.full((num,), int(SegmentStatus.TRUNCATED), device=device),
            params=params,
        )
        remembered(conditions, segment)
        return segment

    return generate


def keys_of_groups(adapter: TextAdapter, num: int) -> Callable[[Conditions], list[Hashable]]:
    """Keys of prompts that tell groups apart, whose images have no values here."""
    own = adapter.prompt_keys
    return lambda conditions: [(row // num, key) for row, key in enumerate(own(conditions))]


def _always(has_work: bool) -> bool:
    return True


class FirstTokens(ExitStack):
    """The first tokens of a rollout, of which the last one that is decoded counts for all that are left."""

    def __init__(self, repeats: Repeats, num_tokens: int) -> None:
        super().__init__()
        self._repeats = repeats
        self._num_tokens = num_tokens
        self._num_asked = 0
        self._cache_bytes = 0
        self._decoder: Decoder | None = None
        self._grown: Tensor | None = None
        """What the cache grows by until the last token."""

    def of(self, decoder: Decoder) -> Decoder:
        """The decoder of the rollout, in which no row is done: what was drawn has no values to end by."""
        step, every = decoder.step, torch.ones_like(decoder.rows, dtype=torch.bool)
        # Taken back at the end: a decoder that held itself would keep its cache until the next collection.
        self.enter_context(replaced(decoder, "step", lambda tokens, is_alive: step(tokens, every)))
        self._decoder = decoder
        return decoder

    @property
    def device(self) -> torch.device:
        """Device of the rollout."""
        return self._made.rows.device

    def are_decoded(self) -> bool:
        """True after a token that stands for the rest. Asked before each one."""
        number, self._num_asked = self._num_asked, self._num_asked + 1
        if number == FEW - 1:
            self._cache_bytes = _num_bytes(self._made.cache)
        if number == FEW:
            left = self._num_tokens - FEW
            per_token = _num_bytes(self._made.cache) - self._cache_bytes
            self._grown = torch.empty(per_token * left, dtype=torch.uint8, device=self.device)
            self.enter_context(self._repeats.repeated(left))
        if number > FEW:
            self.close()
            self._grown = None
        return number > FEW

    @property
    def _made(self) -> Decoder:
        if self._decoder is None:
            raise ContractError("tokens were decoded without a decoder")
        return self._decoder


def _num_bytes(cache: Any) -> int:  # Any: as `LanguageBundle.new_cache` gives it
    """Bytes of keys and values."""
    if isinstance(cache, TextCache):
        kept = [] if cache.known is None else [part for layer in cache.known.layers for part in layer]
    else:
        kept = [part for layer in cache.layers for part in (layer.keys, layer.values)]
    return sum(part.numel() * part.element_size() for part in kept)
