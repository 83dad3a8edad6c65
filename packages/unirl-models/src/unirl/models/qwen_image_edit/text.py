"""Text of Qwen-Image-Edit: the last hidden state of Qwen2.5-VL, which sees the images that the instruction is about.

Equal to encode_prompt of diffusers' QwenImageEditPipeline and QwenImageEditPlusPipeline. Shape letters: see
`unirl.models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from unirl.models.diffusers_pipeline.text import TextEncoders, ragged
from unirl.models.extras import from_extra
from unirl.models.qwen_vl.images import expanded, vision_patches
from unirl.types.conditions import TextEmbedCondition

with from_extra("diffusers"):
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SYSTEM_PROMPT = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate."
)
TEMPLATE = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"
TEMPLATE_TOKENS = 64
"""Tokens of the template before the images, which are cut off. A fixed number, as in the published pipelines."""


class QwenImageEditTextEncoders(TextEncoders):
    """Ragged texts with a mask: images, instruction, and the template's end.

    picture_mark: stands for each image before the instruction, `{}` for its number, from 1.
    """

    def __init__(
        self,
        encoders: Mapping[str, PreTrainedModel | None],
        tokenizers: Mapping[str, PreTrainedTokenizerBase | None],
        image_processor: Qwen2VLImageProcessorPil,
        picture_mark: str,
    ) -> None:
        super().__init__(encoders, tokenizers)
        self.image_processor = image_processor
        self.picture_mark = picture_mark
        self.fingerprint += f" {image_processor.to_dict()} {picture_mark}"

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        del max_sequence_length  # the published pipelines never cut a text
        return self._read(texts, [[]] * len(texts))

    @torch.no_grad()
    def encode_seen(self, texts: Sequence[str], pictures: Sequence[Sequence[Tensor]]) -> TextEmbedCondition:
        """One row per instruction and its images [3, H, W] in [0, 1]; see `encode`."""
        self.require_encoders(texts)
        return self._read(texts, pictures)

    def _read(self, texts: Sequence[str], pictures: Sequence[Sequence[Tensor]]) -> TextEmbedCondition:
        encoder, tokenizer = self.encoders["text_encoder"], self.tokenizers["tokenizer"]
        placeholder = int(encoder.config.image_token_id)
        merged = int(encoder.config.vision_config.spatial_merge_size) ** 2
        inputs = []
        for text, sample in zip(texts, pictures, strict=True):
            marks = "".join(self.picture_mark.format(number) for number in range(1, len(sample) + 1))
            seen = [vision_patches(self.image_processor, picture) for picture in sample]
            grids = tuple(grid for _, grid in seen)
            tokens = expanded(tokenizer(TEMPLATE.format(marks + text))["input_ids"], grids, placeholder, merged)
            inputs.append((tokens, grids, [patches for patches, _ in seen]))
        hidden: list[Tensor] = []
        # A call each for neighbours of one shape, so that nothing is padded and a row does not depend on the others.
        for _, group in groupby(inputs, key=lambda each: (len(each[0]), each[1])):
            rows = list(group)
            ids = torch.tensor([tokens for tokens, _, _ in rows], device=encoder.device)
            beside: dict[str, Tensor] = {}
            if rows[0][1]:
                patches = torch.cat([each for _, _, sample in rows for each in sample])
                beside["pixel_values"] = patches.to(encoder.device, encoder.dtype)
                beside["image_grid_thw"] = torch.tensor(
                    [grid for _, grids, _ in rows for grid in grids], device=encoder.device
                )
            # As the published pipelines call it: positions count tokens, those of images like the others.
            states = encoder.model(input_ids=ids, attention_mask=torch.ones_like(ids), **beside).last_hidden_state
            hidden += list(states[:, TEMPLATE_TOKENS:])
        return ragged(hidden)
