"""Episodes by a copy of a policy that acts, on the trainer's devices or on separate ones."""

from __future__ import annotations

from unirl.rollout.engine.episodes.engine import EpisodesEngine
from unirl.rollout.engine.replica.base import PushedSampling
from unirl.rollout.environments.vector import VectorEnvironment
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.protocols.models import ActionPipeline, ModelBundle
from unirl.types.protocols.training import PolicyStore
from unirl.types.sampling import Precision


@bounded("engine")
class ReplicaEpisodesEngine(PushedSampling, EpisodesEngine):
    """Plays episodes with a copy of the policy. environment: see `EpisodesEngine`; other arguments: see
    `ReplicaRolloutEngine`."""

    def __init__(
        self,
        pipeline: ActionPipeline,
        policies: PolicyStore | None = None,
        *,
        bundle: ModelBundle,
        environment: VectorEnvironment,
        dtype: Precision = "bf16",
        forward_batch_size: PositiveInt,
        device: str = "cpu",
        rank: int = 0,
        dump_dir: str | None = None,
        track: str = "action",
    ) -> None:
        super().__init__(
            pipeline,
            None,
            environment=environment,
            forward_batch_size=forward_batch_size,
            device=device,
            rank=rank,
            dump_dir=dump_dir,
            track=track,
        )
        self._own(bundle, dtype, device, policies)
