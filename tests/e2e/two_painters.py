"""An engine for two policies: the second makes something of the first one's samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unirl.rollout.engine.base import BaseDiffusionEngine
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.types.protocols.training import PolicyStore
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import DiffusionPlan, RolloutReq, RolloutResp
from unirl.types.sampling import DiffusionSamplingParams

Pipelines = Mapping[str, Mapping[str, Any]]  # Any: pipelines of the recipe


class TwoPainters(BaseDiffusionEngine):
    """Every policy paints the prompts; the images of the second grow from those of the first, one of each."""

    has_trainer_logp = True

    def __init__(
        self,
        pipelines: Pipelines,
        stores: Mapping[str, PolicyStore],
        *,
        forward_batch_size: int,
        tracks: tuple[str, ...] = ("sketch", "painting"),
        device: str = "cpu",
    ) -> None:
        self._tracks = tracks
        self._engines = [
            TrainsideRolloutEngine(
                pipeline, stores[policy], forward_batch_size=forward_batch_size, device=device, track=track
            )
            for (policy, own), track in zip(pipelines.items(), tracks, strict=True)
            for pipeline in own.values()
        ]

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def plan(self, params: DiffusionSamplingParams) -> DiffusionPlan:
        """That of both: they have one geometry."""
        return self._engines[0].plan(params)

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """A sketch of every row, and a painting that grows from it."""
        sketch, painting = (engine.generate(req, policy).root_track() for engine in self._engines)
        painting = painting.replace(
            parent_track=self._tracks[0], parent_ids=list(sketch.sample_ids), primitives={}, metadata=[]
        )
        return RolloutResp(tracks=dict(zip(self._tracks, (sketch, painting), strict=True)))
