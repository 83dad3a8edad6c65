"""Pushes all weights of the policy in buckets, for full fine-tuning and for merged adapters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from torch import Tensor

from unirl.distributed.group.remote_role import RemoteRole
from unirl.distributed.weight_sync.base import CANARY_PROMPTS, Metrics, WeightSync
from unirl.distributed.weight_sync.last_push import Changed, LastPush
from unirl.distributed.weight_sync.remote_engines import RemoteEngines
from unirl.distributed.weight_sync.slices import SlicePush
from unirl.distributed.weight_sync.transports.base import TransportName
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.devices import is_accelerator
from unirl.types.errors import UniRLError, WeightSyncError
from unirl.types.protocols.engines import PushTarget
from unirl.types.protocols.models import AutoregressivePipeline, DiffusionPipeline
from unirl.types.protocols.training import TrainBackend
from unirl.types.renamed import Renamed
from unirl.types.sampling import BaseSamplingParams, Precision
from unirl.types.weights import WeightReceipt, WeightSpec, WeightsPlace, rounded, weight_buckets


@bounded("sync")
class FullWeightSync(WeightSync):
    """Gathers the model tensor by tensor and sends it in buckets; the engine loads it once all have arrived.

    bucket_bytes: largest bucket; two are in flight at once (a larger tensor gets its own bucket). changed: "all" sends
    the whole model; "tensors" only those that changed since the last push; "elements" only their changed elements, for
    which each rank that pushes keeps the model in host memory. The engine checks every tensor by checksum.
    Other arguments: see `WeightSync`.
    """

    renamed_keywords: ClassVar[Renamed] = {"only_changed": ("changed", {True: "tensors", False: "all"})}

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
        canary_mask: bool = False,
        canary_tolerance: Positive | None = None,
        transport: TransportName | None = None,
        transfer_dir: str | None = None,
        bucket_bytes: PositiveInt = 512 << 20,
        changed: Changed = "all",
        rank: int = 0,
    ) -> None:
        super().__init__(
            backend,
            engine,
            pipeline,
            sampling=sampling,
            dtype=dtype,
            canary_prompts=canary_prompts,
            canary_image_size=canary_image_size,
            canary_mask=canary_mask,
            canary_tolerance=canary_tolerance,
            transport=transport,
            transfer_dir=transfer_dir,
            rank=rank,
        )
        self._bucket_bytes = bucket_bytes
        self._last = None if changed == "all" else LastPush(keeps_elements=changed == "elements")
        self._counts_elements = changed == "elements"
        self._slices: SlicePush | None = None

    def connect_elsewhere(
        self, engines: RemoteRole, shares_device: bool = False, *, keeps_former: bool = False
    ) -> None:
        """Push to engines of other workers, in slices if the transport takes them."""
        super().connect_elsewhere(engines, shares_device, keeps_former=keeps_former)
        self._slices = None
        if self._slicing is not None and self._last is None:
            own = self._engine if isinstance(self._engine, RemoteEngines) else None
            self._slices = SlicePush(
                self._source, self._ranks, self._slicing, self._rank, own, self._dtype, self._bucket_bytes
            )

    @property
    def _fails_together(self) -> bool:
        return self._slices is not None

    def _gather(self, policy: str | None) -> None:
        if self._slices is not None:
            self._slices.push(self._source.policy_version, policy)
            return
        for _ in self._source.weights(policy, where="kept"):
            pass

    def _send(self, engine: PushTarget, version: int, policy: str | None) -> WeightReceipt:
        if self._slices is not None:
            receipt, sent = self._slices.push(version, policy)
            self._note_sent(sent)
            return _of_all(receipt, len(sent))
        where: WeightsPlace = "host"
        if is_accelerator(engine.bucket_device):
            where = "device" if self._loads_each(engine) else "kept"
        weights = self._source.weights(policy, where=where)
        tensors = ((name, self._placed(rounded(tensor, self._dtype), engine)) for name, tensor in weights)
        try:
            return self._send_buckets(engine, version, policy, tensors)
        except UniRLError:
            for _ in tensors:  # the other ranks gather to the end, which takes this one
                pass
            raise

    def _send_buckets(
        self, engine: PushTarget, version: int, policy: str | None, tensors: Iterable[tuple[str, Tensor]]
    ) -> WeightReceipt:
        shapes = self._source.weight_shapes()
        engine.begin_weights(version, [WeightSpec(name, shape, str(self._dtype), "") for name, shape in shapes.items()])
        last = self._last
        for bucket in weight_buckets(
            tensors,
            policy_version=version,
            max_bytes=self._bucket_bytes,
            base_version=None if last is None else last.begin(),
            changes=None if last is None else last.changes,
        ):
            engine.receive_weights(bucket)
            self._note_sent((*bucket.specs, *bucket.kept))
        return _of_all(engine.finish_weights(version, policy), len(shapes))

    @property
    def _sends_all(self) -> bool:
        return self._last is None

    def _proved(self, version: int) -> Metrics:
        if self._last is None:
            return {}
        self._last.succeed(version)
        return {"sync/changed_elements": self._last.changed_fraction} if self._counts_elements else {}

    def _forget(self) -> None:
        if self._last is not None:
            self._last.begin()


def _of_all(receipt: WeightReceipt | None, num_sent: int) -> WeightReceipt:
    """The receipt. Raises WeightSyncError unless it covers all tensors that were sent."""
    if receipt is None or receipt.num_tensors != num_sent:
        raise WeightSyncError(f"{num_sent} tensors were sent, the engine counts {receipt and receipt.num_tensors}")
    return receipt
