"""The velocity of rows with their contexts: what was said and shown before the image that is made.

Contexts do not see the image after them, so their keys and values serve every noise level: they are computed once, and
each call runs the image after them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.guidance import Guidance, extrapolate
from unirl.models.packed.rows import KeyValues, PackedRows, Prefix, RowSegment
from unirl.types.conditions import TextTokenCondition
from unirl.types.protocols.models import Conditions

LayoutT = TypeVar("LayoutT", bound=PackedRows)
GuidanceT = TypeVar("GuidanceT", bound=Guidance)


@dataclass(frozen=True)
class Contexts:
    """Where the contexts of R rows are."""

    known: KeyValues
    full: list[Prefix]
    """With everything."""
    free: list[list[Prefix]]
    """Each kind without a part of it, which guidance leads away from."""


class ContextVelocity(ABC, Generic[LayoutT, GuidanceT]):
    """velocity(x_R, sigma_R, step_R) -> float32 of the shape of x, see `DiffusionAdapter.bind`.

    image: the segments of an image that is made.
    """

    def __init__(
        self, conditions: Conditions, guidance: GuidanceT, layout_class: type[LayoutT], image: Sequence[RowSegment]
    ) -> None:
        self.conditions = conditions
        self.guidance = guidance
        self._layout_class = layout_class
        self._image = image
        self._layouts: dict[tuple[int, ...], LayoutT] = {}

    def __call__(self, x_R: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
        chosen = self.guidance.guided_rows(sigma_R)
        guided = list(range(len(x_R))) if chosen is None else chosen
        if not guided:
            return self.forward(x_R, sigma_R, step_R, ())
        # In one forward: guided rows without a part of their contexts, for each kind of these, then all rows.
        num_kinds = len(self.contexts.free)
        rows = guided * num_kinds + list(range(len(x_R)))
        out = self.forward(x_R[rows], sigma_R[rows], step_R, tuple(guided))
        *free, full = out.split([*[len(guided)] * num_kinds, len(x_R)])
        index = torch.tensor(guided, device=x_R.device)
        return full.index_copy(0, index, self.combined(full[index], *free))

    @cached_property
    @abstractmethod
    def contexts(self) -> Contexts:
        """Keys and values of all contexts, with gradients where the weights that read them train."""

    def combined(self, full: Tensor, *free: Tensor) -> Tensor:
        """The guided velocity of rows with everything, and without a part of their contexts."""
        return extrapolate(full, free[0], self.guidance.scale)

    @abstractmethod
    def forward(self, x: Tensor, sigma: Tensor, step_R: Tensor, guided: tuple[int, ...]) -> Tensor:
        """The velocity of guided rows without a part of their contexts, then of all rows. step_R: of all rows."""

    def layout(self, guided: tuple[int, ...], device: torch.device) -> LayoutT:
        """Layout of one forward, cached. Steps guide the same rows, or none, so there are few."""
        if guided not in self._layouts:
            free = self.contexts.free if guided else []
            chosen = [kind[row] for kind in free for row in guided] + self.contexts.full
            self._layouts[guided] = self._layout_class.of(
                [self._image] * len(chosen), device, contexts=chosen, known=self.contexts.known
            )
        return self._layouts[guided]


def rows_of_ids(conditions: Conditions, slot: str) -> list[list[int]]:
    """The words of each row, without padding."""
    tokens = require_condition(conditions, slot, TextTokenCondition)
    lengths = tokens.attention_mask.sum(1).tolist()
    return [ids[:length] for ids, length in zip(tokens.input_ids.tolist(), lengths, strict=True)]
