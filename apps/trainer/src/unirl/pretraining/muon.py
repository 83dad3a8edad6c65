"""Muon: momentum whose matrices are orthogonalised before they are applied. In fp32, one batched product per shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Quintic of Jordan et al. 2024 (kellerjordan.github.io/posts/muon): singular values go to about 1 in five steps."""
_NUM_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; the step of a matrix [n, m] is lr * sqrt(max(1, n / m)) in spectral norm.

    The weight of a convolution [n, ...] counts as the matrix of its n filters.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # ty: ignore[incompatible-method-override] - no closure
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                updates = torch.stack([self._momentum(parameter, group["momentum"]) for parameter in parameters])
                matrices = updates.flatten(2)
                rows, columns = matrices.shape[1:]
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                for parameter, update in zip(parameters, orthogonalised(matrices), strict=True):
                    parameter.sub_(update.view(shape), alpha=scale)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        grad = parameter.grad
        if grad is None:
            raise ValueError(f"Muon needs a gradient for every matrix; one of shape {tuple(parameter.shape)} has none")
        buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(grad))
        buffer.lerp_(grad, 1 - momentum)
        return grad.lerp(buffer, momentum)


def orthogonalised(matrices_NRC: Tensor) -> Tensor:
    """The nearest matrices with all singular values about 1, by Newton-Schulz iteration; float32 [N, rows, columns]."""
    is_tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x = matrices_NRC.mT if is_tall else matrices_NRC
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
