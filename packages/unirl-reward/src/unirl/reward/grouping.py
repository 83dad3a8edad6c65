"""Groups of samples of one prompt: what scorers that compare them are asked at a time, and groups with a failed sample.

A group need not lie in one piece. Legend: B samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from unirl.reward.compose import failed_groups
from unirl.types.batch import rows_by
from unirl.types.protocols.rewards import GroupwiseScorer, Scorer


def compares_groups(scorer: Scorer) -> bool:
    """True if a sample's score depends on the others of its group."""
    return isinstance(scorer, GroupwiseScorer) and scorer.is_groupwise


def whole_groups(group_ids: Sequence[str], most: int) -> list[list[int]]:
    """Rows in parts of whole groups, groups in order of appearance: as many as fit into `most` samples, one at least.

    Each part but the last stays as it is when more groups follow, or more samples of the last group.
    """
    parts: list[list[int]] = []
    for rows in rows_by(group_ids).values():
        if parts and len(parts[-1]) + len(rows) <= most:
            parts[-1] += rows
        else:
            parts.append(list(rows))
    return parts


def fail_groups(sample_ids: Sequence[str], group_ids: Sequence[str], errors: list[str | None], what: str) -> int:
    """Give every sample of a failed group an error. Changes `errors` in place; returns how many groups failed.

    what: what a group with a failed sample is, as in "group g is dropped because sample s failed".
    """
    groups = failed_groups([error is None for error in errors], group_ids)
    culprits: dict[str, str] = {}
    for name, group, error in zip(sample_ids, group_ids, errors, strict=True):
        if error is not None:
            culprits.setdefault(group, name)
    for row, group in enumerate(group_ids):
        if group in culprits and errors[row] is None:
            errors[row] = f"group {group} {what} because sample {culprits[group]} failed"
    return len(groups)
