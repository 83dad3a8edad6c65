"""Modalities: how requests for a kind of samples are made, and what each sample costs to train."""

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
    """One kind of samples. The collector calls it for requests and costs."""

    trains_tokens: ClassVar[bool] = False
    """True if the samples are tokens."""
    trains_actions: ClassVar[bool] = False
    """True if the samples are episodes."""

    @abstractmethod
    def prepare(
        self, runtime: Runtime, data: MultimodalRLDataSource, sampling: ParamsT, evaluator: Evaluator | None
    ) -> None:
        """Prepare the engine for the run. Called once, before training or resuming."""

    def request(self, runtime: Runtime, rows: Sequence[PromptRow], sampling: ParamsT, rollout_id: int) -> RolloutReq:
        """A request for samples of some prompts, with everything pinned."""
        return pinned_request(runtime, rows, sampling, rollout_id)

    def training_costs(self, resp: Held, track: str) -> list[int] | None:
        """Training cost of each sample, used to balance devices; None leaves samples where they are."""
        return None
