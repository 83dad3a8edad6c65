"""Episodes of policies that act: requests for episodes from given starts."""

from __future__ import annotations

from typing import ClassVar

from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.held import Held
from unirl.distributed.runtime import Runtime
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.modality import Modality
from unirl.types.actions import ActionSegment
from unirl.types.errors import ContractError
from unirl.types.rollout import RolloutResp
from unirl.types.sampling import ActionSamplingParams


class ActionModality(Modality[ActionSamplingParams]):
    """Episodes, each a sample.

    balance_decisions: distribute the episodes of a rollout over devices by their number of decisions, so that no device
        waits for the one with the longest. No effect with one device.
    """

    trains_actions: ClassVar[bool] = True

    def __init__(self, *, balance_decisions: bool = True) -> None:
        self._balances_decisions = balance_decisions

    def prepare(
        self,
        runtime: Runtime,
        data: MultimodalRLDataSource,
        sampling: ActionSamplingParams,
        evaluator: Evaluator | None,
    ) -> None:
        """Nothing: an engine of episodes is ready once it is built."""

    def training_costs(self, resp: Held, track: str) -> list[int] | None:
        """Decisions of each episode."""
        if not self._balances_decisions:
            return None
        return [count for part in resp.map(count_decisions, track) for count in part]


def count_decisions(resp: RolloutResp, track: str) -> list[int]:
    """Decisions of each episode (runs in the workers that hold the response)."""
    segment = resp.tracks[track].segment
    if not isinstance(segment, ActionSegment):
        raise ContractError(f"track {track!r} holds no episodes that could be trained on")
    return segment.lengths.tolist()
