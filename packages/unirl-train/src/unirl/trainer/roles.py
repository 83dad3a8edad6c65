"""What the driver sees of a run's components: their marked methods, with held values where they take or make responses.

    engine = runtime.role("engine", EngineRole)

A role is checked against its component's markers when it is called; these protocols are for readers and type checkers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from unirl.distributed.held import Held
from unirl.train.stack import TrainStepResult
from unirl.types.copies import Copies
from unirl.types.media import Primitive
from unirl.types.rollout import DiffusionPlan, RolloutReq
from unirl.types.sampling import DiffusionSamplingParams, StagedSamplingParams
from unirl.types.training import OFFLOADABLE, Offloadable


class EngineRole(Protocol):
    """See unirl.types.protocols.engines.RolloutEngine."""

    def generate(self, req: RolloutReq, policy: Copies = None) -> Held:
        """Samples of a request, held where they were made."""
        ...

    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError where a prompt cannot be sampled from."""
        ...

    def sleep(self) -> None:
        """Give device memory back."""
        ...

    def wake_up(self) -> None:
        """Be ready to generate."""
        ...


class DiffusionEngineRole(EngineRole, Protocol):
    """See unirl.types.protocols.engines.DiffusionRolloutEngine."""

    def plan(self, params: DiffusionSamplingParams) -> DiffusionPlan:
        """What is pinned on requests of these parameters."""
        ...

    def encodes_ahead(self) -> bool:
        """Whether it wants every prompt of the run before the first rollout."""
        ...

    def encode_ahead(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> None:
        """Encode some of them."""
        ...

    def drop_text_encoders(self) -> None:
        """Called after the last of them."""
        ...


class StagesEngineRole(EngineRole, Protocol):
    """See unirl.rollout.stages.engine.StagesEngine."""

    def plans(self, params: StagedSamplingParams) -> dict[str, DiffusionPlan]:
        """What is pinned on requests of these parameters, by track."""
        ...


class RewardRole(Protocol):
    """See unirl.reward.service.RewardService."""

    def score_track(self, resp: Held, track: str, *, is_shaped: bool = True) -> list[dict[str, float]]:
        """Write the rewards of a track into it; how scoring kept up, per shard."""
        ...

    def offload(self) -> None:
        """Move reward models to host memory."""
        ...

    def onload(self) -> None:
        """Move them back."""
        ...


class StackRole(Protocol):
    """See unirl.train.stack.TrainStack."""

    def prepare(self) -> None:
        """Called once before training."""
        ...

    def trained_tracks(self) -> list[str]:
        """The tracks that algorithms train."""
        ...

    def rollout_policy(self) -> Copies:
        """Named copies of the weights to sample from; None: the policy that trains."""
        ...

    def old_logp(self) -> str | None:
        """Where the log-probs before the first update come from, for people."""
        ...

    def exact_ratios(self) -> list[str]:
        """Metrics that are 0 where every ratio of a first update is exactly 1."""
        ...

    def samples_per_unit(self) -> int:
        """Samples in a row that stay together."""
        ...

    def train(self, resp: Held, *, progress: float) -> TrainStepResult:
        """The updates of one rollout."""
        ...

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        ...

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take it over."""
        ...


class BackendRole(Protocol):
    """See unirl.types.protocols.training.TrainBackend."""

    def offload(self, parts: Sequence[Offloadable] = OFFLOADABLE) -> None:
        """Move parts of what trains to host memory."""
        ...

    def onload(self, parts: Sequence[Offloadable] = OFFLOADABLE) -> None:
        """Move them back."""
        ...


class CheckpointerRole(Protocol):
    """See unirl.train.checkpoint.checkpointer.Checkpointer."""

    def remove_unfinished(self) -> None:
        """Remove what a killed run has left half written."""
        ...

    def save(self, step: int, driver_state: dict[str, Any], score: float | None = None) -> None:  # Any: JSON values
        """Write a checkpoint."""
        ...

    def wait(self) -> None:
        """Return when what is being written is on disk."""
        ...

    def load(self, step: int | None = None) -> dict[str, Any]:  # Any: JSON values
        """Restore a step, None the newest; returns the driver's state."""
        ...

    def load_best(self) -> dict[str, Any]:  # Any: JSON values
        """Restore the step of the best held-out score."""
        ...


class SyncRole(Protocol):
    """See unirl.distributed.weight_sync.base.WeightSync."""

    def prepare(self) -> None:
        """Return when the engine can be pushed to."""
        ...

    def push(self, policy: Copies = None) -> dict[str, float]:
        """Make the engine sample from a policy; returns metrics."""
        ...
