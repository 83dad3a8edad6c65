"""What every push does: send, compare what the engine says it took, and ask it for log-probs."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, cast

from torch import Tensor

from unirl.distributed.weight_sync.canary import Canary, TokenCanary, TransitionCanary
from unirl.types.bounds import Positive, bounded
from unirl.types.errors import ConfigError, WeightSyncError
from unirl.types.precision import dtype_named
from unirl.types.protocols import AutoregressivePipeline, DiffusionPipeline, PolicyStore, PushTarget, TrainBackend
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.sampling import ARSamplingParams, BaseSamplingParams, DiffusionSamplingParams, Precision
from unirl.types.weights import WeightReceipt

logger = logging.getLogger(__name__)

Metrics = dict[str, float]

CANARY_PROMPTS = ("The quick brown fox", "1 + 2 =")


@bounded("sync")
class WeightSync(ABC):
    """Pushes the backend's policy to an engine: every rank to the one beside it, or rank 0 to those elsewhere.

    backend: what trains. engine: the engine of this worker; None where `connect` names some elsewhere.
    pipeline: replays the canary. sampling: of the recipe, whose kind says what the canary is.
    dtype: what the engine keeps weights in; tensors are rounded to it before they leave.
    canary_prompts: short texts that the engine samples from after every push. canary_tolerance: largest difference
        between its log-probs and the trainer's, see `TokenCanary` and `TransitionCanary`; None takes theirs.
    Raises WeightSyncError, and the run stops, where anything is not as it was sent.
    """

    sends_adapters: ClassVar[bool] = False
    """Whether LoRA adapters are sent instead of whole weights."""

    def __init__(
        self,
        backend: TrainBackend,
        engine: PushTarget | None,
        pipeline: AutoregressivePipeline | DiffusionPipeline,
        *,
        sampling: BaseSamplingParams,
        dtype: Precision = "bf16",
        canary_prompts: Sequence[str] = CANARY_PROMPTS,
        canary_tolerance: Positive | None = None,
        rank: int = 0,
    ) -> None:
        self._source = backend.weight_source
        self._policies: PolicyStore = backend
        self._engine = engine
        self._dtype = dtype_named(dtype, "sync.dtype")
        self._rank = rank
        self._canary = _canary(backend, pipeline, sampling, canary_prompts, canary_tolerance)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def connect(self, engine: PushTarget) -> None:
        """Push to engines of other workers (`RemoteEngines`) from now on: rank 0 sends, the others only gather."""
        self._engine = engine if self._rank == 0 else None

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def prepare(self) -> None:
        """Wait until the engine can be pushed to, so that no push is timed with the engine's start."""
        if self._engine is not None:
            self._engine.wait_until_ready()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def push(self, policy: str | None = None) -> Metrics:
        """Make the engine sample from the present policy, or from a named copy of it; every rank calls it.

        Returns sync/seconds, sync/megabytes, sync/tensors, sync/bound and the canary's sync/logprob_gap_{max,mean}.
        """
        begin = time.perf_counter()
        version = self._source.policy_version
        engine = self._engine
        if engine is None:  # its shards are gathered for the rank that sends, in the push and in the canary's replay
            self._gather(policy)
            with self._under(policy):
                self._canary.replay_only()
            return {}
        receipt = self._send(engine, version, policy)
        if receipt.policy_version != version:
            raise WeightSyncError(f"version {version} was pushed, the engine says it has {receipt.policy_version}")
        seconds = time.perf_counter() - begin
        with self._under(policy):
            largest, mean = self._canary.check(engine, version, policy)
        logger.info(
            "pushed policy version %d%s: %d tensors, %.1f MB in %.2f s; log-prob gap %.1e",
            version,
            "" if policy is None else f" ({policy})",
            receipt.num_tensors,
            receipt.num_bytes / 1e6,
            seconds,
            largest,
        )
        bound = {} if receipt.num_bound is None else {"sync/bound": float(receipt.num_bound)}
        return {
            **bound,
            "sync/seconds": seconds,
            "sync/megabytes": receipt.num_bytes / 1e6,
            "sync/tensors": float(receipt.num_tensors),
            "sync/logprob_gap_max": largest,
            "sync/logprob_gap_mean": mean,
        }

    @property
    def is_due(self) -> bool:
        """Whether the engine's version is not the present one."""
        return self._engine is not None and self._engine.policy_version != self._source.policy_version

    @abstractmethod
    def _send(self, engine: PushTarget, version: int, policy: str | None) -> WeightReceipt:
        """Send a policy, and return the engine's receipt."""

    @abstractmethod
    def _gather(self, policy: str | None) -> None:
        """The collectives of `_send`, on a rank that has no engine."""

    def _under(self, policy: str | None) -> AbstractContextManager[None]:
        """Inside, the trainer's model has the values of the policy."""
        return nullcontext() if policy is None else self._policies.using_policy(policy)

    def _rounded(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _canary(
    backend: TrainBackend,
    pipeline: AutoregressivePipeline | DiffusionPipeline,
    sampling: BaseSamplingParams,
    prompts: Sequence[str],
    tolerance: float | None,
) -> Canary:
    """The canary of what is sampled; a pipeline samples one kind of thing alone."""
    match sampling:
        case ARSamplingParams():
            return TokenCanary(cast("AutoregressivePipeline", pipeline), prompts, tolerance)
        case DiffusionSamplingParams():
            return TransitionCanary(cast("DiffusionPipeline", pipeline), sampling, backend.device, prompts, tolerance)
        case other:
            raise ConfigError(f"a push of a policy that is sampled by {type(other).__name__} has no canary")
