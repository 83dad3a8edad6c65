"""Images and videos: requests with pinned sigmas and noise."""

from __future__ import annotations

from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.runtime import Runtime
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.modality import Modality
from unirl.trainer.request import inputs_of
from unirl.trainer.roles import DiffusionEngineRole
from unirl.types.sampling import DiffusionSamplingParams

ROWS_AHEAD = 32
"""Prompts whose images are in memory at once while prompts are encoded ahead."""


class DiffusionModality(Modality[DiffusionSamplingParams]):
    """Images and videos from diffusion models."""

    def prepare(
        self,
        runtime: Runtime,
        data: MultimodalRLDataSource,
        sampling: DiffusionSamplingParams,
        evaluator: Evaluator | None,
    ) -> None:
        """If the engine drops its text encoders, have it encode every prompt of the run with its images first."""
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
