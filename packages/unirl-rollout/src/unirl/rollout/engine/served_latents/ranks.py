"""Facts of all processes that an engine's model is split over, where the engine itself gives those of its first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def of_all_ranks(own: Any, group: Any) -> list[Any]:  # Any: JSON; an engine's group of all its ranks
    """What each rank has, in their order; called by all of them.

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
    """What went wrong on which ranks, given what did on each; None where nothing did."""
    said = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if not said or len(errors) == 1:
        return said[0][1] if said else None
    return "; ".join(f"rank {rank} of {len(errors)}: {error}" for rank, error in said)
