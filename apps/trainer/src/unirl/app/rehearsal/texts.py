"""Completions of full length, of which three tokens are decoded: the others cost what the third did. Episodes of turns
have all of their turns, with answers in between."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.ar import Decoder, GuidedDecoder
from unirl.models.extras import from_extra
from unirl.models.janus.pipeline import JanusPipeline
from unirl.models.packed.language import TextCache
from unirl.models.text_adapter import TextAdapter
from unirl.models.text_pipeline import AutoregressivePipeline
from unirl.rehearsal.repeats import Repeats, replaced
from unirl.rollout.turns.episodes import is_of_later_turn
from unirl.types.conditions import Bridge, PromptCondition
from unirl.types.errors import ContractError
from unirl.types.kept_texts import KeptTexts
from unirl.types.messages import Message, ShownImage
from unirl.types.protocols.models import Conditions
from unirl.types.recipe import Part
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

with from_extra("transformers"):
    from transformers.cache_utils import CacheLayerMixin

FEW = 2
"""Tokens of a completion that are drawn after separate forwards: after the prompt, and after the first token."""

SMALLEST_IMAGE = 16
"""Pixels below which images of answers are not halved."""


@contextmanager
def longest_texts(
    pipelines: Mapping[str, Iterable[object]], turns: Mapping[str, Part], repeats: Repeats, answer_tokens: int
) -> Generator[None]:
    """Within it every completion has as many tokens as its parameters allow, the most that a rollout can hold.

    pipelines, turns: by policy. answer_tokens: of what an environment answers to a turn, or less where an episode has
    no room for more.
    """
    with ExitStack() as stack:
        for policy, own in pipelines.items():
            for pipeline in own:
                if isinstance(pipeline, AutoregressivePipeline):
                    answers = Answers(pipeline, turns[policy], answer_tokens) if policy in turns else None
                    stack.enter_context(replaced(pipeline, "generate", _generating(pipeline, repeats, answers)))
                    if answers is not None:
                        stack.enter_context(replaced(pipeline, "bridge", answers.bridge))
        yield


class Answers:
    """What an environment answers, as long as all turns of an episode have room for."""

    def __init__(self, pipeline: AutoregressivePipeline, turns: Part, num_tokens: int) -> None:
        self._context_length, self._bridge = pipeline.context_length, pipeline.bridge
        self._num_turns, self._max_tokens = turns.get("max_turns"), turns.get("max_tokens")
        self._most = num_tokens
        self._num_tokens = 0

    def make_room(self, prompt_tokens: int, turn_tokens: int) -> None:
        """Episodes begin, with prompts and turns of so many tokens at most."""
        limit = self._context_length - prompt_tokens
        room = (limit if self._max_tokens is None else min(limit, self._max_tokens)) - self._num_turns * turn_tokens
        self._num_tokens = min(self._most, room // max(1, self._num_turns - 1))

    def bridge(self, messages: Sequence[Message]) -> Bridge:
        """That of messages without text, with images that fit, and with tokens as if there were text."""
        found = self._bridge(messages)
        while (
            len(found.tokens) > self._num_tokens and (smaller := [_halved(message) for message in messages]) != messages
        ):
            messages = smaller
            found = self._bridge(messages)
        return replace(found, tokens=[*found.tokens, *[0] * (self._num_tokens - len(found.tokens))])


def _halved(message: Message) -> Message:
    """With images of half the height and width; small ones stay as they are."""
    return replace(
        message,
        images=tuple(
            ShownImage(image.height // 2, image.width // 2, bytes(3 * (image.height // 2) * (image.width // 2)))
            if min(image.height, image.width) > SMALLEST_IMAGE
            else image
            for image in message.images
        ),
    )


def _generating(
    pipeline: AutoregressivePipeline, repeats: Repeats, answers: Answers | None
) -> Callable[..., TextSegment]:
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
        is_later = any(map(is_of_later_turn, noise_keys))
        if answers is not None and not is_later:
            prompts = require_condition(conditions, "prompt", PromptCondition)
            answers.make_room(int(prompts.lengths.max()), params.max_new_tokens)
        num_equal = 1 if is_later else params.samples_per_prompt  # samples of a group, until they wrote something
        with (
            tokens,
            replaced(pipeline, "decoder", lambda *given: tokens.of(decoded(*given))),
            replaced(pipeline, "remember", lambda *_: None),
            replaced(pipeline.adapter, "prompt_keys", keys_of_groups(pipeline.adapter, num_equal)),
        ):
            sampled(conditions, params, noise_keys=noise_keys, any_rank=_always, is_ending=tokens.are_decoded)
        num, num_tokens, device = len(noise_keys), params.max_new_tokens, tokens.device
        # An environment answers texts that came to their end.
        status, last = SegmentStatus.TRUNCATED, 0
        if answers is not None:
            status, last = SegmentStatus.COMPLETED, pipeline.stop_token_ids(params)[0]
        elif isinstance(pipeline, JanusPipeline):  # an image is complete
            status = SegmentStatus.COMPLETED
        own = torch.tensor([0] * (num_tokens - 1) + [last], device=device)
        segment = TextSegment.pack(
            tokens=[own] * num,
            log_probs=None if params.is_greedy else list(torch.zeros(num, num_tokens, device=device)),
            status=torch.full((num,), int(status), device=device),
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
        self._decoder: Decoder | GuidedDecoder | None = None
        self._grown: Tensor | None = None
        """What the cache grows by until the last token."""

    def of(self, decoder: Decoder | GuidedDecoder) -> Decoder | GuidedDecoder:
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
    def _made(self) -> Decoder | GuidedDecoder:
        if self._decoder is None:
            raise ContractError("tokens were decoded without a decoder")
        return self._decoder


def _num_bytes(cache: Any) -> int:  # Any: as `LanguageBundle.new_cache` gives it
    """Bytes of keys and values. States of linear attention, which do not grow, are left out."""
    if isinstance(cache, TextCache):
        kept = [] if cache.known is None else [part for layer in cache.known.layers for part in layer]
    else:
        growing = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
        kept = [part for layer in growing for part in (layer.keys, layer.values)]
    return sum(part.numel() * part.element_size() for part in kept)
