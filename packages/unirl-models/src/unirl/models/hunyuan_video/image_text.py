"""Text of HunyuanVideo from images: hidden states of Llava, which sees the first frame, and CLIP's pooled vector.

Equal to HunyuanVideoImageToVideoPipeline.encode_prompt of diffusers, but for the padding, which is left out. Shape
letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unirl.models.diffusers_pipeline.references import as_pil
from unirl.models.diffusers_pipeline.text import ragged
from unirl.models.extras import from_extra
from unirl.models.hunyuan_video.text import HIDDEN_STATE, HunyuanVideoTextEncoders
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ContractError, DataError

with from_extra("diffusers"):
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video import DEFAULT_PROMPT_TEMPLATE
    from transformers import CLIPImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

TEMPLATE = str(DEFAULT_PROMPT_TEMPLATE["template"])
TEMPLATE_TOKENS = int(DEFAULT_PROMPT_TEMPLATE["crop_start"])
"""Tokens of the template before the prompt, the image as one of them. A fixed number."""
IMAGE_TOKENS = int(DEFAULT_PROMPT_TEMPLATE["image_emb_len"])
"""Tokens that the image stands for."""
END_OF_HEADER = "<|end_header_id|>"
NUM_HEADERS = 3
"""In a whole text; one that was cut has lost the last."""
ANSWER_TOKENS = 4
"""Up to the last header's end: the request for an answer, which is left out."""


class HunyuanVideoImageTextEncoders(HunyuanVideoTextEncoders):
    """Ragged texts with a mask: some tokens of the image, the prompt, and what follows the request for an answer."""

    def __init__(
        self,
        encoders: Mapping[str, PreTrainedModel | None],
        tokenizers: Mapping[str, PreTrainedTokenizerBase | None],
        image_processor: CLIPImageProcessor,
    ) -> None:
        super().__init__(encoders, tokenizers)
        self.image_processor = image_processor
        self.fingerprint += f" {image_processor.to_dict()}"

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        del texts, max_sequence_length
        raise ContractError("the text encoder of HunyuanVideo from images needs an image with each text: encode_seen()")

    @torch.no_grad()
    def encode_seen(
        self, texts: Sequence[str], pictures: Sequence[Tensor], max_sequence_length: int, *, every: int
    ) -> TextEmbedCondition:
        """One row per text and its image [3, H, W] in [0, 1]; see `encode`.

        every: one of so many tokens of the image is kept. Raises DataError for a text with a mark of an image.
        """
        self.require_encoders(texts)
        rows = [
            self._read(text, picture, max_sequence_length, every) for text, picture in zip(texts, pictures, strict=True)
        ]
        return ragged(rows).replace(pooled=self.pooled(texts))

    def _read(self, text: str, picture: Tensor, max_sequence_length: int, every: int) -> Tensor:
        """[L, D] of one text, encoded alone so that nothing is padded."""
        encoder, tokenizer = self.encoders["text_encoder"], self.tokenizers["tokenizer"]
        ids = tokenizer(
            TEMPLATE.format(text), max_length=TEMPLATE_TOKENS + max_sequence_length, truncation=True
        ).input_ids
        mark = int(encoder.config.image_token_id)
        if ids.count(mark) != 1:
            raise DataError(f"the prompt {text!r} holds the mark of an image, {tokenizer.decode([mark])!r}. Remove it.")
        place = ids.index(mark)
        expanded = [*ids[:place], *[mark] * IMAGE_TOKENS, *ids[place + 1 :]]
        tokens = torch.tensor([expanded], device=encoder.device)
        pixels = self.image_processor(images=as_pil(picture), return_tensors="pt").pixel_values
        hidden = encoder.model(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            pixel_values=pixels.to(encoder.device, encoder.dtype),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states[HIDDEN_STATE][0]
        ends = [at for at, token in enumerate(ids) if token == tokenizer.convert_tokens_to_ids(END_OF_HEADER)]
        answer = 1 + (ends[-1] if len(ends) >= NUM_HEADERS else len(ids) - 1)
        image, words = hidden[place : place + IMAGE_TOKENS], hidden[IMAGE_TOKENS - 1 :]
        return torch.cat([image[::every], words[TEMPLATE_TOKENS : answer - ANSWER_TOKENS], words[answer:]])
