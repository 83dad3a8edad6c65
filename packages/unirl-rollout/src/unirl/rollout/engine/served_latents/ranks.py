"""Gathers facts from all processes that an engine's model is split over, for engines that report only the first
one's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def of_all_ranks(own: Any, group: Any) -> list[Any]:  # Any: JSON; an engine's group of all its ranks
    """The value of each rank, in order; all ranks must call it.

    group: has `world_size` and `cpu_group`, a process group of torch.distributed over gloo.
    """
    if group.world_size == 1:
        return [own]
    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    lengths = [int(length) for length in _gathered(torch.tensor([len(text)]), group)]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = text
    texts = _gathered(padded, group)
    return [json.loads(bytes(each[:length].numpy())) for each, length in zip(texts, lengths, strict=True)]


def _gathered(own: Tensor, group: Any) -> list[Tensor]:
    found = [torch.empty_like(own) for _ in range(group.world_size)]
    torch.distributed.all_gather(found, own, group=group.cpu_group)
    return found


def failures(errors: Sequence[str | None]) -> str | None:
    """A message that names errors and their ranks; None if there are none. errors: of each rank."""
    said = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if not said or len(errors) == 1:
        return said[0][1] if said else None
    return "; ".join(f"rank {rank} of {len(errors)}: {error}" for rank, error in said)
