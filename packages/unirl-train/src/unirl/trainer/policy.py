"""Builds one policy in a worker: its bundle, pipelines, backend, algorithms and stack, in that order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from unirl.algorithms.base import StageAlgorithm
from unirl.config import instantiate
from unirl.config.runs import injected_into
from unirl.config.schema import Component, PolicySections, components
from unirl.config.signatures import read_target
from unirl.train.export import Exporter
from unirl.train.stack import TrainStack
from unirl.types.protocols.models import ModelBundle
from unirl.types.protocols.training import TrainBackend
from unirl.types.recipe import Part, Policy

Built = Any  # Any: any class that a recipe names


@dataclass(frozen=True)
class BuiltModel:
    """A model in one worker and its pipelines; everything that a policy that is not trained has."""

    plan: Policy
    bundle: ModelBundle
    pipelines: Mapping[str, Built]
    """By name, see `Policy.pipelines`."""

    @property
    def pipeline(self) -> Built:
        """The first pipeline."""
        return next(iter(self.pipelines.values()))

    def roles(self, policies: Collection[str]) -> dict[str, object]:
        """The components by role name, in a run with these policies."""
        parts = {"bundle": self.bundle, **_numbered("pipeline", self.pipelines), **self._learning()}
        return {role_name(self.plan.name, name, policies): part for name, part in parts.items()}

    def _learning(self) -> dict[str, object]:
        return {}


@dataclass(frozen=True)
class BuiltPolicy(BuiltModel):
    """The components of a trained policy in one worker."""

    backend: TrainBackend
    algorithms: Mapping[str, StageAlgorithm]
    """By the track that each trains."""
    stack: TrainStack

    def _learning(self) -> dict[str, object]:
        return {
            "backend": self.backend,
            **_numbered("algorithm", self.algorithms),
            "stack": self.stack,
            "exporter": Exporter(self.backend, self.bundle),
        }


def role_name(policy: str, component: str, policies: Collection[str]) -> str:
    """Role name of a policy's component: `backend` if there is one policy, else `<policy>/backend`."""
    return component if len(policies) == 1 else f"{policy}/{component}"


def build_model(plan: Policy, device: str, *, defers_weights: bool = False) -> BuiltModel:
    """Build the model of a policy and its pipelines. defers_weights: leave those of what trains to the backend, where
    the bundle can."""
    offered = {"device": device, "defers_weights": defers_weights}
    bundle = build_part(plan.bundle, components(PolicySections)["bundle"], offered)
    return BuiltModel(plan, bundle, build_pipelines(plan, bundle))


def build_policy(plan: Policy, device: str) -> BuiltPolicy:
    """Build one trained policy. Its algorithms are not prepared yet."""
    found = components(PolicySections)
    # Weights that are quantised are read whole first.
    is_read = plan.backend.abilities.get("reads_weights", False) and not (plan.backend.get("lora") or {}).get("base")
    model = build_model(plan, device, defers_weights=bool(is_read))
    bundle, pipelines = model.bundle, model.pipelines
    backend = build_part(plan.backend, found["backend"], {"bundle": bundle, "device": device})
    of_track = {track: pipelines[name] for track in plan.algorithms for name in [plan.pipeline_name(track)]}
    algorithms = {
        track: build_part(part, found["algorithm"], {"pipeline": of_track[track], "policies": backend})
        for track, part in plan.algorithms.items()
    }
    stack = build_part(plan.stack, found["stack"], {"backend": backend, "algorithms": algorithms})
    return BuiltPolicy(plan, bundle, pipelines, backend, algorithms, stack)


def build_pipelines(plan: Policy, bundle: ModelBundle) -> dict[str, Built]:
    """The pipelines of a policy over a bundle."""
    component = components(PolicySections)["pipeline"]
    return {name: build_part(part, component, {"bundle": bundle}) for name, part in plan.pipelines.items()}


def build_part(part: Part, component: Component, offered: Mapping[str, object]) -> Built:
    """Build a part of a recipe, passing the offered keywords that the schema injects into it."""
    names = injected_into(read_target(part.path), component)
    return instantiate(part.node, **{name: offered[name] for name in names})


def numbered(name: str, own: str, several: Collection[str]) -> str:
    """Name of one of several components of a policy: `pipeline` if there is one, else `pipeline/<own>`."""
    return name if len(several) == 1 else f"{name}/{own}"


def _numbered(name: str, parts: Mapping[str, object]) -> dict[str, object]:
    return {numbered(name, own, parts): part for own, part in parts.items()}
