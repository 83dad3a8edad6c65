"""Texts and images of them: requests for two stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from unirl.data.data_source import MultimodalRLDataSource, PromptRow
from unirl.distributed.runtime import Runtime
from unirl.trainer.held_out import BaseEvaluator
from unirl.trainer.modality import Modality
from unirl.trainer.request import build_composed_request, shortened
from unirl.trainer.roles import DiffusionEngineRole
from unirl.trainer.text import refuse_long_prompts
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ComposedSamplingParams


class ComposedModality(Modality[ComposedSamplingParams]):
    """A text of each prompt, and images of the text."""

    trains_tokens: ClassVar[bool] = True

    def prepare(
        self,
        runtime: Runtime,
        data: MultimodalRLDataSource,
        sampling: ComposedSamplingParams,
        evaluator: BaseEvaluator | None,
    ) -> None:
        """Let the writer look at every prompt, so that none that is too long stops the run later.

        Raises ConfigError naming the file.
        """
        refuse_long_prompts(runtime, data, sampling.ar)

    def request(
        self, runtime: Runtime, rows: Sequence[PromptRow], sampling: ComposedSamplingParams, rollout_id: int
    ) -> RolloutReq:
        """A request for texts and images, with the painter's stochastic steps and sigmas pinned."""
        resolved = sampling.diffusion.resolved(rollout_id)
        plan = runtime.role("engine", DiffusionEngineRole).plan(resolved)
        resolved, sigmas = shortened(resolved, plan.sigmas)
        params = dataclasses.replace(sampling, diffusion=resolved)
        return build_composed_request(
            rows, params, sigmas=sigmas, latent_shape=plan.latent_shape, rollout_id=rollout_id
        )
