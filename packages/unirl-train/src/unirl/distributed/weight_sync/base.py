"""Base of weight syncs: send, compare with the engine's receipt, and check its log-probs."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, cast

from torch import Tensor

from unirl.distributed.group.remote_role import RemoteRole
from unirl.distributed.weight_sync.action_canary import ActionCanary
from unirl.distributed.weight_sync.canary import Canary, TokenCanary, TransitionCanary, canary_primitives
from unirl.distributed.weight_sync.remote_engines import RemoteEngines
from unirl.distributed.weight_sync.transports.base import SlicingTransport, TransportName
from unirl.distributed.weight_sync.transports.choice import make_transport
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.devices import is_accelerator
from unirl.types.errors import ConfigError, UniRLError, WeightSyncError
from unirl.types.media import Primitive
from unirl.types.precision import dtype_named
from unirl.types.protocols.engines import PushTarget, SharesMemory
from unirl.types.protocols.models import ActionPipeline, AutoregressivePipeline, DiffusionPipeline
from unirl.types.protocols.training import PolicyStore, TrainBackend
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.sampling import (
    ActionSamplingParams,
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
    """Pushes the backend's policy to an engine: every rank to the one in its worker, or rank 0 to those of other
    workers.

    backend: the trainer. engine: the engine of this worker; None if `connect` is called with engines of other workers.
    pipeline: replays the canary. sampling: the recipe's; its type chooses the kind of canary.
    dtype: of the engine's weights; tensors are rounded to it before they are sent.
    canary_prompts: short texts that the engine samples from after every push. canary_image_size: side in pixels of an
        image per text in the slot "image", for models that need one; None sends no images. canary_mask: a mask per
        image in the slot "mask" as well, for models that fill a hole.
    canary_tolerance: largest difference between the engine's log-probs and the trainer's, see `TokenCanary`,
        `TransitionCanary` and `ActionCanary`; None takes their defaults.
    transport: how tensors are sent to engines in other workers: "ray" (objects; the default), "files", "ipc" (shared
        memory), "nccl" (broadcast). transfer_dir: folder of "files";
        None: /dev/shm.
    Raises WeightSyncError, which stops the run, if the engine did not get exactly what was sent.
    """

    sends_adapters: ClassVar[bool] = False
    """True if LoRA adapters are sent instead of whole weights."""

    def __init__(
        self,
        backend: TrainBackend,
        engine: PushTarget | None,
        pipeline: ActionPipeline | AutoregressivePipeline | DiffusionPipeline,
        *,
        sampling: BaseSamplingParams,
        dtype: Precision = "bf16",
        canary_prompts: Sequence[str] = CANARY_PROMPTS,
        canary_image_size: PositiveInt | None = None,
        canary_mask: bool = False,
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
        if transport == "ipc" and isinstance(engine, SharesMemory):
            engine.share_memory(backend.device)
        self._slicing: SlicingTransport | None = None
        """Transport for rows of every rank; None if rank 0 sends whole tensors."""
        self._former: list[RemoteEngines] = []
        """Engines over earlier connections, which may still read what lies there."""
        self._ranks = backend.collectives
        self._sent: dict[str, str] = {}
        self._checksums: dict[str | None, dict[str, str]] = {}
        """Checksum of every tensor of the last push, by named policy; shows if an update changed anything."""
        primitives = canary_primitives(canary_prompts, canary_image_size, has_masks=canary_mask)
        self._canary = _canary(backend, pipeline, sampling, primitives, canary_tolerance)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def connect(self, engine: PushTarget) -> None:
        """Push to another engine from now on: rank 0 sends whole tensors, the others only gather."""
        self._slicing = None
        self._forget()
        self._engine = engine if self._rank == 0 else None

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def connect_elsewhere(
        self, engines: RemoteRole, shares_device: bool = False, *, keeps_former: bool = False
    ) -> None:
        """Push to engines of other workers from now on, by the chosen transport; otherwise as `connect`.

        shares_device: True if every engine is on the device of this worker. keeps_former: True if other engines
            still read what was pushed over earlier connections, which then stay open.
        """
        if isinstance(self._engine, RemoteEngines):
            self._former.append(self._engine)
        while self._former and not keeps_former:
            self._former.pop().close()
        transport = make_transport(
            self._transport,
            self._device,
            engines,
            self._transfer_dir,
            shares_device=shares_device,
            lends_files=self._sends_all,
        )
        self.connect(RemoteEngines(engines, transport))
        self._slicing = transport if isinstance(transport, SlicingTransport) else None

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def prepare(self) -> None:
        """Wait until the engine accepts pushes, so that timings of pushes do not include its start."""
        if self._engine is not None:
            self._engine.wait_until_ready()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def push(self, policy: str | None = None) -> Metrics:
        """Make the engine sample from the current policy, or from a named copy of it; every rank calls it.

        Returns sync/seconds, sync/megabytes, sync/tensors, sync/changed_tensors, sync/bound, what a subclass adds, and
        the canary's sync/logprob_gap_{max,mean}.
        """
        begin = time.perf_counter()
        version = self._source.policy_version
        engine = self._engine
        if engine is None:  # takes part in gathering for the rank that sends, in the push and in the canary's replay
            self._gather(policy)
            with self._under(policy):
                self._canary.replay_only()
            return {}
        before, self._sent = self._checksums.get(policy, {}), {}
        try:
            receipt = self._send(engine, version, policy)
        except UniRLError:
            if not self._fails_together:
                with self._under(policy):
                    self._canary.replay_only()  # as the others do, which know nothing of this
            raise
        changed = [name for name, checksum in self._sent.items() if before.get(name) != checksum]
        if receipt.policy_version != version:
            raise WeightSyncError(f"version {version} was pushed, the engine says it has {receipt.policy_version}")
        seconds = time.perf_counter() - begin
        with self._under(policy):
            largest, mean = self._canary.check(engine, version, policy)
        self._checksums[policy] = self._sent  # now, since a push that is not proved is made again
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
        """Free what pushes to engines of other workers hold."""
        for engine in (self._engine, *self._former):
            if isinstance(engine, RemoteEngines):
                engine.close()

    @property
    def _fails_together(self) -> bool:
        """True if a push that fails on one rank ends on all of them."""
        return False

    @property
    def is_due(self) -> bool:
        """True if the engine does not have the current version."""
        return self._engine is not None and self._engine.policy_version != self._source.policy_version

    @property
    def _sends_all(self) -> bool:
        """True if every push has all that the engine must keep of it."""
        return True

    @abstractmethod
    def _send(self, engine: PushTarget, version: int, policy: str | None) -> WeightReceipt:
        """Send a policy, and return the engine's receipt."""

    @abstractmethod
    def _gather(self, policy: str | None) -> None:
        """The collectives of `_send`, on a rank that has no engine."""

    def _proved(self, version: int) -> Metrics:
        """Called once the canary has proved a push; returns metrics of the push."""
        return {}

    def _forget(self) -> None:  # noqa: B027 (most remember nothing)
        """Called when later pushes go to another engine."""

    def _under(self, policy: str | None) -> AbstractContextManager[None]:
        """Context in which the trainer's model has the weights of the policy."""
        return nullcontext() if policy is None else self._policies.using_policy(policy)

    @staticmethod
    def _placed(tensor: Tensor, engine: PushTarget) -> Tensor:
        """The tensor where it is summed. Engines that load each bucket, or are in other workers, have it where it
        arrives; one in this worker that keeps it until all have arrived takes it as it is."""
        arrives = isinstance(engine, RemoteEngines) or WeightSync._loads_each(engine)
        return tensor.to(engine.bucket_device) if arrives else tensor

    @staticmethod
    def _loads_each(engine: PushTarget) -> bool:
        """True if an engine in this worker loads each bucket as it comes, on its device."""
        return isinstance(engine, SharesMemory) and is_accelerator(engine.bucket_device)

    def _note_sent(self, specs: Iterable[WeightSpec]) -> None:
        """Called by `_send` with every tensor, sent or already in the engine."""
        self._sent.update({spec.name: spec.checksum for spec in specs})


def _canary(
    backend: TrainBackend,
    pipeline: ActionPipeline | AutoregressivePipeline | DiffusionPipeline,
    sampling: BaseSamplingParams,
    primitives: Mapping[str, Primitive],
    tolerance: float | None,
) -> Canary:
    """The canary for this kind of sampling; a pipeline has only one kind."""
    match sampling:
        case ARSamplingParams():
            return TokenCanary(cast("AutoregressivePipeline", pipeline), backend.device, primitives, tolerance)
        case DiffusionSamplingParams():
            return TransitionCanary(
                cast("DiffusionPipeline", pipeline), sampling, backend.device, primitives, tolerance
            )
        case ActionSamplingParams():
            return ActionCanary(cast("ActionPipeline", pipeline), sampling, backend.device, primitives, tolerance)
        case other:
            raise ConfigError(f"a push of a policy that is sampled by {type(other).__name__} has no canary")
