"""Direct sampling of images or videos with a copy of the model, beside the one that trains or on devices of its own."""

from __future__ import annotations

from unirl.rollout.engine.replica.base import PushedSampling
from unirl.rollout.engine.trainside.engine import MediaBits, TrainsideRolloutEngine
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.protocols.models import DiffusionPipeline, ModelBundle
from unirl.types.protocols.training import PolicyStore
from unirl.types.sampling import Precision


@bounded("engine")
class ReplicaRolloutEngine(PushedSampling, TrainsideRolloutEngine):
    """Samples with a pipeline of its own; serves every family, with no engine to install.

    pipeline, bundle: built for this engine alone (`has_own_model`). policies: what trains in this process, whose
    version the replica starts as; None where nothing trains.
    dtype: the replica's trainable components are kept in it; pushes must bring it.
    The rest: see `TrainsideRolloutEngine`.
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
