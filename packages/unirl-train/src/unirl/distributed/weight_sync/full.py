"""All weights of the policy, in buckets. For full fine-tuning, and for adapters that are merged on the way."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.distributed.weight_sync.base import CANARY_PROMPTS, WeightSync
from unirl.distributed.weight_sync.transports.base import TransportName
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.errors import WeightSyncError
from unirl.types.protocols.engines import PushTarget
from unirl.types.protocols.models import AutoregressivePipeline, DiffusionPipeline
from unirl.types.protocols.training import TrainBackend
from unirl.types.sampling import BaseSamplingParams, Precision
from unirl.types.weights import WeightReceipt, WeightSpec, weight_buckets


@bounded("sync")
class FullWeightSync(WeightSync):
    """Gathers the model tensor by tensor and sends it in buckets; the engine loads it when all of it is there.

    bucket_bytes: most bytes in one bucket, of which two are on their way at once (a larger tensor travels alone).
    only_changed: whether tensors that are as in the last push stay behind; the engine compares its own with their
        checksums. For adapters that are merged, and for models of which parts are frozen.
    The rest: see `WeightSync`.
    """

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
        bucket_bytes: PositiveInt = 512 << 20,
        only_changed: bool = False,
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
            canary_tolerance=canary_tolerance,
            transport=transport,
            transfer_dir=transfer_dir,
            rank=rank,
        )
        self._bucket_bytes = bucket_bytes
        self._only_changed = only_changed
        self._engine_has: dict[str, WeightSpec] = {}

    def _gather(self, policy: str | None) -> None:
        for _ in self._source.weights(policy):
            pass

    def _send(self, engine: PushTarget, version: int, policy: str | None) -> WeightReceipt:
        shapes = self._source.weight_shapes()
        engine.begin_weights(version, [WeightSpec(name, shape, str(self._dtype), "") for name, shape in shapes.items()])
        rounded = ((name, self._rounded(tensor)) for name, tensor in self._source.weights(policy))
        known, self._engine_has = self._engine_has, {}  # after a push that fails nothing is known
        sent: dict[str, WeightSpec] = {}
        for bucket in weight_buckets(rounded, policy_version=version, max_bytes=self._bucket_bytes, known=known):
            engine.receive_weights(bucket)
            self._note_sent((*bucket.specs, *bucket.kept))
            sent.update({spec.name: spec for spec in (*bucket.specs, *bucket.kept)})
        receipt = engine.finish_weights(version, policy)
        if receipt.num_tensors != len(shapes):
            raise WeightSyncError(f"{len(shapes)} tensors were sent, the engine counts {receipt.num_tensors}")
        if self._only_changed:
            self._engine_has = sent
        return receipt
