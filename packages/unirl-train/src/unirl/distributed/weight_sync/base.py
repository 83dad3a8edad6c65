"""What every push does: send, compare what the engine says it took, and ask it for log-probs."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, cast

from unirl.distributed.group.remote_role import RemoteRole
from unirl.distributed.weight_sync.canary import Canary, TokenCanary, TransitionCanary, canary_primitives
from unirl.distributed.weight_sync.remote_engines import RemoteEngines
from unirl.distributed.weight_sync.transports.base import SlicingTransport, TransportName
from unirl.distributed.weight_sync.transports.choice import make_transport
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError, WeightSyncError
from unirl.types.media import Primitive
from unirl.types.precision import dtype_named
from unirl.types.protocols.engines import PushTarget
from unirl.types.protocols.models import AutoregressivePipeline, DiffusionPipeline
from unirl.types.protocols.training import PolicyStore, TrainBackend
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.sampling import (
    ARSamplingParams,
    BaseSamplingParams,
    DiffusionSamplingParams,
    Precision,
)
from unirl.types.weights import WeightReceipt, WeightSpec

logger = logging.getLogger(__name__)

Metrics = dict[str, float]

CANARY_PROMPTS = ("The quick brown fox", "1 + 2 =")


@bounded("sync")
class WeightSync(ABC):
    """Pushes the backend's policy to an engine: every rank to the one beside it, or rank 0 to those elsewhere.

    backend: what trains. engine: the engine of this worker; None where `connect` names some elsewhere.
    pipeline: replays the canary. sampling: of the recipe, whose kind says what the canary is.
    dtype: what the engine keeps weights in; tensors are rounded to it before they leave.
    canary_prompts: short texts that the engine samples from after every push. canary_image_size: side in pixels of a
        picture beside each in the slot "image", for models that need one; None shows none.
    canary_tolerance: largest difference between the engine's log-probs and the trainer's, see `TokenCanary` and
        `TransitionCanary`; None takes theirs.
    transport: how tensors cross to engines in other workers: "ray" (objects, what None means), "files", "ipc" (shared
        memory), "nccl" (broadcast). transfer_dir: folder of "files";
        None: /dev/shm.
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
        canary_image_size: PositiveInt | None = None,
        canary_tolerance: Positive | None = None,
        transport: TransportName | None = None,
        transfer_dir: str | None = None,
        rank: int = 0,
    ) -> None:
        self._transport: TransportName = transport or "ray"
        self._transfer_dir = transfer_dir or "/dev/shm"
        self._device = backend.device
        self._source = backend.weight_source
        self._policies: PolicyStore = backend
        self._engine = engine
        self._dtype = dtype_named(dtype, "sync.dtype")
        self._rank = rank
        self._slicing: SlicingTransport | None = None
        """What takes the rows of every rank; None where the first sends whole tensors."""
        self._ranks = backend.collectives
        self._sent: dict[str, str] = {}
        self._checksums: dict[str | None, dict[str, str]] = {}
        """Checksum of every tensor of the last push, by named policy: whether an update changed anything."""
        self._canary = _canary(
            backend, pipeline, sampling, canary_primitives(canary_prompts, canary_image_size), canary_tolerance
        )

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def connect(self, engine: PushTarget) -> None:
        """Push to another engine from now on: rank 0 sends whole tensors, the others only gather."""
        self._slicing = None
        self._forget()
        self._engine = engine if self._rank == 0 else None

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def connect_elsewhere(self, engines: RemoteRole, shares_device: bool = False) -> None:
        """Push to engines of other workers from now on, by the transport that was chosen; else as `connect`.

        shares_device: whether each of them is on the very device that this worker has.
        """
        transport = make_transport(self._transport, self._device, engines, self._transfer_dir, shares_device)
        self.connect(RemoteEngines(engines, transport))
        self._slicing = transport if isinstance(transport, SlicingTransport) else None

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def prepare(self) -> None:
        """Wait until the engine can be pushed to, so that no push is timed with the engine's start."""
        if self._engine is not None:
            self._engine.wait_until_ready()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def push(self, policy: str | None = None) -> Metrics:
        """Make the engine sample from the present policy, or from a named copy of it; every rank calls it.

        Returns sync/seconds, sync/megabytes, sync/tensors, sync/changed_tensors, sync/bound and the canary's
        sync/logprob_gap_{max,mean}.
        """
        begin = time.perf_counter()
        version = self._source.policy_version
        engine = self._engine
        if engine is None:  # its shards are gathered for the rank that sends, in the push and in the canary's replay
            self._gather(policy)
            with self._under(policy):
                self._canary.replay_only()
            return {}
        before, self._sent = self._checksums.pop(policy, {}), {}
        receipt = self._send(engine, version, policy)
        self._checksums[policy] = self._sent
        changed = [name for name, checksum in self._sent.items() if before.get(name) != checksum]
        if receipt.policy_version != version:
            raise WeightSyncError(f"version {version} was pushed, the engine says it has {receipt.policy_version}")
        seconds = time.perf_counter() - begin
        with self._under(policy):
            largest, mean = self._canary.check(engine, version, policy)
        more = self._proved(version)
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
            **more,
            "sync/seconds": seconds,
            "sync/megabytes": receipt.num_bytes / 1e6,
            "sync/tensors": float(receipt.num_tensors),
            "sync/changed_tensors": float(len(changed)),
            "sync/logprob_gap_max": largest,
            "sync/logprob_gap_mean": mean,
        }

    def close(self) -> None:
        """Give back what pushes to engines of other workers hold."""
        if isinstance(self._engine, RemoteEngines):
            self._engine.close()

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

    def _proved(self, version: int) -> Metrics:
        """Called when the engine was proved to sample from what `_send` sent; metrics of the push."""
        return {}

    def _forget(self) -> None:  # noqa: B027 (most remember nothing)
        """Called when pushes go to another engine from now on."""

    def _under(self, policy: str | None) -> AbstractContextManager[None]:
        """Inside, the trainer's model has the values of the policy."""
        return nullcontext() if policy is None else self._policies.using_policy(policy)

    def _note_sent(self, specs: Iterable[WeightSpec]) -> None:
        """Called by `_send` with every tensor, whether it travels or the engine has it."""
        self._sent.update({spec.name: spec.checksum for spec in specs})


def _canary(
    backend: TrainBackend,
    pipeline: AutoregressivePipeline | DiffusionPipeline,
    sampling: BaseSamplingParams,
    primitives: Mapping[str, Primitive],
    tolerance: float | None,
) -> Canary:
    """The canary of what is sampled; a pipeline samples one kind of thing alone."""
    match sampling:
        case ARSamplingParams():
            return TokenCanary(cast("AutoregressivePipeline", pipeline), primitives, tolerance)
        case DiffusionSamplingParams():
            return TransitionCanary(
                cast("DiffusionPipeline", pipeline), sampling, backend.device, primitives, tolerance
            )
        case other:
            raise ConfigError(f"a push of a policy that is sampled by {type(other).__name__} has no canary")
