"""Which components are on the device in which phase: one plan per run, applied before each phase (`PhaseClock.before`).

    phase        engine  weights            optimizer  reward models
    sync         on      on                 off        off
    rollout      on      on where it        off        off, on where scored meanwhile
    reward       on      samples with them  off        on
    eval         on      (else off)         off        on
    train        off     on                 on         off, on where their gradient trains
    checkpoint   -       on                 on         -

"-": stays where it is, as everything does in other phases. The engine is awake while samples are scored, since groups
that could not be scored are sampled again. Components that the recipe's `residency` does not name are always on the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from unirl.config.schema import Residency
from unirl.distributed.runtime import Runtime
from unirl.trainer.roles import BackendRole, EngineRole, RewardRole
from unirl.types.training import Offloadable

Resident = Literal["engine", "weights", "optimizer", "reward"]
SAMPLING = frozenset({"rollout", "reward", "eval"})
"""Phases in which samples may be generated."""


@dataclass(frozen=True)
class Stay:
    """Phases in which a component must be on the device, and must not be; in others it stays where it is."""

    on: frozenset[str]
    off: frozenset[str]


def residency_plan(
    residency: Residency,
    *,
    has_own_weights: bool,
    is_scored_meanwhile: bool = False,
    trains_through_reward: bool = False,
) -> dict[Resident, Stay]:
    """The components that move. Empty if the recipe keeps all on the device.

    has_own_weights: ability of the engine. is_scored_meanwhile: True if samples are scored while others are generated.
    trains_through_reward: True if a loss runs the reward models.
    """
    plan: dict[Resident, Stay] = {}
    if residency.sleep_engine:
        plan["engine"] = Stay(SAMPLING | {"sync"}, frozenset({"train"}))
    if residency.offload_weights:
        always, sampled = frozenset({"sync", "train", "checkpoint"}), SAMPLING if not has_own_weights else frozenset()
        plan["weights"] = Stay(always | sampled, SAMPLING - sampled)
    if residency.offload_optimizer:
        plan["optimizer"] = Stay(frozenset({"train", "checkpoint"}), SAMPLING | {"sync"})
    if residency.offload_reward:
        extra = ({"rollout"} if is_scored_meanwhile else set()) | ({"train"} if trains_through_reward else set())
        plan["reward"] = Stay(frozenset({"reward", "eval"} | extra), frozenset({"sync", "rollout", "train"} - extra))
    return plan


class DeviceResidents:
    """Moves the components of a runtime according to a plan. Initially all are on the device.

    backends: names of the training backends, which move together.
    """

    def __init__(self, plan: Mapping[Resident, Stay], runtime: Runtime, backends: Sequence[str] = ("backend",)) -> None:
        engine, reward = runtime.role("engine", EngineRole), runtime.role("reward", RewardRole)
        self._backends = [runtime.role(name, BackendRole) for name in backends]
        self._plan = plan
        self._leave: Mapping[Resident, Callable[[], object]] = {
            "engine": engine.sleep,
            "weights": lambda: self._offload("weights"),
            "optimizer": lambda: self._offload("optimizer"),
            "reward": reward.offload,
        }
        self._come: Mapping[Resident, Callable[[], object]] = {
            "engine": engine.wake_up,
            "weights": lambda: self._onload("weights"),
            "optimizer": lambda: self._onload("optimizer"),
            "reward": reward.onload,
        }
        self._away: set[Resident] = set()

    def _offload(self, what: Offloadable) -> None:
        for backend in self._backends:
            backend.offload([what])

    def _onload(self, what: Offloadable) -> None:
        for backend in self._backends:
            backend.onload([what])

    def enter(self, phase: str) -> None:
        """Move components off the device that must not be there in this phase, then move in those that must."""
        for name, stay in self._plan.items():
            if phase in stay.off and name not in self._away:
                self._leave[name]()
                self._away.add(name)
        for name, stay in self._plan.items():
            if phase in stay.on and name in self._away:
                self._come[name]()
                self._away.remove(name)
