"""Which policies made the samples of a call."""

from __future__ import annotations

import torch

from unirl.types.rollout import RolloutTrack
from unirl.types.segments import LatentSegment, TextSegment


def mark_versions(track: RolloutTrack, version: int) -> RolloutTrack:
    """The track of a call with policy `version`, with the policies that began and ended each sample, and which samples
    can be continued."""
    segment = track.segment
    track.policy_versions = torch.full((track.batch_size,), version, dtype=torch.long)
    if isinstance(segment, (TextSegment, LatentSegment)):
        ends = segment.ends_by_version(version)
        if ends is not None:
            track.policy_versions, track.last_versions = ends
        track.is_unfinished = segment.is_cut
    return track
