"""Components as the driver sees them: their marked methods, with held values instead of responses.

    engine = runtime.role("engine", EngineRole)

A role is checked against its component's markers when it is called; these protocols are for readers and type checkers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from unirl.algorithms.traces import Trace
from unirl.distributed.held import Held
from unirl.train.stack import TrainStepResult
from unirl.types.copies import Copies
from unirl.types.media import Primitive
from unirl.types.rollout import DiffusionPlan, RolloutReq
from unirl.types.sampling import DiffusionSamplingParams, StagedSamplingParams
from unirl.types.training import OFFLOADABLE, Offloadable


class EngineRole(Protocol):
    """An engine (unirl.types.protocols.engines.RolloutEngine)."""

    def generate(self, req: RolloutReq, policy: Copies = None) -> Held:
        """Samples of a request, held by the workers that made them."""
        ...

    def abort(self) -> None:
        """End what runs early, see RolloutEngine."""
        ...

    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError if a prompt cannot be sampled from."""
        ...

    def sleep(self) -> None:
        """Free device memory."""
        ...

    def wake_up(self) -> None:
        """Restore device memory, to generate again."""
        ...


class ResumingEngineRole(EngineRole, Protocol):
    """An engine that continues what `abort` ended early (unirl.types.protocols.engines.ResumingEngine)."""

    def generate(self, req: RolloutReq, policy: Copies = None, begun: Held | None = None) -> Held:
        """As EngineRole. begun: what an earlier call made of the same request."""
        ...


class DiffusionEngineRole(EngineRole, Protocol):
    """A diffusion engine (unirl.types.protocols.engines.DiffusionRolloutEngine)."""

    def plan(self, params: DiffusionSamplingParams) -> DiffusionPlan:
        """The plan to pin on requests with these parameters."""
        ...

    def encodes_ahead(self) -> bool:
        """True if it needs every prompt of the run before the first rollout."""
        ...

    def encode_ahead(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> None:
        """Encode some of these prompts."""
        ...

    def drop_text_encoders(self) -> None:
        """Free the text encoders. Called after the last prompt."""
        ...


class StagesEngineRole(EngineRole, Protocol):
    """Joined engines of stages (unirl.rollout.stages.engine.StagesEngine)."""

    def plans(self, params: StagedSamplingParams) -> dict[str, DiffusionPlan]:
        """The plans to pin on requests with these parameters, by track."""
        ...


class RewardRole(Protocol):
    """The reward (unirl.reward.service.RewardService)."""

    def score_track(self, resp: Held, track: str, *, is_training: bool = True) -> list[dict[str, float]]:
        """Write the rewards of a track into it; returns scoring metrics per shard."""
        ...

    def offload(self) -> None:
        """Move reward models to host memory."""
        ...

    def onload(self) -> None:
        """Move them back."""
        ...


class StackRole(Protocol):
    """Algorithms and optimizer of a policy (unirl.train.stack.TrainStack)."""

    def prepare(self) -> None:
        """Called once before training."""
        ...

    def trained_tracks(self) -> list[str]:
        """The tracks that algorithms train."""
        ...

    def rollout_policy(self) -> Copies:
        """Named copies of the weights to sample from; None is the policy being trained."""
        ...

    def old_logp(self) -> str | None:
        """Description of where the log-probs before the first update come from."""
        ...

    def exact_ratios(self) -> list[str]:
        """Metrics that are 0 if every ratio of a first update is exactly 1."""
        ...

    def samples_per_unit(self) -> int:
        """Consecutive samples that stay together."""
        ...

    def trace(self, samples: list[str]) -> None:
        """Note these samples per token or denoising step when they train."""
        ...

    def take_traces(self) -> list[list[Trace]]:
        """What was noted, by shard."""
        ...

    def train(self, resp: Held, *, progress: float) -> TrainStepResult:
        """Run the updates of one rollout."""
        ...

    def train_part(self, resp: Held, *, progress: float, num_parts: int) -> TrainStepResult | None:
        """Add the gradients of one of the parts of a rollout; the last part ends the update."""
        ...

    def state_dict(self) -> dict[str, float]:
        """State for checkpoints."""
        ...

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state."""
        ...


class BackendRole(Protocol):
    """A training backend (unirl.types.protocols.training.TrainBackend)."""

    def offload(self, parts: Sequence[Offloadable] = OFFLOADABLE) -> None:
        """Move parts of the training state to host memory."""
        ...

    def onload(self, parts: Sequence[Offloadable] = OFFLOADABLE) -> None:
        """Move them back."""
        ...


class CheckpointerRole(Protocol):
    """The checkpointer (unirl.train.checkpoint.checkpointer.Checkpointer)."""

    def remove_unfinished(self) -> None:
        """Remove unfinished checkpoints of a killed run."""
        ...

    def save(
        self,
        step: int,
        driver_state: dict[str, Any],
        score: float | None = None,
        kept: Mapping[str, Sequence[str]] | None = None,
    ) -> None:  # Any: JSON values
        """Write a checkpoint."""
        ...

    def wait(self) -> None:
        """Wait until the current checkpoint is on disk."""
        ...

    def load(self, step: int | None = None) -> dict[str, Any]:  # Any: JSON values
        """Restore a step (None: the newest); returns the driver's state."""
        ...


class SyncRole(Protocol):
    """The weight sync (unirl.distributed.weight_sync.base.WeightSync)."""

    def prepare(self) -> None:
        """Wait until the engine accepts pushes."""
        ...

    def push(self, policy: Copies = None) -> dict[str, float]:
        """Make the engine sample from a policy; returns metrics."""
        ...


@runtime_checkable
class FollowsTraining(Protocol):
    """A weight sync that pushes by itself, to engines that start later, and so must know when weights change."""

    def training_begins(self) -> None:
        """The weights are no longer those that were pushed last."""
        ...
