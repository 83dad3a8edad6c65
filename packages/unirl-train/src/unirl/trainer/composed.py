"""Texts and images of them: requests for two stages."""

from __future__ import annotations

from typing import ClassVar

from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.runtime import Runtime
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.modality import Modality
from unirl.trainer.text import refuse_long_prompts
from unirl.types.sampling import ComposedSamplingParams


class ComposedModality(Modality[ComposedSamplingParams]):
    """A text of each prompt, and images of the text."""

    trains_tokens: ClassVar[bool] = True

    def prepare(
        self,
        runtime: Runtime,
        data: MultimodalRLDataSource,
        sampling: ComposedSamplingParams,
        evaluator: Evaluator | None,
    ) -> None:
        """Let the writer look at every prompt, so that none that is too long stops the run later.

        Raises ConfigError naming the file.
        """
        refuse_long_prompts(runtime, data, sampling.ar)
