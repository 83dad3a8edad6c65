"""Text of FLUX.2 Klein: Qwen3, see `unirl.models.flux2.text`."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.models.diffusers_pipeline.text import user_turns
from unirl.models.flux2.text import LayersOfTextEncoder
from unirl.types.conditions import TextEmbedCondition


class Flux2KleinTextEncoders(LayersOfTextEncoder):
    """The prompt as the turn of a user, up to where an answer without thinking begins."""

    read_layers = (9, 18, 27)
    family = "FLUX.2 Klein"
    pipeline_class = "Flux2KleinPipeline"

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        turns = user_turns(self.tokenizers["tokenizer"], texts, enable_thinking=False)
        return self.read(self.encoders["text_encoder"].model, turns, max_sequence_length)
