"""Rollouts of a unified model: it thinks of each prompt in words, then draws from prompt and thought."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from unirl.rollout.engine.composed.stages import Size, TwoStageEngine, decoded_texts
from unirl.rollout.engine.trainside.engine import MediaBits, TrainsideRolloutEngine
from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.copies import copies_of
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Primitive, Texts
from unirl.types.protocols.engines import DiffusionRolloutEngine, TextRolloutEngine
from unirl.types.protocols.models import DiffusionPipeline, ThoughtPipeline
from unirl.types.protocols.training import ShardedPolicyStore
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import DiffusionPlan, RolloutReq, RolloutTrack
from unirl.types.sampling import ComposedSamplingParams, DiffusionSamplingParams
from unirl.types.segments import TextSegment

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

    Where the thoughts choose the size of their image (`ThoughtPipeline.image_sizes`), each image has its
    thought's: the track holds `SizedLatents` and `SizedImages`. A thought that ended before it chose is drawn at the
    height and width of the request.
    Counted of every thought: `empty`, 1 where the model wrote nothing; and `no_size`, 1 where it was to choose a size
    and did not.
    """

    def __init__(
        self,
        writer: TextRolloutEngine,
        painter: DiffusionRolloutEngine,
        painting: DiffusionPipeline,
        writing: ThoughtPipeline,
    ) -> None:
        super().__init__(writer, painter, painting)
        self._writing = writing

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def plan(self, params: ComposedSamplingParams | DiffusionSamplingParams) -> DiffusionPlan:
        """See `TwoStageEngine.plan`. Raises ConfigError where noise levels depend on a size that thoughts choose."""
        plan = super().plan(params)
        if isinstance(params, ComposedSamplingParams):
            for height, width in self._writing.image_sizes:
                sized = dataclasses.replace(params.diffusion, height=height, width=width)
                if not torch.equal(self._painting.sigmas(sized), plan.sigmas):
                    raise ConfigError(
                        f"thoughts choose the size of their image, and the noise levels of {height} x {width} pixels "
                        f"are not those of {params.diffusion.height} x {params.diffusion.width}, while a rollout has "
                        "one schedule. Set pipelines.text.chooses_size: false, or a schedule that does not depend on "
                        "the resolution."
                    )
        return plan

    def _sizes(self, written: RolloutTrack, params: DiffusionSamplingParams) -> list[Size] | None:
        """Those that the thoughts chose, else those of `params`; None where thoughts choose none."""
        if not self._writing.image_sizes:
            return None
        return [size or (params.height, params.width) for size in self._writing.chosen_sizes(_tokens_of(written))]

    def _writer_reads(self, req: RolloutReq) -> dict[str, Primitive]:
        """All that was asked for."""
        return dict(req.primitives)

    def _painter_reads(self, written: RolloutTrack, req: RolloutReq) -> tuple[RolloutTrack, dict[str, Primitive]]:
        """What was asked for, and the thoughts."""
        thoughts = decoded_texts(written)
        counts = {"empty": torch.tensor([float(not thought) for thought in thoughts])}
        if self._writing.image_sizes:
            chosen = self._writing.chosen_sizes(_tokens_of(written))
            counts["no_size"] = torch.tensor([float(size is None) for size in chosen])
        return written.replace(counts=counts), {**req.primitives, THOUGHT: Texts(texts=list(thoughts))}


def _tokens_of(written: RolloutTrack) -> TextSegment:
    if not isinstance(written.segment, TextSegment):
        raise ContractError(f"the writer's track holds {type(written.segment).__name__}, not tokens")
    return written.segment


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
        super().__init__(writer, painter, own[image], own[text])
        self._tracks = text, image

    def _copies(self, policy: str | None) -> tuple[str | None, str | None]:
        """By track, or of both."""
        if policy is None or "/" not in policy:
            return policy, policy
        copies, (text, image) = copies_of(policy), self._tracks
        return copies.get(text), copies.get(image)
