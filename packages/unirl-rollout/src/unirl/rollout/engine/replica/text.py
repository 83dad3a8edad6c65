"""Direct sampling of text with a copy of the model, on the trainer's devices or on separate ones."""

from __future__ import annotations

from unirl.rollout.engine.replica.base import PushedSampling
from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.protocols.models import AutoregressivePipeline, ModelBundle
from unirl.types.protocols.training import PolicyStore
from unirl.types.sampling import Precision


@bounded("engine")
class ReplicaTextEngine(PushedSampling, TrainsideTextEngine):
    """Samples completions with a copy of the pipeline. Arguments: see `ReplicaRolloutEngine`."""

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: PolicyStore | None = None,
        *,
        bundle: ModelBundle,
        dtype: Precision = "bf16",
        forward_batch_size: PositiveInt,
        device: str = "cpu",
        rank: int = 0,
        dump_dir: str | None = None,
        track: str = "text",
    ) -> None:
        super().__init__(
            pipeline, None, forward_batch_size=forward_batch_size, rank=rank, dump_dir=dump_dir, track=track
        )
        self._own(bundle, dtype, device, policies)
