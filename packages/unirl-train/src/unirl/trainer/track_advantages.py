"""Advantages of the tracks of a batch: from rewards into the tracks, what is reported of them, and their state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unirl.algorithms.advantages import Advantages, group_metrics
from unirl.algorithms.inherited import InheritedAdvantages
from unirl.algorithms.routed_advantages import RoutedAdvantages, mean_over_media
from unirl.distributed.held import Held
from unirl.train.names import joined
from unirl.trainer.roles import StackRole
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.segments import TextSegment


class TrackAdvantages:
    """What turns the rewards of each track into advantages. own: used instead of `advantages` for the named tracks."""

    def __init__(self, stack: StackRole, advantages: Advantages, own: Mapping[str, Advantages]) -> None:
        self._stack = stack
        self._advantages = advantages
        self._own = own

    def attach(self, resp: Held, root: str, progress: float) -> None:
        """Compute advantages over the whole batch for every trained track, and for the root, which selection uses."""
        meta = resp.meta
        advantages: dict[str, Tensor] = {}
        for name in dict.fromkeys((root, *self._stack.trained_tracks())):
            track, normalize = meta.track(name), self._own.get(name, self._advantages)
            parent = track.parent_track
            if isinstance(normalize, InheritedAdvantages) and parent in advantages:
                advantages[name] = normalize.of_parents(track, meta.track(parent), advantages[parent])
            elif isinstance(normalize, RoutedAdvantages):
                routed = normalize.by_medium(track.group_ids, track.component_rewards, progress=progress)
                advantages[name] = mean_over_media(routed)
                resp.attach(name, media_advantages=routed)
            else:
                advantages[name] = normalize(
                    track.scored_rewards,
                    track.group_ids,
                    track.component_rewards,
                    progress=progress,
                    num_tokens_B=trained_tokens(resp, name) if normalize.counts_tokens else None,
                )
            resp.attach(name, advantages=advantages[name])

    def metrics(self, meta: RolloutResp, root: str, progress: float) -> dict[str, float]:
        """Metrics of rewards and advantages, which the tracks have, and of the engine's counts."""
        trained = self._stack.trained_tracks()
        return {
            **reward_metrics(meta.track(root)),
            **joined({name: reward_metrics(meta.track(name)) for name in trained if name != root}),
            **advantage_metrics({name: meta.track(name).known_advantages for name in trained}),
            **self._advantages.metrics(progress),
            **joined({name: own.metrics(progress) for name, own in self._own.items()}),
            **joined({name: count_metrics(track) for name, track in meta.tracks.items()}),
        }

    def state_dict(self) -> dict[str, Any]:
        """What the advantages have learnt of earlier batches, those of single tracks apart."""
        own = {track: each.state_dict() for track, each in self._own.items()}
        return {"advantages": self._advantages.state_dict(), **({"track_advantages": own} if own else {})}

    def load_state_dict(self, state: Mapping[str, Any], *, changed: set[str]) -> None:
        """Restore `state_dict`, but not where rewards or the advantages are among what has `changed`."""
        if not changed & {"reward", "advantages"}:
            self._advantages.load_state_dict(state["advantages"])
        if not changed & {"reward", "track_advantages"}:
            for track, each in self._own.items():
                each.load_state_dict(state["track_advantages"][track])


def trained_tokens(resp: Held, track: str) -> Tensor:
    """Trained tokens of each sample of a track, int64 [B]; 1 for samples that are not texts."""
    return torch.tensor([count for part in resp.map(_count_trained, track) for count in part], dtype=torch.int64)


def _count_trained(resp: RolloutResp, track: str) -> list[int]:
    """Runs in the workers that hold the response."""
    segment = resp.tracks[track].segment
    if not isinstance(segment, TextSegment):
        return [1] * resp.tracks[track].batch_size
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), segment.trained.cpu().cumsum(0)])
    return ends[segment.cu_seqlens].diff().tolist()


def reward_metrics(track: RolloutTrack) -> dict[str, float]:
    """Metrics of a track's rewards: over all samples, by component, and within groups."""
    rewards = track.scored_rewards
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(unbiased=False)),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
    }
    for name, values in track.component_rewards.items():
        metrics[f"reward/{name}/mean"] = float(values.mean())
        metrics[f"reward/{name}/std"] = float(values.std(unbiased=False))
    return {**metrics, **group_metrics(rewards, track.group_ids)}


def count_metrics(track: RolloutTrack) -> dict[str, float]:
    """Means of the engine's per-sample counts of a track."""
    return {f"rollout/{name}": float(values.double().mean()) for name, values in track.counts.items()}


def advantage_metrics(advantages: Mapping[str, Tensor]) -> dict[str, float]:
    """Mean and size of the advantages [B] of each trained track, prefixed by its name if there are several."""
    return {
        f"{name}/{key}" if len(advantages) > 1 else key: value
        for name, values in advantages.items()
        for key, value in (
            ("advantage/mean", float(values.mean())),
            ("advantage/abs_mean", float(values.abs().mean())),
            ("advantage/max", float(values.abs().max())),
        )
    }
