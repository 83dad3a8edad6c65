"""Janus as the pipeline that recipes name."""

from __future__ import annotations

from unirl.models.janus.adapter import JanusAdapter
from unirl.models.janus.bundle import JanusBundle
from unirl.models.text_pipeline import AutoregressivePipeline
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.media import Images
from unirl.types.segments import TextSegment


@bounded("pipeline")
class JanusPipeline(AutoregressivePipeline):
    """Images that are drawn token by token, see `unirl.models.text_pipeline.AutoregressivePipeline`.

    With `sampling.guidance_scale` above 1 both rollout and replay run the model on each prompt and an empty one, and
    log-probs are of the guided distribution, which tokens are drawn from.
    decode_batch_size: see `JanusAdapter`. packed: see the base.
    Implements `unirl.types.protocols.models.ImageTokenPipeline`.
    """

    adapter: JanusAdapter

    def __init__(self, bundle: JanusBundle, *, decode_batch_size: PositiveInt = 16, packed: bool | None = None) -> None:
        super().__init__(JanusAdapter(bundle, decode_batch_size=decode_batch_size), packed=packed)

    @property
    def sample_length(self) -> int:
        """Tokens of each image."""
        return self.adapter.sample_length

    def images(self, segment: TextSegment) -> Images:
        """The image of each sample, see `JanusAdapter.images`."""
        return self.adapter.images(segment)
