"""Which samples of a scored rollout go into training: best and worst of a group, groups that teach something.

Chosen from the rewards of the whole batch, before it is cut over devices, so the number of devices never matters.
Legend: B samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from unirl.algorithms.advantages import group_index, group_std
from unirl.types.batch import rows_by
from unirl.types.bounds import Bounds, bounded
from unirl.types.errors import ConfigError


@bounded("selection")
@dataclass(frozen=True)
class SampleSelection:
    """What is trained on, and whether uninformative groups are replaced by fresh ones.

    best_of: samples kept of each group, half of them the best and half the worst by advantage (DanceGRPO's best-of-n;
        2 makes the pairs of online DPO: the best, then the worst). None keeps all.
    best_of_children: the same of the samples that grew from each sample of an earlier stage, as the images of a text,
        after their parents have been credited with all of them.
    drop_zero_variance: leave out samples with advantage 0 (groups whose rewards are all equal). Some come back where
        the rest would not divide over devices and updates; they add nothing to the gradient but to the mean's divisor.
    dynamic_sampling: replace groups whose rewards are all equal by fresh prompts, until the batch is whole again
        (DAPO); the last refill's batch is trained as it is when `max_refills` are used up.
    """

    best_of: Annotated[int, Bounds(ge=2)] | None = None
    best_of_children: Annotated[int, Bounds(ge=2)] | None = None
    drop_zero_variance: bool = False
    dynamic_sampling: bool = False

    def __post_init__(self) -> None:
        for name, count in (("best_of", self.best_of), ("best_of_children", self.best_of_children)):
            if count is not None and count % 2:
                raise ConfigError(f"selection.{name} = {count} must be an even number of at least 2, or null")
        if self.dynamic_sampling and self.drop_zero_variance:
            raise ConfigError(
                "selection.dynamic_sampling replaces the groups that selection.drop_zero_variance leaves out. Set one."
            )

    def rows(self, advantages_B: Tensor, group_ids: Sequence[str], divisor: int) -> list[int] | None:
        """Indices of the samples to train on, None for all. `divisor`: their number is a multiple of it.

        With best_of the samples of a group are in order of falling advantage, groups in their own order; ties keep the
        order of the batch. Raises ConfigError if a group is smaller than best_of.
        """
        rows = list(range(len(group_ids)))
        if self.best_of is not None:
            rows = best_and_worst(advantages_B, group_ids, self.best_of)
        if self.drop_zero_variance:
            rows = _informative(advantages_B, rows, divisor)
        return None if rows == list(range(len(group_ids))) else rows

    def child_rows(self, advantages_B: Tensor, parent_ids: Sequence[str]) -> list[int] | None:
        """As `rows`, of a track whose samples grew from those of `parent_ids`; None for all."""
        if self.best_of_children is None:
            return None
        return best_and_worst(advantages_B, parent_ids, self.best_of_children, option="best_of_children")


def best_and_worst(advantages_B: Tensor, group_ids: Sequence[str], count: int, *, option: str = "best_of") -> list[int]:
    """The `count` / 2 best and the `count` / 2 worst samples of every group, in order of falling advantage.

    option: of `selection`, for the message of a group that is smaller (ConfigError).
    """
    chosen: list[int] = []
    for group, members in rows_by(group_ids).items():
        if len(members) < count:
            raise ConfigError(
                f"selection.{option} = {count}, but group {group} has {len(members)} samples. "
                f"Raise its samples_per_prompt or lower {option}."
            )
        ordered = sorted(members, key=lambda row: -float(advantages_B[row]))
        chosen += [*ordered[: count // 2], *ordered[len(ordered) - count // 2 :]]
    return chosen


def extremes(rewards_B: Tensor, group_ids: Sequence[str], count: int) -> list[int]:
    """The `count` / 2 samples of highest and of lowest reward in every group, in the order of the batch.

    Samples without a reward (NaN) are taken where a group has fewer than `count` others. Raises ConfigError as
    `best_and_worst`.
    """
    candidates: list[int] = []
    for members in rows_by(group_ids).values():
        scored = [row for row in members if not rewards_B[row].isnan()]
        others = [row for row in members if rewards_B[row].isnan()]
        candidates += [*scored, *others[: max(0, count - len(scored))]]
    chosen = best_and_worst(rewards_B[candidates].nan_to_num(), [group_ids[row] for row in candidates], count)
    return sorted(candidates[place] for place in chosen)


def rank_agreement(left_B: Tensor, right_B: Tensor, group_ids: Sequence[str]) -> float | None:
    """Spearman's correlation of two rewards of the samples of a group, mean over groups; ties share their mean rank.

    None where no group has two samples or more that differ in both. Groups with a NaN do not count.
    """
    found = []
    for members in rows_by(group_ids).values():
        ranks = [_mean_ranks(values[members]) for values in (left_B.double(), right_B.double())]
        if not any(rank.isnan().any() or rank.std(unbiased=False) == 0 for rank in ranks):
            found.append(float(torch.corrcoef(torch.stack(ranks))[0, 1]))
    return sum(found) / len(found) if found else None


def _mean_ranks(values: Tensor) -> Tensor:
    """Rank of each value, float64; NaN of all where one is NaN."""
    if values.isnan().any():
        return torch.full_like(values, torch.nan)
    below = (values[None, :] < values[:, None]).sum(1)
    equal = (values[None, :] == values[:, None]).sum(1)
    return below + (equal - 1) / 2


def zero_variance_groups(rewards_B: Tensor, group_ids: Sequence[str]) -> set[str]:
    """Groups whose rewards are all equal: they have no advantage."""
    std = group_std(rewards_B.to(torch.float64), group_index(group_ids), 0)
    return {group for group, spread in zip(group_ids, std.tolist(), strict=True) if spread == 0}


def _informative(advantages_B: Tensor, rows: list[int], divisor: int) -> list[int]:
    is_needed = {row: float(advantages_B[row]) != 0 for row in rows}
    num_spare = -sum(is_needed.values()) % divisor
    if not any(is_needed.values()):
        return rows
    for row in rows:
        if not is_needed[row] and num_spare > 0:
            is_needed[row] = True
            num_spare -= 1
    kept = [row for row in rows if is_needed[row]]
    return kept if len(kept) % divisor == 0 else rows
