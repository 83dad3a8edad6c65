"""What sampling and replay of any autoregressive model are made of, see `unirl.models.text_pipeline`.

Legend: B samples, P positions of all samples (prompts and completions), N tokens of all completions, D width of the
hidden states, V words of the vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unirl.models.packing import Packing
from unirl.models.text_adapter import TextAdapter
from unirl.models.token_scores import guided_logits
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import Conditions, TokenExchange
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment


@dataclass(frozen=True)
class ReplayedTokens:
    """Every token of a segment under the present weights, in its order (`unirl.types.protocols.models.TokenStats`)."""

    logp_N: Tensor
    """[N] float32, nats."""
    entropy_N: Tensor
    """[N] float32, nats."""
    collision_N: Tensor
    """[N] float32, without gradients: the chance that two draws of the token agree."""
    hidden: Callable[[], Tensor]
    """Gives `hidden_N`; a collective where ranks share samples, so that states which nothing reads are not gathered."""

    @property
    def hidden_N(self) -> Tensor:
        """[N, D], of the position before each token. Every rank that shares the samples asks."""
        return self.hidden()


class Decoder:
    """Prompts padded on the left and their KV cache: one step for all samples that are still going on."""

    def __init__(
        self, adapter: TextAdapter, conditions: Conditions, prompts: list[Tensor], max_new_tokens: int
    ) -> None:
        self._adapter = adapter
        self._conditions = conditions
        self._prompts = prompts
        self.cache = adapter.bundle.new_cache()
        """What the model keeps of tokens before."""
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
        self.cache.reorder_cache(copies)
        self._mask = self._mask[copies]
        return logits[copies]

    def step(self, tokens: Tensor, is_alive: Tensor) -> Tensor:
        """Logits of the samples in `rows` after the tokens just drawn, one per row before this call.

        Rows that are done leave the cache once they are half of it, so that long completions do not carry them along.
        One row always stays: every rank must run a sharded model.
        """
        if 2 * int(is_alive.sum()) <= len(self.rows) and len(self.rows) > 1:
            kept = is_alive.nonzero().flatten() if bool(is_alive.any()) else torch.zeros_like(self.rows[:1])
            self._leave(kept)
            tokens = tokens[kept]
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        positions = self._new_positions[..., self.rows, self._step : self._step + 1]
        self._step += 1
        return self._forward(self._adapter.as_written(tokens)[:, None], positions)

    def narrow(self, is_alive: Tensor) -> None:
        """Keep only these of `rows`, at least one, which are then the samples of the decoder, numbered anew."""
        self._leave(is_alive.nonzero().flatten())
        self._new_positions = self._new_positions[..., self.rows, :]
        self.rows = torch.arange(len(self.rows), device=self.rows.device)

    def _leave(self, kept: Tensor) -> None:
        """Take all but these places of `rows` out of the cache."""
        self.cache.reorder_cache(kept)
        self.rows, self._mask = self.rows[kept], self._mask[kept]

    def _forward(self, ids: Tensor, positions: Tensor, **inputs: Tensor) -> Tensor:
        out = self._adapter.bundle.model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **inputs,
        )
        return out.logits[:, -1]


class GuidedDecoder:
    """A decoder of prompts and, after them, of as many empty ones, which are guided away from. The samples of a guided
    rollout have equally many tokens, so that all end together."""

    def __init__(self, decoder: Decoder, scale: float) -> None:
        self._decoder = decoder
        self._scale = scale

    @property
    def cache(self) -> Any:  # Any: as `Decoder.cache`
        """What the model keeps of tokens before, of both."""
        return self._decoder.cache

    @property
    def rows(self) -> Tensor:
        """See `Decoder.rows`; of the prompts."""
        rows = self._decoder.rows
        return rows[: len(rows) // 2]

    def start(self) -> Tensor:
        """Guided logits [B, V] after each prompt."""
        return guided_logits(*self._decoder.start().chunk(2), self._scale)

    def step(self, tokens: Tensor, is_alive: Tensor) -> Tensor:
        """Guided logits after the tokens just drawn, see `Decoder.step`."""
        return guided_logits(*self._decoder.step(tokens.repeat(2), is_alive.repeat(2)).chunk(2), self._scale)

    def narrow(self, is_alive: Tensor) -> None:
        """Keep only these samples, with their empty prompts."""
        self._decoder.narrow(is_alive.repeat(2))


@dataclass(frozen=True)
class Inputs:
    """A batch as the model takes it."""

    arguments: dict[str, Any]  # Any: keywords of the model's forward
    starts: list[int]
    """Where each sample begins, in the order of the segment, counted row by row."""
    lengths: list[int]
    """Tokens of each sample, in the same order."""


def packed_inputs(
    rows: list[Tensor],
    positions: list[Tensor],
    order: list[int],
    exchange: TokenExchange | None = None,
    *,
    cuts_inside: bool = False,
) -> Inputs:
    """Samples end to end in one row, in this order. With an exchange, the model takes this rank's part of the row.

    cuts_inside: the model takes the whole row and cuts it itself.
    """
    lengths = [len(rows[sample]) for sample in order]
    start_of = dict(zip(order, [0, *itertools.accumulate(lengths[:-1])], strict=True))
    ids, place_ids = [rows[sample] for sample in order], [positions[sample] for sample in order]
    if exchange is not None and (missing := exchange.size - sum(lengths)) > 0:
        # Models of transformers take no empty rows: a sample that nothing reads gives every rank a position.
        lengths.append(missing)
        ids.append(ids[0].new_zeros(missing))
        place_ids.append(place_ids[0].new_zeros((*place_ids[0].shape[:-1], missing)))
    whole_ids, whole_places = torch.cat(ids)[None], torch.cat(place_ids, dim=-1).unsqueeze(-2)
    arguments = {
        "input_ids": whole_ids if exchange is None or cuts_inside else exchange.own(whole_ids, -1),
        "position_ids": whole_places if exchange is None or cuts_inside else exchange.own(whole_places, -1),
        "packing": Packing.of(lengths, whole_ids.device, exchange),
    }
    return Inputs(arguments, [start_of[sample] for sample in range(len(rows))], [len(row) for row in rows])


def padded_inputs(rows: list[Tensor], positions: list[Tensor]) -> Inputs:
    """One sample per row, zeros on the right."""
    width = max(len(row) for row in rows)
    arguments = {
        "input_ids": torch.stack([_right(row, width) for row in rows]),
        "attention_mask": torch.stack([_right(torch.ones_like(row), width) for row in rows]),
        "position_ids": torch.stack([_right(place, width) for place in positions], dim=-2),
    }
    return Inputs(arguments, [row * width for row in range(len(rows))], [len(row) for row in rows])


def _left(row: Tensor, width: int) -> Tensor:
    return functional.pad(row, (width - row.shape[-1], 0))


def _right(row: Tensor, width: int) -> Tensor:
    return functional.pad(row, (0, width - row.shape[-1]))


def check_replayable(segment: TextSegment, params: ARSamplingParams) -> None:
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
    if sampled is not None and sampled.guidance_scale != params.guidance_scale:
        raise ContractError(
            f"the tokens were sampled with guidance_scale = {sampled.guidance_scale} and are to be replayed with "
            f"{params.guidance_scale}. Use the rollout's in both."
        )
