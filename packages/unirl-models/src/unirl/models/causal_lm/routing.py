"""To which experts the gates of a model of transformers send tokens: noted, measured, and given by others.

Legend: N tokens of a forward, L layers with experts, K experts of a token in a layer, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.types.errors import ContractError
from unirl.types.protocols.models import TokenExchange

Gate = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Hidden states -> logits [N, E], weights [N, K] and experts int64 [N, K]."""


@dataclass
class Routes:
    """What the gates did in a forward, layer by layer."""

    experts: list[Tensor] = field(default_factory=list)
    """int16 [N, K] each, that tokens went to."""
    loads: list[Tensor] = field(default_factory=list)
    """[E] each, how many choices each expert got."""
    probabilities: list[Tensor] = field(default_factory=list)
    """[E] each, float32 sums over tokens of the gate's softmax."""
    changes: list[Tensor] = field(default_factory=list)
    """Scalars, of the given choices those that the gate would not make; empty where none are given."""
    num_tokens: int = 0
    """That count: padding aside."""

    def of_all(self, exchange: TokenExchange) -> Routes:
        """With the tokens of all ranks that share the samples, for `metrics`. A collective."""
        load_LE, probability_LE = torch.stack(self.loads).float(), torch.stack(self.probabilities)
        num_changes = torch.stack(self.changes).float() if self.changes else load_LE.new_zeros(0)
        counts = torch.cat([num_changes, load_LE.new_tensor([self.num_tokens])])
        own = torch.cat([load_LE.flatten(), probability_LE.flatten(), counts])
        total = exchange.gathered(own[None], 0, [1] * exchange.size).sum(0)
        loads, probabilities, changes = total.split([load_LE.numel(), load_LE.numel(), len(counts)])
        return Routes(
            self.experts,
            [*loads.view_as(load_LE)],
            [*probabilities.view_as(load_LE)],
            [*changes[:-1]],
            int(changes[-1]),
        )

    def metrics(self) -> dict[str, tuple[Tensor, int]]:
        """Sum and number of terms of each.

        `routing/busiest_expert`: choices that go to the busiest expert of a layer over its even share, mean of layers.
        `routing/aux_loss`: E sum_e f_e p_e of all layers, mean of tokens. `routing/changed_fraction`: of given choices.
        Source: Switch Transformer (arXiv 2101.03961), equations 4 to 6, as transformers has them.
        """
        load_LE, probability_LE = torch.stack(self.loads).float(), torch.stack(self.probabilities)
        num_layers, num_experts = load_LE.shape
        busiest_L = num_experts * load_LE.amax(1) / load_LE.sum(1)
        rows = num_layers * self.num_tokens
        aux = num_experts * (load_LE.sum(0) / rows * (probability_LE.sum(0) / rows)).sum()
        found = {
            "routing/busiest_expert": (busiest_L.sum(), num_layers),
            "routing/aux_loss": (aux * self.num_tokens, self.num_tokens),
        }
        if self.changes:
            found["routing/changed_fraction"] = (torch.stack(self.changes).sum(), rows * self.experts[0].shape[1])
        return found


class Routing:
    """The gates of a model, in the order of its layers.

    gates: modules of transformers (Any: they share no class), whose forward is replaced.
    """

    def __init__(self, gates: Sequence[Any]) -> None:
        self._given: Tensor | None = None
        self._counts: Tensor | None = None
        self._routes: Routes | None = None
        self._is_measured = True
        for place, gate in enumerate(gates):
            gate.forward = partial(self._route, place, gate, gate.forward)

    @contextmanager
    def noted(
        self, given: Tensor | None = None, counts: Tensor | None = None, *, is_measured: bool = True
    ) -> Generator[Routes]:
        """Within it one forward is noted.

        given: [N, L K] int16, experts that tokens go to, layer by layer; their weights are those of the present gates.
        counts: bool [N], tokens that are no padding; None for all. is_measured: note more than the experts.
        """
        self._given, self._counts, self._routes = given, counts, Routes()
        self._is_measured = is_measured
        try:
            yield self._routes
        finally:
            self._given = self._counts = self._routes = None

    def recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What a block that is recomputed is entered with: its tokens go where they went."""
        return nullcontext(), self._again(self._given)

    @contextmanager
    def _again(self, given: Tensor | None) -> Generator[None]:
        before = self._given, self._counts, self._routes
        self._given, self._counts, self._routes = given, None, None
        try:
            yield
        finally:
            self._given, self._counts, self._routes = before

    @torch.compiler.disable
    def _route(self, place: int, gate: Any, own: Gate, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = own(hidden)
        free = experts
        if self._given is not None:
            width = experts.shape[1]
            if len(self._given) != len(experts) or self._given.shape[1] < (place + 1) * width:
                raise ContractError(
                    f"kept experts are {list(self._given.shape)}, and gate {place} sends {len(experts)} tokens to "
                    f"{width} experts each"
                )
            experts = self._given[:, place * width : (place + 1) * width].long()
            weights = logits.softmax(-1, dtype=torch.float).gather(-1, experts)
            if vars(gate).get("norm_topk_prob", True):  # gates without the choice make weights that sum to 1
                weights = weights / weights.sum(-1, keepdim=True)
            weights = weights.to(logits.dtype)
        if self._routes is not None:
            self._note(self._routes, logits.detach(), experts, free)
        return logits, weights, experts

    def _note(self, routes: Routes, logits: Tensor, experts: Tensor, free: Tensor) -> None:
        routes.experts.append(experts.to(torch.int16))
        if not self._is_measured:
            return
        counts = self._counts
        chosen = experts if counts is None else experts[counts]
        logits = logits if counts is None else logits[counts]
        routes.num_tokens = len(chosen)
        routes.loads.append(chosen.flatten().bincount(minlength=logits.shape[1]))
        routes.probabilities.append(logits.softmax(-1, dtype=torch.float).sum(0))
        if self._given is not None:
            free = free if counts is None else free[counts]
            routes.changes.append((chosen[:, :, None] != free[:, None]).all(-1).sum())


class RoutedTokens:
    """What the bundle of a model of transformers with experts adds to its base."""

    gate_class_names: ClassVar[tuple[str, ...]] = ()
    """Classes of the modules that choose experts."""
    model: Any  # Any: as the base has it

    @cached_property
    def routing(self) -> Routing:
        """Its gates."""
        return Routing([each for each in self.model.modules() if type(each).__name__ in self.gate_class_names])

    def recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What a block that is recomputed is entered with (unirl.types.protocols.models.RecomputesBlocks)."""
        return self.routing.recompute_contexts()
