"""Texts of language and vision-language models: requests for completions."""

from __future__ import annotations

from typing import ClassVar

from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.held import Held
from unirl.distributed.runtime import Runtime
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.modality import Modality
from unirl.trainer.request import repeated
from unirl.trainer.roles import EngineRole
from unirl.types.conditions import PromptCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams, BaseSamplingParams
from unirl.types.segments import TextSegment


class TextModality(Modality[ARSamplingParams]):
    """Texts.

    balance_tokens: distribute the samples of a rollout over devices by their number of tokens, so that no device waits
        for the one with the longest texts. Samples move directly between devices. No effect with one device.
    """

    trains_tokens: ClassVar[bool] = True

    def __init__(self, *, balance_tokens: bool = True) -> None:
        self._balances_tokens = balance_tokens

    def prepare(
        self,
        runtime: Runtime,
        data: MultimodalRLDataSource,
        sampling: ARSamplingParams,
        evaluator: Evaluator | None,
    ) -> None:
        """Have the engine check every prompt without media, so that a prompt that is too long does not stop the run
        later.

        Raises ConfigError naming the file.
        """
        refuse_long_prompts(runtime, data, sampling)

    def training_costs(self, resp: Held, track: str) -> list[int] | None:
        """Tokens of each prompt and its completion."""
        if not self._balances_tokens:
            return None
        return [count for part in resp.map(count_tokens, track) for count in part]


def refuse_long_prompts(runtime: Runtime, data: MultimodalRLDataSource, sampling: BaseSamplingParams) -> None:
    """Have the engine check every prompt without media. Raises ConfigError naming the file."""
    rows = [row for row in data.rows if not row.media]
    if not rows:
        return
    once = RolloutReq(**repeated(rows, 1), sampling_params=sampling, rollout_id=0)
    try:
        runtime.role("engine", EngineRole).check_prompts(once)
    except ConfigError as error:
        raise ConfigError(f"{data.path}: {error}") from error


def count_tokens(resp: RolloutResp, track: str) -> list[int]:
    """Tokens of each sample, prompt and completion (runs in the workers that hold the response)."""
    own = resp.tracks[track]
    prompt, segment = own.conditions.get("prompt"), own.segment
    if not (isinstance(prompt, PromptCondition) and isinstance(segment, TextSegment)):
        raise ContractError(f"track {track!r} holds no prompt and text that could be trained on")
    return (prompt.lengths + segment.lengths).tolist()
