"""Rollouts of a unified model: it thinks of each prompt in words, then draws from prompt and thought."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from unirl.rollout.engine.composed.stages import TwoStageEngine, decoded_texts
from unirl.rollout.engine.trainside.engine import MediaBits, TrainsideRolloutEngine
from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.copies import copies_of
from unirl.types.errors import ConfigError
from unirl.types.media import Primitive, Texts
from unirl.types.protocols import ShardedPolicyStore
from unirl.types.rollout import RolloutReq, RolloutTrack

THOUGHT = "thought"
"""Slot of the painter's inputs that holds what the model wrote."""


def only_policy(
    pipelines: Mapping[str, Mapping[str, Any]], tracks: tuple[str, str], engine: str
) -> tuple[str, Mapping[str, Any]]:
    """Name and pipelines of the one policy of a run. Raises ConfigError for several, or without these tracks."""
    if len(pipelines) != 1:
        raise ConfigError(
            f"{engine} samples one policy, this recipe has {', '.join(pipelines)}. Take "
            "unirl.rollout.engine.composed.engine.ComposedEngine for several."
        )
    ((policy, own),) = pipelines.items()
    missing = [name for name in tracks if name not in own]
    if missing:
        raise ConfigError(f"pipelines lacks {', '.join(missing)}; it has {', '.join(own)}. Add what is missing.")
    return policy, own


class ThinkingEngine(TwoStageEngine):
    """Both stages are of one model, see `TwoStageEngine`: an image is drawn from all that was asked for and from its
    thought, as it was written; the thought is the slot "thought" of the image track.

    Counted of every thought: `empty`, 1 where the model wrote nothing.
    """

    def _writer_reads(self, req: RolloutReq) -> dict[str, Primitive]:
        """All that was asked for."""
        return dict(req.primitives)

    def _painter_reads(self, written: RolloutTrack, req: RolloutReq) -> tuple[RolloutTrack, dict[str, Primitive]]:
        """What was asked for, and the thoughts."""
        thoughts = decoded_texts(written)
        counts = {"empty": torch.tensor([float(not thought) for thought in thoughts])}
        return written.replace(counts=counts), {**req.primitives, THOUGHT: Texts(texts=list(thoughts))}


@bounded("engine")
class UnifiedEngine(ThinkingEngine):
    """Samples with the pipelines of one policy that trains, "text" and "image", see `ThinkingEngine`.

    No weights move. Where the tracks' algorithms sample from different copies of the policy, they are named by track,
    as in `unirl.types.copies`; a copy named alone is that of both.

    text_batch_size, forward_batch_size: thoughts written together, images denoised together; the memory knobs of the
        rollout. See `TrainsideTextEngine` and `TrainsideRolloutEngine`.
    tracks: names of the tracks of thoughts and images, which are those of the pipelines.
    media_bits, decode: of images, see `TrainsideRolloutEngine`.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.unified.rules"
    has_trainer_logp: ClassVar[bool] = True
    takes_media: ClassVar[bool] = True
    takes_copies_by_track: ClassVar[bool] = True

    def __init__(
        self,
        pipelines: Mapping[str, Mapping[str, Any]],  # Any: pipelines of the recipe
        stores: Mapping[str, ShardedPolicyStore],
        *,
        text_batch_size: PositiveInt,
        forward_batch_size: PositiveInt,
        device: str = "cpu",
        rank: int = 0,
        media_bits: MediaBits = 32,
        decode: bool = True,
        tracks: tuple[str, str] = ("text", "image"),
    ) -> None:
        policy, own = only_policy(pipelines, tracks, type(self).__name__)
        text, image = tracks
        store = stores[policy]
        writer = TrainsideTextEngine(own[text], store, forward_batch_size=text_batch_size, rank=rank, track=text)
        painter = TrainsideRolloutEngine(
            own[image],
            store,
            forward_batch_size=forward_batch_size,
            device=device,
            rank=rank,
            media_bits=media_bits,
            decode=decode,
            track=image,
        )
        super().__init__(writer, painter, own[image])
        self._tracks = text, image

    def _copies(self, policy: str | None) -> tuple[str | None, str | None]:
        """By track, or of both."""
        if policy is None or "/" not in policy:
            return policy, policy
        copies, (text, image) = copies_of(policy), self._tracks
        return copies.get(text), copies.get(image)
