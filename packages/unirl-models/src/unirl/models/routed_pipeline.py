"""Texts of a model with experts, whose replays may send tokens to the experts of the rollout."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.ar import Decoder, GuidedDecoder, Inputs, ReplayedTokens
from unirl.models.causal_lm.routing import Routes, Routing
from unirl.models.kept_experts import EXPERTS, check_experts, require_dict
from unirl.models.text_adapter import LanguageBundle, TextAdapter
from unirl.models.text_pipeline import AutoregressivePipeline
from unirl.types.conditions import ExpertCondition
from unirl.types.errors import ContractError
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment


class RoutedBundle(Protocol):
    """A bundle whose model has gates."""

    @property
    def routing(self) -> Routing: ...


class RoutedLanguageBundle(RoutedBundle, LanguageBundle, Protocol):
    """A language model with gates."""


class NotingDecoder(Decoder):
    """A decoder that knows the experts of every token that it has read."""

    def __init__(
        self,
        adapter: TextAdapter,
        conditions: Conditions,
        prompts: list[Tensor],
        max_new_tokens: int,
        routing: Routing,
    ) -> None:
        super().__init__(adapter, conditions, prompts, max_new_tokens)
        self._routing = routing
        self._read: Tensor = torch.empty(0)
        self._of_prompts: list[Tensor] = []
        self._of_steps: list[tuple[Tensor, Tensor]] = []
        """Samples, and the experts of the token that each has read."""

    def start(self) -> Tensor:
        """See the base."""
        logits = super().start()
        place = {key: row for row, key in enumerate(dict.fromkeys(self._adapter.prompt_keys(self._conditions)))}
        keys = self._adapter.prompt_keys(self._conditions)
        self._of_prompts = [
            self._read[place[key]][-len(prompt) :] for key, prompt in zip(keys, self._prompts, strict=True)
        ]
        return logits

    def step(self, tokens: Tensor, is_alive: Tensor) -> Tensor:
        """See the base."""
        logits = super().step(tokens, is_alive)
        self._of_steps.append((self.rows, self._read[:, 0]))
        return logits

    def experts(self, segment: TextSegment) -> list[Tensor]:
        """int16 [n, L K] of each sample: of its prompt, and of all its tokens but the last, which was not read."""
        num_samples, width = len(self._prompts), self._of_prompts[0].shape[1]
        written = self._of_prompts[0].new_zeros(num_samples, len(self._of_steps), width)
        for step, (rows, read) in enumerate(self._of_steps):
            written[rows, step] = read
        lengths = segment.lengths.tolist()
        return [
            torch.cat([prompt, written[row, : max(0, length - 1)]])
            for row, (prompt, length) in enumerate(zip(self._of_prompts, lengths, strict=True))
        ]

    def _forward(self, ids: Tensor, positions: Tensor, **inputs: Tensor) -> Tensor:
        with self._routing.noted(is_measured=False) as routes:
            logits = super()._forward(ids, positions, **inputs)
        self._read = torch.cat(routes.experts, dim=-1).unflatten(0, ids.shape)
        return logits


class RoutedPipeline(AutoregressivePipeline):
    """A language model with experts. Conditions may hold those that the tokens of a rollout went to (`ExpertCondition`
    in the slot "experts"), from the pipeline or an engine: a replay sends them there again, with weights of the present
    gates.

    Implements unirl.types.protocols.models.MeasuresReplays.
    """

    _routing: Routing
    _replays_experts = False
    _routes: Routes | None = None
    _decoder: NotingDecoder | None = None
    """What the rollout that is being made is decoded with."""

    def route(self, bundle: RoutedBundle, *, replays_experts: bool) -> None:
        """Called once.

        replays_experts: keep with each rollout to which experts its tokens go, so that a ratio does not jump where an
        update moves a token from one expert to another. A token has 2 bytes of each layer and expert.
        """
        self._routing, self._replays_experts = bundle.routing, replays_experts

    def remember(self, conditions: Conditions, segment: TextSegment) -> None:
        """Where experts are replayed, adds their slot to `conditions`, which must then be a dict."""
        if self._replays_experts and self._decoder is not None:
            require_dict(conditions)[EXPERTS] = ExpertCondition.pack(experts=self._decoder.experts(segment))
            self._decoder = None

    def decoder(
        self, conditions: Conditions, prompts: list[Tensor], params: ARSamplingParams
    ) -> Decoder | GuidedDecoder:
        """See the base. Where experts are replayed, it notes them."""
        if not self._replays_experts:
            return super().decoder(conditions, prompts, params)
        self._decoder = NotingDecoder(self.adapter, conditions, prompts, params.max_new_tokens, self._routing)
        return self._decoder

    @torch.no_grad()
    def experts(self, conditions: Conditions, segment: TextSegment) -> ExpertCondition:
        """The experts of every token that a replay reads, under the present weights, in one forward."""
        inputs, ordered = self.inputs_of(conditions, segment)
        with self._routing.noted(is_measured=False) as routes:
            self.adapter.bundle.model(
                **inputs.arguments, **self.adapter.model_inputs(ordered), use_cache=False, logits_to_keep=1
            )
        whole = torch.cat(routes.experts, dim=-1)
        if (exchange := self.bundle.token_exchange) is not None:  # in numbers that every collective takes
            lengths = exchange.lengths(sum(inputs.arguments["packing"].lengths))
            whole = exchange.gathered(whole.int(), 0, lengths).to(whole.dtype)
        return ExpertCondition.pack(
            experts=[whole[start : start + length] for start, length in zip(inputs.starts, inputs.lengths, strict=True)]
        )

    def replay(self, conditions: Conditions, segment: TextSegment, params: ARSamplingParams) -> ReplayedTokens:
        """See `AutoregressivePipeline.replay`. Raises ContractError for experts of another batch."""
        check_experts(conditions, segment)
        return super().replay(conditions, segment, params)

    def replay_metrics(self) -> Mapping[str, tuple[Tensor, int]]:
        """What was measured in the last replay, see `Routes.metrics`. A collective of ranks that share samples."""
        if self._routes is None:
            raise ContractError("replay_metrics before a replay")
        exchange = self.bundle.token_exchange
        return (self._routes if exchange is None else self._routes.of_all(exchange)).metrics()

    @contextmanager
    def around(self, inputs: Inputs, conditions: Conditions) -> Generator[None]:
        """See the base: tokens go to the experts of the conditions, if these have any."""
        counts, given, exchange = inputs.arguments.get("attention_mask"), None, self.bundle.token_exchange
        counts = None if counts is None else counts.flatten().bool()
        if exchange is not None:  # a short row is filled up by tokens that count no more than padding
            packing, num_tokens = inputs.arguments["packing"], sum(inputs.lengths)
            counts = torch.arange(sum(packing.lengths), device=packing.boundaries.device) < num_tokens
        if EXPERTS in conditions:
            given = require_condition(conditions, EXPERTS, ExpertCondition).experts
            if counts is not None:  # padding goes to the first experts
                width = given.shape[1]
                whole = torch.arange(width, device=given.device, dtype=given.dtype).repeat(len(counts), 1)
                whole[counts] = given
                given = whole
        if exchange is not None and counts is not None:
            counts, given = exchange.own(counts, 0), None if given is None else exchange.own(given, 0)
        with self._routing.noted(given, counts) as routes:
            yield
        self._routes = routes
