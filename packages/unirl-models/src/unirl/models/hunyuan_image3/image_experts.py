"""The experts of an image's tokens, kept of a rollout and given to its replays.

Of a sample [words, words without the prompt, then of each kept step the time step and the image, with the prompt and
without], the parts without where guidance is on.
Legend: B samples, P words, L tokens of an image, K experts of a token in all blocks together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.kept_experts import EXPERTS
from unirl.types.conditions import ExpertCondition
from unirl.types.errors import ContractError
from unirl.types.protocols.models import Conditions


@dataclass(frozen=True, eq=False)
class RowExperts:
    """Experts of one row. Pairs are with the prompt and without; one part alone where nothing is guided."""

    words: tuple[Tensor, ...]
    """[P, K] each."""
    steps: dict[int, tuple[Tensor, ...]]
    """Per kept step, tensors [1 + L, K]."""


def digests(contexts: Sequence[Hashable]) -> Tensor:
    """int64 [B], of what each sample reads."""
    found = [hashlib.blake2b(repr(context).encode(), digest_size=8).digest() for context in contexts]
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in found])


def packed_experts(rows: Sequence[RowExperts], contexts: Sequence[Hashable]) -> ExpertCondition:
    """The condition of rows that kept the same steps. contexts: see `digests`."""
    return ExpertCondition.pack(
        experts=[torch.cat([*row.words, *(part for pair in row.steps.values() for part in pair)]) for row in rows],
        of=digests(contexts),
        steps=list(rows[0].steps),
    )


def row_experts(
    conditions: Conditions, contexts: Sequence[Hashable], lengths: Sequence[Sequence[int]], num_tokens: int
) -> list[RowExperts] | None:
    """The kept experts of each row; None where none are kept.

    lengths: of each row's words, with the prompt and, where guidance is on, without. num_tokens: 1 + L. Raises
    ContractError for experts of other samples or of another size.
    """
    if EXPERTS not in conditions:
        return None
    kept = require_condition(conditions, EXPERTS, ExpertCondition)
    steps = kept.steps or []
    sizes = [[*own, *[num_tokens] * (len(own) * len(steps))] for own in lengths]
    others = [row for row, own in enumerate(sizes) if sum(own) != int(kept.lengths[row])]
    if not others and kept.of is not None:
        others = (kept.of.cpu() != digests(contexts)).nonzero().flatten().tolist()
    if others or kept.of is None:
        raise ContractError(
            f"expert indices of another batch: rows {others[:8]} of {len(sizes)} are not of the samples that kept "
            f"them. There are experts of {kept.lengths.tolist()[:8]} tokens at the steps {steps}, the samples read "
            f"{[sum(own) for own in sizes][:8]}. Keep the conditions and the segment of a rollout together."
        )
    rows = []
    for experts, own, pair in zip(kept.unpack("experts"), sizes, lengths, strict=True):
        parts, width = experts.split(own), len(pair)
        following = [parts[start : start + width] for start in range(width, len(parts), width)]
        rows.append(RowExperts(parts[:width], dict(zip(steps, following, strict=True))))
    return rows
