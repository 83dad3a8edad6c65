"""How Janus reads a prompt, and makes an image of codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.janus.bundle import JanusBundle
from unirl.models.text_adapter import TextAdapter
from unirl.types.bounds import PositiveInt
from unirl.types.conditions import Condition, PromptCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Images, Primitive, Texts
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment


class JanusAdapter(TextAdapter):
    """A prompt is one user's message in the chat template, the begin of the answer, and the begin of an image.

    The tokens of a segment are codes of an image, row by row, numbered from 0.
    decode_batch_size: images decoded together.
    """

    bundle: JanusBundle

    def __init__(self, bundle: JanusBundle, *, decode_batch_size: PositiveInt = 16) -> None:
        super().__init__(bundle, chat_template=True)
        self._decode_batch_size = decode_batch_size

    @property
    def sample_length(self) -> int:
        """Codes of an image."""
        return self.bundle.tokens_per_image

    def stop_token_ids(self, params: ARSamplingParams) -> tuple[int, ...]:
        """None: an image ends with its last code. Raises ConfigError if `params` has some."""
        if params.stop_token_ids:
            raise ConfigError(
                f"sampling.stop_token_ids = {list(params.stop_token_ids)} would end an image early. Set it to []."
            )
        return ()

    def encode(self, primitives: Mapping[str, Primitive], params: ARSamplingParams) -> dict[str, Condition]:
        """As the base. Raises ConfigError if max_new_tokens are not the codes of an image."""
        if params.max_new_tokens != self.sample_length:
            raise ConfigError(
                f"sampling.max_new_tokens = {params.max_new_tokens}, but an image of {self.bundle.pretrained_model} "
                f"has {self.sample_length} tokens. Set it to {self.sample_length}."
            )
        return super().encode(primitives, params)

    def prompt_tokens(self, text: str) -> list[int]:
        """Tokens of one prompt, as the processor of transformers makes them for `generation_mode="image"`."""
        # Any: the library declares contents of text alone.
        message: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": text}]}
        # The template writes no special tokens, so that the tokenizer adds the first one.
        rendered = self.bundle.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return [*self.bundle.tokenizer(rendered)["input_ids"], self.bundle.image_token]

    def as_written(self, tokens: Tensor) -> Tensor:
        """Codes by the numbers that the model reads them by."""
        return tokens + self.bundle.model.first_code

    def as_read(self, conditions: Conditions, completions: Sequence[Tensor]) -> list[Tensor]:
        """Codes by the numbers that the model reads them by."""
        return [self.as_written(each) for each in completions]

    def with_empty(self, conditions: Conditions) -> Conditions:
        """An empty prompt is as long as its prompt, padding in place of all but its first token and the begin of the
        image; the padding is read. Source: transformers, `JanusForConditionalGeneration.generate`."""
        prompts = require_condition(conditions, "prompt", PromptCondition).unpack("tokens")
        kept = torch.tensor([self.bundle.first_token, self.bundle.image_token], device=prompts[0].device)
        empty = [prompt.masked_fill(~torch.isin(prompt, kept), self.bundle.empty_token) for prompt in prompts]
        return {"prompt": PromptCondition.pack(tokens=[*prompts, *empty])}

    def decode(self, segment: TextSegment) -> Texts:
        """The numbers of the codes."""
        return Texts(texts=[" ".join(map(str, codes.tolist())) for codes in segment.unpack("tokens")])

    @torch.no_grad()
    def images(self, segment: TextSegment) -> Images:
        """The images, float32 [B, 3, H, W] in [0, 1]."""
        codes = torch.stack(segment.unpack("tokens")).split(self._decode_batch_size)
        pixels = torch.cat([self.bundle.model(drawn=part).float() for part in codes])
        return Images(pixels=(pixels / 2 + 0.5).clamp(0, 1))
