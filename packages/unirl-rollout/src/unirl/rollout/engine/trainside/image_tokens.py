"""Direct sampling of images that are drawn token by token. No weights move."""

from __future__ import annotations

from typing import ClassVar

from unirl.rollout.engine.base import MediaBits
from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.rollout.text_checks import verify_finished
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.media import Images
from unirl.types.protocols.models import ImageTokenPipeline
from unirl.types.protocols.training import ShardedPolicyStore
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment


@bounded("engine")
class TrainsideImageTokenEngine(TrainsideTextEngine):
    """Samples images with the pipeline that trains. The track has tokens as segment, and images for scorers.

    forward_batch_size: images drawn together, with guidance as many empty prompts besides; the memory knob of the
        rollout (their KV cache). Results depend on it only by rounding.
    media_bits: of the images, see `MediaBits`. policies, dump_dir: see `TrainsideTextEngine`.
    """

    draws_by_tokens: ClassVar[bool] = True
    _pipeline: ImageTokenPipeline

    def __init__(
        self,
        pipeline: ImageTokenPipeline,
        policies: ShardedPolicyStore | None = None,
        *,
        forward_batch_size: PositiveInt,
        rank: int = 0,
        media_bits: MediaBits = 32,
        dump_dir: str | None = None,
        track: str = "image",
    ) -> None:
        super().__init__(
            pipeline, policies, forward_batch_size=forward_batch_size, rank=rank, dump_dir=dump_dir, track=track
        )
        self._media_bits = media_bits

    def _verify(self, segment: TextSegment, params: ARSamplingParams) -> None:
        verify_finished(segment, params, (), self._pipeline.sample_length)

    def _decoded(self, segment: TextSegment) -> Images:
        images = self._pipeline.images(segment)
        return images.in_bytes() if self._media_bits == 8 else images
