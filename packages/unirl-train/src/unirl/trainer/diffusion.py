"""Images and videos: requests with pinned sigmas and noise."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.data.data_source import MultimodalRLDataSource, PromptRow
from unirl.distributed.runtime import Runtime
from unirl.trainer.held_out import BaseEvaluator
from unirl.trainer.modality import Modality
from unirl.trainer.request import build_request, inputs_of, shortened
from unirl.trainer.roles import DiffusionEngineRole
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import DiffusionSamplingParams

ROWS_AHEAD = 32
"""Prompts whose pictures are in memory at once while they are encoded ahead."""


class DiffusionModality(Modality[DiffusionSamplingParams]):
    """Images and videos from diffusion models."""

    def prepare(
        self,
        runtime: Runtime,
        data: MultimodalRLDataSource,
        sampling: DiffusionSamplingParams,
        evaluator: BaseEvaluator | None,
    ) -> None:
        """Give every prompt of the run with its pictures to an engine that encodes them first, to drop its encoders."""
        engine = runtime.role("engine", DiffusionEngineRole)
        if not engine.encodes_ahead():
            return
        asked = [(sampling.resolved(0), data.rows)]
        if evaluator is not None:
            asked += [(params, evaluator.rows) for params in evaluator.all_params]
        for params, rows in asked:
            distinct = list({(row.prompt, row.media): row for row in rows}.values())
            for start in range(0, len(distinct), ROWS_AHEAD):
                engine.encode_ahead(inputs_of(distinct[start : start + ROWS_AHEAD]), params)
        engine.drop_text_encoders()

    def request(
        self, runtime: Runtime, rows: Sequence[PromptRow], sampling: DiffusionSamplingParams, rollout_id: int
    ) -> RolloutReq:
        """A request with the stochastic steps of this rollout, pinned sigmas and the ids of every noise."""
        params = sampling.resolved(rollout_id)
        plan = runtime.role("engine", DiffusionEngineRole).plan(params)
        params, sigmas = shortened(params, plan.sigmas)
        return build_request(rows, params, sigmas=sigmas, latent_shape=plan.latent_shape, rollout_id=rollout_id)
