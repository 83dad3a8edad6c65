"""Direct sampling of images or videos with a copy of the model, on the trainer's devices or on separate ones."""

from __future__ import annotations

from unirl.rollout.engine.base import MediaBits
from unirl.rollout.engine.begun_latents import BegunLatents
from unirl.rollout.engine.replica.base import ResumingSampling
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.conditions import Condition
from unirl.types.protocols.models import ModelBundle, ResumingDiffusionPipeline
from unirl.types.protocols.training import PolicyStore
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import DiffusionSamplingParams, Precision
from unirl.types.segments import LatentSegment


@bounded("engine")
class ReplicaRolloutEngine(ResumingSampling, TrainsideRolloutEngine):
    """Samples with a copy of the pipeline; supports every model family and needs no other packages.

    pipeline, bundle: built for this engine alone (`has_own_model`). policies: the training backend in this process,
    whose policy version the replica starts with; None if this process does not train.
    dtype: of the replica's trainable components; pushed tensors must have it.
    Other arguments: see `TrainsideRolloutEngine`.

    `abort` ends denoising after the present step. What was begun goes on there with the noise that it would have had.
    """

    def __init__(
        self,
        pipeline: ResumingDiffusionPipeline,
        policies: PolicyStore | None = None,
        *,
        bundle: ModelBundle,
        dtype: Precision = "bf16",
        forward_batch_size: PositiveInt,
        device: str = "cpu",
        rank: int = 0,
        media_bits: MediaBits = 32,
        decode: bool = True,
        drop_text_encoders: bool = False,
        dump_dir: str | None = None,
        track: str = "image",
    ) -> None:
        super().__init__(
            pipeline,
            None,
            forward_batch_size=forward_batch_size,
            device=device,
            rank=rank,
            media_bits=media_bits,
            decode=decode,
            drop_text_encoders=drop_text_encoders,
            dump_dir=dump_dir,
            track=track,
        )
        self._resuming = pipeline
        self._own(bundle, dtype, device, policies)

    def _conditions(self, req: RolloutReq, params: DiffusionSamplingParams) -> dict[str, Condition]:
        """Those that the samples began with, where they are begun."""
        begun = req.begun
        if begun is None:
            return super()._conditions(req, params)
        return {name: condition.to(self._device) for name, condition in begun.conditions.items()}

    def _segment(
        self, req: RolloutReq, conditions: dict[str, Condition], params: DiffusionSamplingParams
    ) -> LatentSegment:
        begun = BegunLatents.of(req, self._device)
        if begun is None:
            return self._resuming.diffuse(conditions, **self._walk(req, params), is_ending=self._ends)
        parts = []
        for rows in begun.unfinished:
            own = {name: condition.select(rows) for name, condition in conditions.items()}
            walk = self._walk(req.select(rows), params)
            more = self._resuming.diffuse(own, **walk, begun=begun.segment.select(rows), is_ending=self._ends)
            parts.append((rows, more))
        return begun.whole(parts, self._version())
