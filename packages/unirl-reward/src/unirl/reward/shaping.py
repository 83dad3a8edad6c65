"""What the length of a generated text does to its reward. Pure functions of tensors and numbers.

Legend: B samples, N tokens of all samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.segments import SegmentStatus, TextSegment

TruncatedReward = Literal["zero", "keep", "soft"]
DEFAULT_BUFFER_LEN = 4096
"""DAPO's buffer, for answers of up to 20480 tokens."""


def overlong_penalty(lengths_B: Tensor, *, max_len: int, buffer_len: int, factor: float = 1.0) -> Tensor:
    """DAPO's soft overlong punishment, to be added to the reward; float32 [B] in [-factor, 0].

    lengths_B: generated tokens. 0 up to `max_len - buffer_len`, then falling linearly to -factor at `max_len`.
    Raises ConfigError if the buffer does not fit between 1 and `max_len`.
    Source: DAPO (arXiv 2503.14476), equation 13.
    """
    if not 1 <= buffer_len <= max_len:
        raise ConfigError(
            f"overlong_buffer_len = {buffer_len} must lie between 1 and max_new_tokens = {max_len}, "
            "within which it is. Change one of the two."
        )
    excess_B = lengths_B.double() - (max_len - buffer_len)
    return (-factor * (excess_B / buffer_len).clamp(0, 1)).float()


def truncated_rows(segment: TextSegment, max_len: int | None) -> Tensor:
    """Which texts were cut off before they ended, bool [B].

    By the segment's status where it has one; otherwise a text of `max_len` tokens counts as cut off.
    Raises ContractError if neither is known.
    """
    if segment.status is not None:
        return segment.status == SegmentStatus.TRUNCATED
    if max_len is None:
        raise ContractError(
            "whether texts were cut off is unknown: their segment has no status, and the request no max_new_tokens. "
            "Give the request ARSamplingParams, or set truncated_reward to keep."
        )
    return segment.lengths >= max_len


@bounded("reward")
@dataclass(frozen=True)
class LengthShaping:
    """How the reward of a text depends on its length.

    truncated_reward: `zero`: a text that was cut off gets 0 (mind rewards that are negative when wrong: there 0 is a
    prize). `soft`: `overlong_penalty` is added to every reward. `keep`: nothing.
    buffer_len, factor: of `soft`; None means DEFAULT_BUFFER_LEN and 1.
    Raises ConfigError for an impossible value, and for a buffer or factor that the mode does not use.
    """

    truncated_reward: TruncatedReward = "zero"
    buffer_len: PositiveInt | None = None
    factor: Positive | None = None

    def __post_init__(self) -> None:
        named = {"overlong_buffer_len": self.buffer_len, "overlong_penalty_factor": self.factor}
        idle = {name: value for name, value in named.items() if value is not None}
        if idle and self.truncated_reward != "soft":
            raise ConfigError(
                f"{idle} does nothing where truncated_reward is {self.truncated_reward!r}. Set it to soft, or leave "
                "them out."
            )

    def __call__(self, rewards_B: Tensor, segment: TextSegment, max_len: int | None) -> Tensor:
        """Rewards after shaping, float32 [B]. A NaN, which is a sample that could not be scored, stays.

        max_len: max_new_tokens of the sampling, None where unknown. Raises ContractError for another number of texts,
        or if what the mode needs is unknown.
        """
        if self.truncated_reward == "keep":
            return rewards_B
        lengths_B = segment.lengths.to(rewards_B.device)
        if lengths_B.shape != rewards_B.shape:
            raise ContractError(f"{rewards_B.numel()} rewards cannot be shaped by {lengths_B.numel()} lengths of texts")
        if self.truncated_reward == "zero":
            is_cut_B = truncated_rows(segment, max_len).to(rewards_B.device)
            return torch.where(is_cut_B & rewards_B.isfinite(), 0.0, rewards_B)
        if max_len is None:
            raise ContractError("truncated_reward = soft needs max_new_tokens. Give the request ARSamplingParams.")
        return rewards_B + overlong_penalty(
            lengths_B,
            max_len=max_len,
            buffer_len=self.buffer_len if self.buffer_len is not None else DEFAULT_BUFFER_LEN,
            factor=self.factor if self.factor is not None else 1.0,
        )
