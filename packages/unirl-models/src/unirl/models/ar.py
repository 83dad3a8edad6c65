"""Sampling and replay of any autoregressive model: the one place where tokens are drawn and scored.

Rollout decodes with a KV cache, replay runs all tokens at once, packed without padding. In float32 on a CPU their
log-probs agree to 1e-6 nats or so (other matrix shapes round otherwise); a replay of the same samples in the same order
gives the same bits.
Legend: B samples, P positions of all samples (prompts and completions), N tokens of all completions, D width of the
hidden states, V words of the vocabulary.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unirl.models.adapter import num_rows, require_condition
from unirl.models.packing import Packing
from unirl.models.text_adapter import TextAdapter
from unirl.models.token_sampling import draw, uniforms
from unirl.types.conditions import PromptCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplayedTokens:
    """Every token of a segment under the present weights, in its order (`unirl.types.protocols.models.TokenStats`)."""

    logp_N: Tensor
    """[N] float32, nats."""
    entropy_N: Tensor
    """[N] float32, nats."""
    hidden_N: Tensor
    """[N, D], of the position before each token."""


class ARStage:
    """Samples completions of an adapter and replays them.

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

    # Sampling ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(
        self,
        conditions: Conditions,
        params: ARSamplingParams,
        *,
        noise_keys: Sequence[str],
        any_rank: Callable[[bool], bool] | None = None,
    ) -> TextSegment:
        """Completions of B prompts, see `unirl.types.protocols.models.AutoregressivePipeline.generate`.

        Raises ContractError if sizes disagree.
        """
        prompts = require_condition(conditions, "prompt", PromptCondition).unpack("tokens")
        if not num_rows(conditions) == len(noise_keys):
            raise ContractError(
                f"{num_rows(conditions)} prompts and {len(noise_keys)} noise keys: one of each a sample"
            )
        self.adapter.check_context([len(prompt) for prompt in prompts], params.max_new_tokens)
        device = prompts[0].device
        stops = torch.tensor(self.adapter.stop_token_ids(params), dtype=torch.long, device=device)
        draws = uniforms(noise_keys, params.seed, params.max_new_tokens).to(device)
        decoder = _Decoder(self.adapter, conditions, prompts, params.max_new_tokens)

        tokens = torch.zeros(len(prompts), params.max_new_tokens, dtype=torch.long, device=device)
        log_probs = torch.zeros(len(prompts), params.max_new_tokens, device=device)
        is_drawn: Tensor | None = None
        lengths = torch.zeros(len(prompts), dtype=torch.long, device=device)
        is_stopped = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        logits = decoder.start()
        for step in range(params.max_new_tokens):
            rows = decoder.rows
            chosen, logp = draw(logits, draws[rows, step], params)
            forced = self.adapter.forced(tokens[rows, :step], logits)
            if forced is not None:
                is_drawn = torch.ones_like(tokens, dtype=torch.bool) if is_drawn is None else is_drawn
                is_drawn[rows, step] = forced < 0
                chosen, logp = torch.where(forced < 0, chosen, forced), logp.where(forced < 0, 0.0)
            is_new = ~is_stopped[rows]
            tokens[rows, step], log_probs[rows, step] = chosen, logp
            lengths[rows] += is_new
            is_stopped[rows] |= torch.isin(chosen, stops)
            has_work = not bool(is_stopped.all())
            if step + 1 == params.max_new_tokens or not (any_rank(has_work) if any_rank else has_work):
                break
            logits = decoder.step(chosen, ~is_stopped[rows])

        status = torch.where(is_stopped, int(SegmentStatus.COMPLETED), int(SegmentStatus.TRUNCATED))
        counts = lengths.tolist()
        return TextSegment.pack(
            tokens=[row[:count] for row, count in zip(tokens, counts, strict=True)],
            log_probs=None if params.is_greedy else [row[:count] for row, count in zip(log_probs, counts, strict=True)],
            loss_mask=None if is_drawn is None else [row[:count] for row, count in zip(is_drawn, counts, strict=True)],
            status=status,
            params=params,
        )

    # Replay --------------------------------------------------------------------------------------------------------

    def replay(self, conditions: Conditions, segment: TextSegment, params: ARSamplingParams) -> ReplayedTokens:
        """Log-probs of stored tokens under the present weights, see `AutoregressivePipeline.replay`.

        Raises ConfigError for parameters whose rollout was not drawn from the whole softmax, ContractError if the
        segment was sampled with other parameters.
        """
        _check_replayable(segment, params)
        prompts = require_condition(conditions, "prompt", PromptCondition).unpack("tokens")
        completions = segment.unpack("tokens")
        if not num_rows(conditions) == len(completions):
            raise ContractError(f"conditions of {num_rows(conditions)} samples for a segment of {len(completions)}")
        # The last token of a completion predicts nothing that is scored.
        written = [self.adapter.as_written(completion)[: max(0, len(completion) - 1)] for completion in completions]
        rows = [torch.cat(pair) for pair in zip(prompts, written, strict=True)]
        positions = self.adapter.positions(conditions, [len(row) for row in rows])
        # Samples of equal length side by side share a call of attention (`Packing.runs`).
        order = sorted(range(len(rows)), key=lambda sample: len(rows[sample])) if self.is_packed else None
        inputs = _padded(rows, positions) if order is None else _packed(rows, positions, order)
        ordered = conditions if order is None else {name: each.select(order) for name, each in conditions.items()}
        places_N = torch.cat(
            [
                torch.arange(start + len(prompt) - 1, start + len(prompt) - 1 + len(completion))
                for start, prompt, completion in zip(inputs.starts, prompts, completions, strict=True)
            ]
        ).to(segment.tokens.device)
        model = self.adapter.bundle.model
        with self.adapter.bundle.head.scoring(places_N, segment.tokens, params.temperature):
            out = model(**inputs.arguments, **self.adapter.model_inputs(ordered), use_cache=False)
        logp_N, entropy_N, hidden_N = out.logits
        return ReplayedTokens(logp_N=logp_N, entropy_N=entropy_N, hidden_N=hidden_N)


class _Decoder:
    """Prompts padded on the left and their KV cache: one step for all samples that are still going on."""

    def __init__(
        self, adapter: TextAdapter, conditions: Conditions, prompts: list[Tensor], max_new_tokens: int
    ) -> None:
        self._adapter = adapter
        self._conditions = conditions
        self._prompts = prompts
        self._cache = adapter.bundle.new_cache()
        positions = adapter.positions(conditions, [len(prompt) + max_new_tokens for prompt in prompts])
        ends = [len(prompt) for prompt in prompts]
        self._prompt_positions = [place[..., :end] for place, end in zip(positions, ends, strict=True)]
        self._new_positions = torch.stack(
            [place[..., end:] for place, end in zip(positions, ends, strict=True)], dim=-2
        )
        self._mask = torch.empty(0)
        self._step = 0
        self.rows = torch.arange(len(prompts), device=prompts[0].device)
        """Samples that the cache holds, in its order."""

    def start(self) -> Tensor:
        """Logits [B, V] after each prompt. Equal prompts are computed once."""
        keys = self._adapter.prompt_keys(self._conditions)
        rows_of: dict[Hashable, int] = {}
        for row, key in enumerate(keys):
            rows_of.setdefault(key, row)
        first = list(rows_of.values())
        width = max(len(prompt) for prompt in self._prompts)
        self._mask = torch.stack([_left(torch.ones_like(self._prompts[row]), width) for row in first])
        logits = self._forward(
            torch.stack([_left(self._prompts[row], width) for row in first]),
            torch.stack([_left(self._prompt_positions[row], width) for row in first], dim=-2),
            **self._adapter.model_inputs({name: each.select(first) for name, each in self._conditions.items()}),
        )
        if len(first) == len(keys):
            return logits
        place = {key: i for i, key in enumerate(rows_of)}
        copies = torch.tensor([place[key] for key in keys], device=logits.device)
        self._cache.batch_select_indices(copies)
        self._mask = self._mask[copies]
        return logits[copies]

    def step(self, tokens: Tensor, is_alive: Tensor) -> Tensor:
        """Logits of the samples in `rows` after the tokens just drawn, one per row before this call.

        Rows that are done leave the cache once they are half of it, so that long completions do not carry them along.
        One row always stays: every rank must run a sharded model.
        """
        if 2 * int(is_alive.sum()) <= len(self.rows) and len(self.rows) > 1:
            kept = is_alive.nonzero().flatten() if bool(is_alive.any()) else torch.zeros_like(self.rows[:1])
            self._cache.batch_select_indices(kept)
            self.rows, tokens, self._mask = self.rows[kept], tokens[kept], self._mask[kept]
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        positions = self._new_positions[..., self.rows, self._step : self._step + 1]
        self._step += 1
        return self._forward(tokens[:, None], positions)

    def _forward(self, ids: Tensor, positions: Tensor, **inputs: Tensor) -> Tensor:
        out = self._adapter.bundle.model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **inputs,
        )
        return out.logits[:, -1]


@dataclass(frozen=True)
class _Inputs:
    """A batch as the model takes it."""

    arguments: dict[str, Any]  # Any: keywords of the model's forward
    starts: list[int]
    """Where each sample begins, in the order of the segment, counted row by row."""


def _packed(rows: list[Tensor], positions: list[Tensor], order: list[int]) -> _Inputs:
    """Samples end to end in one row, in this order."""
    lengths = [len(rows[sample]) for sample in order]
    ids = torch.cat([rows[sample] for sample in order])[None]
    arguments = {
        "input_ids": ids,
        "position_ids": torch.cat([positions[sample] for sample in order], dim=-1).unsqueeze(-2),
        "packing": Packing.of(lengths, ids.device),
    }
    start_of = dict(zip(order, [0, *itertools.accumulate(lengths[:-1])], strict=True))
    return _Inputs(arguments, [start_of[sample] for sample in range(len(rows))])


def _padded(rows: list[Tensor], positions: list[Tensor]) -> _Inputs:
    """One sample per row, zeros on the right."""
    width = max(len(row) for row in rows)
    arguments = {
        "input_ids": torch.stack([_right(row, width) for row in rows]),
        "attention_mask": torch.stack([_right(torch.ones_like(row), width) for row in rows]),
        "position_ids": torch.stack([_right(place, width) for place in positions], dim=-2),
    }
    return _Inputs(arguments, [row * width for row in range(len(rows))])


def _left(row: Tensor, width: int) -> Tensor:
    return functional.pad(row, (width - row.shape[-1], 0))


def _right(row: Tensor, width: int) -> Tensor:
    return functional.pad(row, (0, width - row.shape[-1]))


def _check_replayable(segment: TextSegment, params: ARSamplingParams) -> None:
    if params.is_greedy or params.is_truncated:
        raise ConfigError(
            f"temperature = {params.temperature}, top_p = {params.top_p}, top_k = {params.top_k}: replay scores under "
            "the whole softmax, so tokens must be drawn from it. Set a temperature above 0, top_p: 1 and top_k: 0 for "
            "training; evaluation may use others."
        )
    sampled = segment.params
    if sampled is not None and sampled.temperature != params.temperature:
        raise ContractError(
            f"the tokens were sampled at temperature {sampled.temperature} and are to be replayed at "
            f"{params.temperature}. Use the rollout's in both."
        )
