"""HPSv3: how much people like an image for a prompt, as a Qwen2-VL-7B with a reward head sees it.

Legend: b samples, C H W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from unirl.reward.base import LocalScorer
from unirl.reward.card import Normalisation, ScorerCard
from unirl.reward.local.pixels import check_pixels, to_pictures
from unirl.reward.local.preprocess import as_pil_resizes
from unirl.reward.local.pretrained import check_dtype, check_source, load_state
from unirl.reward.local.vision_language.qwen_vl import QwenVLReader
from unirl.reward.local.vision_language.reward_head import PROMPT, load_reward_model, read_instruction
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.precision import DTYPES
from unirl.types.reward import RewardRequest

REWARD_TOKEN = "<|Reward|>"
NUM_PIXELS = 256 * 28 * 28
"""Every image is resized to about this area, keeping its shape."""


@bounded("scorer")
class HPSv3Scorer(LocalScorer):
    """mu of the score that people would give, about -10 to 15; / 15 where `normalise`. Components mu and sigma.

    instruction_file: the text that the model was trained to read after the image: the published INSTRUCTION and
    prompt_with_special_token joined (hpsv3/dataset/data_collator_qwen.py of MizzenAI/HPSv3), with {text_prompt} for the
    prompt. Another wording gives other numbers, so there is no default.
    model: folder or hub id with `file`, the published weights. base: folder or hub id of Qwen2-VL-7B-Instruct, for
    configuration, tokenizer and image processor.
    dtype: of the backbone, "bf16" as published, "fp32" or "fp16"; the head runs in fp32.
    min_pixels, max_pixels: of the resized image, published equal.
    The head reads the token <|Reward|> and gives mu and log sigma; only mu is rewarded. Layout of weights, head,
    positions and preprocessing follow the public code of HPSv3 and of its ports; the published weights were not at
    hand, so the layout is checked on random weights only. With gradients the image is resized in torch, within 1.5
    bytes per pixel of PIL.
    Raises ConfigError if weights cannot be loaded or do not fit, ImportError without transformers. Extra `clip`.
    Source: HPSv3 (arXiv 2508.03789).
    """

    is_differentiable: ClassVar[bool] = True
    model_billions = 7.746
    card = ScorerCard(
        name="hpsv3",
        summary="how much people like an image for a prompt, by a vision-language model with a reward head",
        media=("image",),
        needs="prompt",
        typical="-10 to 15",
        normalisation=Normalisation(15, is_default=True),
        extra="clip",
        source="HPSv3, arXiv 2508.03789",
    )

    def __init__(
        self,
        *,
        instruction_file: str,
        model: str = "MizzenAI/HPSv3",
        file: str = "HPSv3.safetensors",
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        normalise: bool = True,
        dtype: str = "bf16",
        min_pixels: PositiveInt = NUM_PIXELS,
        max_pixels: PositiveInt = NUM_PIXELS,
        device: str = "cpu",
        name: str = "hpsv3",
        batch_size: PositiveInt = 4,
    ) -> None:
        weights = {"mu": 1.0, "sigma": 0.0}
        super().__init__(
            name=name, batch_size=batch_size, device=device, component_weights=weights, normalise=normalise
        )
        owner = f"scorer {name}"
        check_dtype(dtype, name)
        self._instruction = read_instruction(instruction_file, [REWARD_TOKEN], owner)
        check_source(model, f"{owner}: model")
        self._reader = QwenVLReader(base, owner, min_pixels=min_pixels, max_pixels=max_pixels, tokens=[REWARD_TOKEN])
        self._model = load_reward_model(
            load_state(model, file, f"{owner}: model"),
            base=base,
            tokens=[self._reader.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)],
            num_words=len(self._reader.tokenizer),
            dtype=DTYPES[dtype],
            option=f"{owner}: model = {model!r}",
        ).to(device)
        self._pixel_range = (min_pixels, max_pixels)
        outputs = list(self._model.head.parameters())[-1].shape[0]
        if outputs != 2:
            raise ConfigError(f"{owner}: the head of model {model!r} has {outputs} outputs, expected mu and log sigma")

    def modules(self) -> list[nn.Module]:
        """The model with its head."""
        return [self._model]

    def score_batch(self, request: RewardRequest) -> dict[str, Tensor]:
        """mu and sigma, float32 [b]."""
        pixels, grids = self._reader.pixels(to_pictures(request.pixels))
        return self._scores(request.prompts, pixels, grids)

    def score_batch_with_gradient(self, request: RewardRequest) -> dict[str, Tensor]:
        """mu and sigma [b] with gradients to the pixels."""
        check_pixels(request.pixels)
        size = self._reader.resized_hw(*request.pixels.shape[-2:], *self._pixel_range)
        fitted = request.pixels if size == request.pixels.shape[-2:] else as_pil_resizes(request.pixels, size)
        found = [self._reader.patches(picture) for picture in fitted.split(1)]
        return self._scores(
            request.prompts, torch.cat([pixels for pixels, _ in found]), torch.cat([grid for _, grid in found])
        )

    def _scores(self, prompts: Sequence[str], pixels: Tensor, grids: Tensor) -> dict[str, Tensor]:
        for prompt in prompts:
            self._reader.check_text(prompt)
        chats = [self._reader.chat(self._instruction.replace(PROMPT, prompt), num_pictures=1) for prompt in prompts]
        inputs = self._reader.tokens(chats, grids, padding_side="right")
        inputs |= {"pixel_values": pixels.to(self._model.backbone.dtype), "image_grid_thw": grids}
        found_bO = self._model({key: value.to(self.device) for key, value in inputs.items()})[:, 0]
        return {"mu": found_bO[:, 0], "sigma": found_bO[:, 1].exp()}
