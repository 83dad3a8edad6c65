"""The object that engines and trainers hold of a language model: the one place where tokens are drawn and scored.

Rollout decodes with a KV cache, replay runs all tokens at once, packed without padding. In float32 on a CPU their
log-probs agree to 1e-6 nats or so (other matrix shapes round otherwise); a replay of the same samples in the same order
gives the same bits.
Implements `unirl.types.protocols.models.AutoregressivePipeline`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from unirl.models.adapter import num_rows, require_condition
from unirl.models.ar import (
    Decoder,
    GuidedDecoder,
    Inputs,
    ReplayedTokens,
    check_replayable,
    packed_inputs,
    padded_inputs,
)
from unirl.models.evaluation_mode import evaluating
from unirl.models.spread_scores import SpreadScores
from unirl.models.text_adapter import LanguageBundle, TextAdapter
from unirl.models.token_sampling import draw, placed, uniforms
from unirl.types.conditions import Bridge, Condition, Conversation, PromptCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.kept_texts import KeptTexts
from unirl.types.media import Primitive, Texts
from unirl.types.messages import Message
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

logger = logging.getLogger(__name__)


def _never() -> bool:
    return False


class AutoregressivePipeline:
    """A language model that can sample completions and replay them.

    packed: replay without padding. None packs where the model allows it (`CausalLMBundle.is_packable`), and says so in
        the log where it does not; False pads, with the same results and more work.
    """

    def __init__(self, adapter: TextAdapter, *, packed: bool | None = None) -> None:
        bundle = adapter.bundle
        name = type(bundle.model).__name__
        if packed and not bundle.is_packable:
            raise ConfigError(f"{name} cannot be packed: it has other layers than SDPA attention. Set packed: false.")
        if packed is None and not bundle.is_packable:
            logger.warning("%s cannot be packed: replay pads every sample to the longest of its micro-batch", name)
        self.adapter = adapter
        self.is_packed = bundle.is_packable if packed is None else packed

    @property
    def bundle(self) -> LanguageBundle:
        """The model's modules and what training needs to know of them."""
        return self.adapter.bundle

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its completion together."""
        return self.adapter.context_length

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Every token of the model's tokenizer with its id."""
        return self.bundle.tokenizer.get_vocab()

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        """Heights and widths in pixels of the images that texts may ask for; none where they ask for none."""
        return self.adapter.image_sizes

    def chosen_sizes(self, segment: TextSegment) -> list[tuple[int, int] | None]:
        """Height and width of the image that each text asks for; None of one that asks for none."""
        return self.adapter.chosen_sizes(segment)

    def stop_token_ids(self, params: ARSamplingParams) -> tuple[int, ...]:
        """Tokens that end a sample: the model's and those of `params`, sorted."""
        return self.adapter.stop_token_ids(params)

    def encode(self, primitives: Mapping[str, Primitive], params: ARSamplingParams) -> dict[str, Condition]:
        """Conditions of B samples, see `TextAdapter.encode`."""
        return self.adapter.encode(primitives, params)

    def offer_tools(self, schemas: Sequence[Mapping[str, Any]]) -> None:  # Any: JSON
        """From now on prompts name these tools, see `TextAdapter.offer_tools`."""
        self.adapter.offer_tools(schemas)

    def set_system_prompt(self, text: str) -> None:
        """From now on prompts stand under this message of the system, see `TextAdapter.set_system_prompt`."""
        self.adapter.set_system_prompt(text)

    @property
    def reads_images_in_turns(self) -> bool:
        """True if messages between the model's turns may show images."""
        return self.bundle.reads_images_in_turns

    @property
    def media_tokens(self) -> frozenset[int]:
        """Tokens that stand for media, and mean none where the model itself writes them."""
        return self.adapter.media_tokens

    def bridge(self, messages: Sequence[Message]) -> Bridge:
        """What stands between the model's turns, see `TextAdapter.bridge`."""
        return self.adapter.bridge(messages)

    def conversation(self, messages: Sequence[Message]) -> Conversation:
        """Tokens of a whole conversation, see `TextAdapter.conversation`."""
        return self.adapter.conversation(messages)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Their text, without special tokens."""
        return self.adapter.text_of(tokens)

    def decode(self, segment: TextSegment) -> Texts:
        """The text of each sample, without special tokens."""
        return self.adapter.decode(segment)

    @torch.no_grad()
    def generate(
        self,
        conditions: Conditions,
        params: ARSamplingParams,
        *,
        noise_keys: Sequence[str],
        any_rank: Callable[[bool], bool] | None = None,
        num_begun: Sequence[int] | None = None,
        is_ending: Callable[[], bool] = _never,
        kept: KeptTexts | None = None,
    ) -> TextSegment:
        """Completions of B prompts, see the protocol. Call inside `evaluating()`.

        Raises ContractError if sizes disagree, and if the model writes some tokens itself, or images, and something was
        begun.
        """
        if num_begun is not None and self.adapter.sample_length is not None:
            raise ContractError("tokens of images are drawn from the first to the last, so that none can be continued")
        prompts = require_condition(conditions, "prompt", PromptCondition).unpack("tokens")
        begun = [0] * len(prompts) if num_begun is None else list(num_begun)
        if not num_rows(conditions) == len(noise_keys) == len(begun):
            raise ContractError(
                f"{num_rows(conditions)} prompts, {len(noise_keys)} noise keys and {len(begun)} begun completions: one "
                "of each per sample"
            )
        self.adapter.check_context(
            [len(prompt) - num for prompt, num in zip(prompts, begun, strict=True)], params.max_new_tokens
        )
        device = prompts[0].device
        stops = torch.tensor(self.adapter.stop_token_ids(params), dtype=torch.long, device=device)
        draws = placed(uniforms(noise_keys, params.seed, params.max_new_tokens), device)
        begun_B = torch.tensor(begun, dtype=torch.long, device=device)
        resumed = None if kept is None else kept.take(noise_keys, prompts)
        decoder = self.decoder(conditions, prompts, params) if resumed is None else resumed
        rows, chosen = decoder.rows, torch.stack([prompt[-1] for prompt in prompts])

        tokens = torch.zeros(len(prompts), params.max_new_tokens, dtype=torch.long, device=device)
        log_probs = torch.zeros(len(prompts), params.max_new_tokens, device=device)
        is_drawn: Tensor | None = None
        lengths = torch.zeros(len(prompts), dtype=torch.long, device=device)
        is_stopped = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        is_done, is_begun = is_stopped, resumed is not None
        for step in range(params.max_new_tokens):
            if is_ending():
                break
            logits = decoder.step(chosen, ~is_done[rows]) if is_begun else decoder.start()
            is_begun, rows = True, decoder.rows
            places = (begun_B[rows] + step).clamp(max=params.max_new_tokens - 1)  # rows that are done go on for nothing
            chosen, logp = draw(logits, draws[rows, places], params)
            forced = self.adapter.forced(tokens[rows, :step], logits)
            if forced is not None:
                if num_begun is not None:
                    raise ContractError("this model writes some tokens itself, so that no begun text can be continued")
                is_drawn = torch.ones_like(tokens, dtype=torch.bool) if is_drawn is None else is_drawn
                is_drawn[rows, step] = forced < 0
                chosen, logp = torch.where(forced < 0, chosen, forced), logp.where(forced < 0, 0.0)
            is_new = ~is_done[rows]
            tokens[rows, step], log_probs[rows, step] = chosen, logp
            lengths[rows] += is_new
            is_stopped[rows] |= is_new & torch.isin(chosen, stops)
            is_done = is_stopped | (begun_B + lengths == params.max_new_tokens)
            has_work = not bool(is_done.all())
            if step + 1 == params.max_new_tokens or not (any_rank(has_work) if any_rank else has_work):
                break

        if kept is not None and is_begun and not bool(is_done.all()):
            decoder.narrow(~is_done[rows])
            left, counts = (~is_done).nonzero().flatten().tolist(), lengths.tolist()
            written = [torch.cat([prompts[row], tokens[row, : counts[row]]]) for row in left]
            kept.keep(decoder, [noise_keys[row] for row in left], written)
        if self.adapter.sample_length is not None:
            is_stopped = lengths == self.adapter.sample_length
        status = torch.where(is_stopped, int(SegmentStatus.COMPLETED), int(SegmentStatus.TRUNCATED))
        status[~is_done] = int(SegmentStatus.ABORTED)
        counts = lengths.tolist()
        segment = TextSegment.pack(
            tokens=[row[:count] for row, count in zip(tokens, counts, strict=True)],
            log_probs=None if params.is_greedy else [row[:count] for row, count in zip(log_probs, counts, strict=True)],
            loss_mask=None if is_drawn is None else [row[:count] for row, count in zip(is_drawn, counts, strict=True)],
            status=status,
            params=params,
        )
        self.remember(conditions, segment)
        return segment

    def decoder(
        self, conditions: Conditions, prompts: list[Tensor], params: ARSamplingParams
    ) -> Decoder | GuidedDecoder:
        """What computes the logits of a rollout."""
        if not params.uses_guidance:
            return Decoder(self.adapter, conditions, prompts, params.max_new_tokens)
        both = self.adapter.with_empty(conditions)
        read = require_condition(both, "prompt", PromptCondition).unpack("tokens")
        return GuidedDecoder(Decoder(self.adapter, both, read, params.max_new_tokens), params.guidance_scale)

    def remember(self, conditions: Conditions, segment: TextSegment) -> None:
        """Add to `conditions` what replays of the segment need besides it; nothing for most models."""

    def replay(self, conditions: Conditions, segment: TextSegment, params: ARSamplingParams) -> ReplayedTokens:
        """Log-probs of stored tokens under the present weights, see the protocol.

        Raises ConfigError for parameters whose rollout was not drawn from the whole softmax, ContractError if the
        segment was sampled with other parameters.
        """
        check_replayable(segment, params)
        tokens = segment.tokens
        if params.uses_guidance:
            conditions, segment = self.adapter.with_empty(conditions), TextSegment.concat([segment, segment])
        inputs, ordered = self.inputs_of(conditions, segment)
        prompts = require_condition(conditions, "prompt", PromptCondition).lengths.tolist()
        places_N = torch.cat(
            [
                torch.arange(start + prompt - 1, start + prompt - 1 + completion)
                for start, prompt, completion in zip(inputs.starts, prompts, segment.lengths.tolist(), strict=True)
            ]
        )
        if params.uses_guidance:
            places_N = places_N.unflatten(0, (2, -1))
        exchange, of_layers = self.bundle.token_exchange, self.bundle.layer_exchange
        spread = None
        if exchange is not None:
            spread = SpreadScores.of(places_N, inputs.arguments["packing"], exchange)
        elif of_layers is not None:
            spread = SpreadScores.dealt(places_N, of_layers)
        if spread is not None:
            places_N, tokens = spread.places, tokens[spread.own.to(tokens.device)]
        scale = params.guidance_scale
        with self.bundle.head.scoring(
            places_N.to(tokens.device), tokens, params.temperature, of_layers, guidance_scale=scale
        ):
            with self.around(inputs, ordered):
                out = self.bundle.model(**inputs.arguments, **self.adapter.model_inputs(ordered), use_cache=False)
        *scores, hidden = out.logits
        if spread is None:
            return ReplayedTokens(*scores, hidden=lambda: hidden)
        logp_N, entropy_N, collision_N = spread.whole(torch.stack(scores), 1)
        return ReplayedTokens(logp_N, entropy_N, collision_N.detach(), hidden=lambda: spread.whole(hidden, 0))

    def around(self, inputs: Inputs, conditions: Conditions) -> AbstractContextManager[None]:
        """What the forward of a replay is entered with. conditions: in the order of the model's inputs."""
        return nullcontext()

    def inputs_of(self, conditions: Conditions, segment: TextSegment) -> tuple[Inputs, Conditions]:
        """What the model reads of samples, and their conditions in the order of that."""
        prompts = require_condition(conditions, "prompt", PromptCondition).unpack("tokens")
        completions = segment.unpack("tokens")
        if not num_rows(conditions) == len(completions):
            raise ContractError(f"conditions of {num_rows(conditions)} samples for a segment of {len(completions)}")
        # The last token of a completion predicts nothing that is scored.
        read = self.adapter.as_read(conditions, completions)
        written = [completion[: max(0, len(completion) - 1)] for completion in read]
        rows = [torch.cat(pair) for pair in zip(prompts, written, strict=True)]
        positions = self.adapter.positions(conditions, [len(row) for row in rows])
        # Samples of equal length side by side share a call of attention (`Packing.runs`).
        order = sorted(range(len(rows)), key=lambda sample: len(rows[sample])) if self.is_packed else None
        exchange = self.bundle.token_exchange
        if order is None and exchange is not None:
            raise ContractError(f"topology.sp = {exchange.size} spreads packed rows. Set pipeline.packed: null.")
        inputs = (
            padded_inputs(rows, positions)
            if order is None
            else packed_inputs(rows, positions, order, exchange, cuts_inside=self.bundle.cuts_rows_inside)
        )
        ordered = conditions if order is None else {name: each.select(order) for name, each in conditions.items()}
        return inputs, ordered

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients; each submodule gets its own mode back afterwards."""
        return evaluating(self.bundle)
