"""Tensor parallelism after Megatron-LM (arXiv 1909.08053): ranks that compute the same samples have parts of the
weights of attention and MLP, and add up what these make.

Every rank differentiates the same loss. A weight that is cut has its gradient on its rank alone; a whole weight inside
a cut layer has a part of it on each, which are summed as those of hidden states are. So the gradient of a rank is that
of its loss, and nothing is scaled. Where ranks deal out tokens instead (to the head, which all have whole), what is
gathered has the adjoint in the mean over ranks, as in `unirl.train.backend.ulysses`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from unirl.train.backend.ulysses import GatheringExchange, WithAdjoint


class SumExchange(GatheringExchange):
    """Implements unirl.types.protocols.models.LayerExchange over a process group.

    bytes_sent: of items that are gathered. bytes_reduced: of the tensors that this rank has given to sums over ranks so
    far, forwards and backwards.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.bytes_reduced = 0

    def entered(self, whole: Tensor) -> Tensor:
        """The tensor itself; its gradient is summed over ranks."""
        return WithAdjoint.apply(whole, lambda tensor: tensor.view_as(tensor), self._reduced)

    def summed(self, part: Tensor) -> Tensor:
        """The sum over ranks; its gradient is the same on all of them and passes as it is."""
        return WithAdjoint.apply(part, self._reduced, lambda grad: grad)

    def dealt(self, whole: Tensor) -> Tensor:
        """The tensor itself; its gradient is averaged over ranks, as those of parameters that are not cut are."""
        return WithAdjoint.apply(
            whole, lambda tensor: tensor.view_as(tensor), lambda grad: self._reduced(grad) / self.size
        )

    def _reduced(self, part: Tensor) -> Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        self.bytes_reduced += total.nbytes
        return total
