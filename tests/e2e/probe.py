"""Components of recipes plus a probe that remembers gradients, and runtimes over them: workers import this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from unirl.config.runs import run_of
from unirl.distributed.held import Held
from unirl.distributed.runtime import Role, Runtime
from unirl.distributed.worker import ComponentInfo, WorkerContext
from unirl.trainer.build.worker import build_components
from unirl.types.roles import Collect, Dispatch, MeshPlace, distributed
from unirl.types.rollout import RolloutResp


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
    components = build_components(run_of(recipe), run_dir, context)
    components["probe"] = GradientProbe(components["backend"], components["bundle"])
    return components


def build_all(recipes: Mapping[str, Mapping[str, Any]], run_dir: str, context: WorkerContext) -> dict[str, object]:
    """`build_with_probe` of several recipes, each component called name/component."""
    return {
        f"{name}/{component}": value
        for name, recipe in recipes.items()
        for component, value in build_with_probe(recipe, run_dir, context).items()
    }


class RecipeOf(Runtime):
    """The components of one recipe among those of `build_all`. Closing it leaves the workers to the other recipes."""

    def __init__(self, workers: Runtime, recipe: str) -> None:
        super().__init__()
        self._workers = workers
        self._recipe = recipe

    def _role(self, name: str) -> Role:
        """The role of the workers, whose results they hold."""
        return self._workers.role(f"{self._recipe}/{name}")

    def hold(self, value: RolloutResp) -> Held:
        """Held by the workers."""
        return self._workers.hold(value)

    def gather(self, sources: Sequence[tuple[Held, Sequence[int]]]) -> Held:
        """Gather on the workers."""
        return self._workers.gather(sources)

    def _infos(self) -> Mapping[str, ComponentInfo]:
        prefix = f"{self._recipe}/"
        return {name.removeprefix(prefix): i for name, i in self._workers._infos().items() if name.startswith(prefix)}

    def _places(self) -> Sequence[MeshPlace]:
        return self._workers._places()

    def _invoke_all(self, calls: list[tuple[int, str, tuple[Any, ...]]]) -> list[Any]:
        return self._workers._invoke_all(calls)

    def close(self) -> None:
        """Nothing to stop."""
