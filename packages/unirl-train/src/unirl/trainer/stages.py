"""Several stages, such as a text of each prompt and images of the text."""

from __future__ import annotations

from typing import ClassVar

from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.runtime import Runtime
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.modality import Modality
from unirl.trainer.text import refuse_long_prompts
from unirl.types.sampling import StagedSamplingParams


class StagesModality(Modality[StagedSamplingParams]):
    """Several stages of any kind."""

    trains_tokens: ClassVar[bool] = True

    def prepare(
        self,
        runtime: Runtime,
        data: MultimodalRLDataSource,
        sampling: StagedSamplingParams,
        evaluator: Evaluator | None,
    ) -> None:
        """Have the first stage check every prompt, so that a prompt that is too long does not stop the run later.

        Raises ConfigError naming the file.
        """
        refuse_long_prompts(runtime, data, sampling)
