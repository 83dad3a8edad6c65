"""What a kind of samples needs of the loop: requests, and what a sample costs to train."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

from unirl.data.data_source import MultimodalRLDataSource, PromptRow
from unirl.distributed.held import Held
from unirl.distributed.runtime import Runtime
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.request import pinned_request
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import BaseSamplingParams

ParamsT = TypeVar("ParamsT", bound=BaseSamplingParams)


class Modality(ABC, Generic[ParamsT]):
    """One kind of samples. The collector asks for requests and costs."""

    trains_tokens: ClassVar[bool] = False
    """Whether requests are for tokens."""

    @abstractmethod
    def prepare(
        self, runtime: Runtime, data: MultimodalRLDataSource, sampling: ParamsT, evaluator: Evaluator | None
    ) -> None:
        """Called once, before training or resuming: what the engine must know of the whole run."""

    def request(self, runtime: Runtime, rows: Sequence[PromptRow], sampling: ParamsT, rollout_id: int) -> RolloutReq:
        """A request for samples of some prompts, with everything pinned."""
        return pinned_request(runtime, rows, sampling, rollout_id)

    def training_costs(self, resp: Held, track: str) -> list[int] | None:
        """What each sample costs to train, by which they are dealt to devices; None leaves them where they are."""
        return None
