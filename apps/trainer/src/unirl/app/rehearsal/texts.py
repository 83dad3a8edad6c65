"""Completions of full length, of which three tokens are decoded: the others cost what the third did."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from unirl.models.adapter import require_condition
from unirl.models.ar import Decoder
from unirl.models.packed.language import TextCache
from unirl.models.text_pipeline import AutoregressivePipeline
from unirl.models.token_sampling import draw
from unirl.rehearsal.repeats import Repeats, replaced
from unirl.types.conditions import PromptCondition
from unirl.types.devices import wide_float
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
        del noise_keys, any_rank, num_begun, is_ending, kept
        # Nothing is drawn or ended early, and all ranks end together.
        prompts = require_condition(conditions, "prompt", PromptCondition).unpack("tokens")
        num, num_tokens = len(prompts), params.max_new_tokens
        pipeline.adapter.check_context([len(prompt) for prompt in prompts], num_tokens)
        device = prompts[0].device
        decoder = Decoder(pipeline.adapter, conditions, prompts, num_tokens)
        uniform = torch.zeros(num, dtype=wide_float(device), device=device)
        chosen, _ = draw(decoder.start(), uniform, params)
        if num_tokens > FEW:
            before = _num_bytes(decoder.cache)
            every = torch.ones_like(decoder.rows, dtype=torch.bool)
            chosen, _ = draw(decoder.step(chosen, every), uniform, params)
            left = num_tokens - FEW
            grown = torch.empty((_num_bytes(decoder.cache) - before) * left, dtype=torch.uint8, device=device)
            with repeats.repeated(left):
                draw(decoder.step(chosen, every), uniform, params)
            del grown
        segment = TextSegment.pack(
            tokens=list(torch.zeros(num, num_tokens, dtype=torch.long, device=device)),
            log_probs=None if params.is_greedy else list(torch.zeros(num, num_tokens, device=device)),
            status=torch.full((num,), int(SegmentStatus.TRUNCATED), device=device),
            params=params,
        )
        pipeline.remember(conditions, segment)
        return segment

    return generate


def _num_bytes(cache: Any) -> int:  # Any: as `LanguageBundle.new_cache` gives it
    """Bytes of keys and values."""
    if isinstance(cache, TextCache):
        kept = [] if cache.known is None else [part for layer in cache.known.layers for part in layer]
    else:
        kept = [part for layer in cache.layers for part in (layer.keys, layer.values)]
    return sum(part.numel() * part.element_size() for part in kept)
