"""Direct sampling of images or videos with a copy of the model, on the trainer's devices or on separate ones."""

from __future__ import annotations

from unirl.rollout.engine.replica.base import PushedSampling
from unirl.rollout.engine.trainside.engine import MediaBits, TrainsideRolloutEngine
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.protocols.models import DiffusionPipeline, ModelBundle
from unirl.types.protocols.training import PolicyStore
from unirl.types.sampling import Precision


@bounded("engine")
class ReplicaRolloutEngine(PushedSampling, TrainsideRolloutEngine):
    """Samples with a copy of the pipeline; supports every model family and needs no other packages.

    pipeline, bundle: built for this engine alone (`has_own_model`). policies: the training backend in this process,
    whose policy version the replica starts with; None if this process does not train.
    dtype: of the replica's trainable components; pushed tensors must have it.
    Other arguments: see `TrainsideRolloutEngine`.
    """

    def __init__(
        self,
        pipeline: DiffusionPipeline,
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
        self._own(bundle, dtype, device, policies)
