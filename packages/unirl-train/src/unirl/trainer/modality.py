"""What a kind of samples needs of the loop: requests, what people get to see, and what a sample costs to train."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from unirl.data.data_source import MultimodalRLDataSource, PromptRow
from unirl.distributed.held import Held
from unirl.distributed.runtime import Runtime
from unirl.tracking.base import Tracker
from unirl.trainer.held_out import BaseEvaluator, EvaluationResult
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import BaseSamplingParams

ParamsT = TypeVar("ParamsT", bound=BaseSamplingParams)


class Gallery:
    """Where samples are shown: the trackers, and the folder `samples` of the run.

    metric: held-out mean that the best checkpoint is chosen by; images carry its value.
    """

    def __init__(self, run_dir: Path, trackers: Sequence[Tracker], metric: str) -> None:
        self._run_dir = run_dir
        self.trackers = trackers
        self.metric = metric

    @property
    def folder(self) -> Path:
        """Made where it is missing."""
        folder = self._run_dir / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class Modality(ABC, Generic[ParamsT]):
    """One kind of samples. The collector asks for requests and costs, the run record lets people see samples."""

    trains_tokens: ClassVar[bool] = False
    """Whether requests are for tokens."""

    @abstractmethod
    def prepare(
        self, runtime: Runtime, data: MultimodalRLDataSource, sampling: ParamsT, evaluator: BaseEvaluator | None
    ) -> None:
        """Called once, before training or resuming: what the engine must know of the whole run."""

    @abstractmethod
    def request(self, runtime: Runtime, rows: Sequence[PromptRow], sampling: ParamsT, rollout_id: int) -> RolloutReq:
        """A request for samples of some prompts, with everything pinned."""

    def training_costs(self, resp: Held, track: str) -> list[int] | None:
        """What each sample costs to train, by which they are dealt to devices; None leaves them where they are."""
        return None

    @abstractmethod
    def show_rollout(self, resp: Held, track: str, step: int, gallery: Gallery) -> None:
        """Let people see some samples of a scored track with advantages. Called every `media_interval` rollouts."""

    @abstractmethod
    def show_evaluation(self, result: EvaluationResult, step: int, gallery: Gallery) -> None:
        """Let people see some samples of a held-out evaluation, and keep them in the run directory."""
