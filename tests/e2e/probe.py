"""Components of a recipe plus a probe that remembers gradients: the workers of runtime tests import this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from unirl.distributed.runtime import WorkerContext
from unirl.trainer.wiring import build_components
from unirl.types.roles import Collect, Dispatch, distributed


class GradientProbe:
    """Copies every gradient just before the optimizer uses it."""

    def __init__(self, backend: Any, bundle: Any) -> None:
        self._bundle = bundle
        self._taken: list[dict[str, torch.Tensor]] = []
        step = backend.optimizer_step

        def remembering(max_grad_norm: float) -> Any:
            self._taken.append(self._gradients())
            return step(max_grad_norm)

        backend.optimizer_step = remembering

    def _gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for component, module in self._bundle.trainable_modules().items():
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad
                    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                    found[f"{component}.{name}"] = whole.detach().clone()
        return found

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def gradients(self) -> list[dict[str, torch.Tensor]]:
        """One record an optimizer step."""
        return self._taken


def build_with_probe(recipe: Mapping[str, Any], run_dir: str, context: WorkerContext) -> dict[str, object]:
    """`build_components` with a probe."""
    components = build_components(recipe, run_dir, context)
    components["probe"] = GradientProbe(components["backend"], components["bundle"])
    return components
