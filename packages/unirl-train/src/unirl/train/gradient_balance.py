"""How the gradients of several tracks compare that add up in the same parameters.

Legend: K tracks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unirl.train.optim import summed_over_shards
from unirl.train.shards import local_part
from unirl.types.devices import widened
from unirl.types.protocols.training import TrainBackend


class GradientBalance:
    """Norms and cosines of the tracks' gradients in one update, weights of their losses included.

    A copy of the gradients is held per track.
    """

    def __init__(self, backend: TrainBackend) -> None:
        self._parameters = list(backend.parameters.values())
        self._sums: dict[str, list[Tensor]] = {}
        """Gradients after each track, which hold those of the tracks before it."""

    @torch.no_grad()
    def note(self, track: str) -> None:
        """Call after the backward of each track, gradients summed over devices."""
        self._sums[track] = [
            torch.zeros_like(local_part(parameter)) if parameter.grad is None else local_part(parameter.grad).clone()
            for parameter in self._parameters
        ]

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """`<track>/train/grad_norm` and, of each pair, `train/grad_cosine/<one>_<other>` in -1..1. Collectives inside.

        A pair of which one has no gradient has no cosine.
        """
        tracks, own = list(self._sums), _increments(list(self._sums.values()))
        products_KK = summed_over_shards(
            lambda places: _products([[gradients[place] for place in places] for gradients in own]), self._parameters
        ).tolist()
        norms = [math.sqrt(max(products_KK[i][i], 0.0)) for i in range(len(tracks))]
        found = {f"{track}/train/grad_norm": norm for track, norm in zip(tracks, norms, strict=True)}
        for i, j in itertools.combinations(range(len(tracks)), 2):
            if norms[i] * norms[j] > 0:
                found[f"train/grad_cosine/{tracks[i]}_{tracks[j]}"] = products_KK[i][j] / (norms[i] * norms[j])
        return found


def _increments(sums: Sequence[list[Tensor]]) -> list[list[Tensor]]:
    """What each track added."""
    return [sums[0], *(list(torch._foreach_sub(after, before)) for before, after in itertools.pairwise(sums))]


def _products(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """[K, K] float64, scalar products of whole gradients."""
    rows = [
        torch.stack(
            [torch.stack([_product(a, b) for a, b in zip(one, other, strict=True)]).sum() for other in gradients]
        )
        for one in gradients
    ]
    return torch.stack(rows)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (widened(a) * widened(b)).sum()
