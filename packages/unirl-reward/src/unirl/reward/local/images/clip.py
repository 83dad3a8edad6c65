"""CLIP score: how well an image fits its prompt, as a CLIP model sees it.

Legend: b samples, u distinct prompts among them, D embedding.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unirl.reward.base import LocalScorer
from unirl.reward.card import Normalisation, ScorerCard
from unirl.reward.local.pixels import check_pixels, to_pictures
from unirl.reward.local.preprocess import CropPreprocessing, at_least_float32
from unirl.reward.local.pretrained import (
    check_dtype,
    check_source,
    load_complete,
    load_transformers,
    on_one_line,
)
from unirl.types.bounds import PositiveInt
from unirl.types.errors import ConfigError
from unirl.types.precision import DTYPES
from unirl.types.reward import RewardRequest


class CLIPModelScorer(LocalScorer):
    """scale * cos(image, prompt) of a CLIP model; subclasses say how an image is prepared.

    model: a transformers CLIPModel, whose two towers run in `dtype` and never train; normalisation and product run in
    fp32, because a logit of 25 in bf16 moves in steps of 0.125. tokenizer: of its prompts, which are cut to the model's
    context, as CLIP does. scale: of the cosine.
    """

    is_differentiable: ClassVar[bool] = True

    def __init__(
        self,
        *,
        model: Any,  # Any: transformers is optional
        tokenizer: Any,
        scale: float,
        dtype: str,
        device: str,
        name: str,
        batch_size: PositiveInt,
        normalise: bool = False,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size, device=device, normalise=normalise)
        self._model = model.to(device=device, dtype=DTYPES[dtype]).eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self._scale = scale

    @abstractmethod
    def model_input(self, pixels_bCHW: Tensor) -> Tensor:
        """The model's input [b, 3, side, side] as published: from the bytes of the images, without gradient."""

    @abstractmethod
    def model_input_with_gradient(self, pixels_bCHW: Tensor) -> Tensor:
        """The same by torch operations on the float pixels."""

    def modules(self) -> list[nn.Module]:
        """The CLIP model."""
        return [self._model]

    def score_batch(self, request: RewardRequest) -> Tensor:
        """scale * cosine, float32 [b]."""
        return self._scores(request.prompts, self.model_input(request.pixels))

    def score_batch_with_gradient(self, request: RewardRequest) -> Tensor:
        """scale * cosine [b] with gradients to the pixels."""
        check_pixels(request.pixels)
        return self._scores(request.prompts, self.model_input_with_gradient(request.pixels))

    def _scores(self, prompts: list[str], input_bCHW: Tensor) -> Tensor:
        distinct = list(dict.fromkeys(prompts))
        text_uD = self._embedded_texts(distinct)
        found = self._model.get_image_features(pixel_values=input_bCHW.to(self.device, self._model.dtype))
        image_bD = nn.functional.normalize(at_least_float32(found.pooler_output), dim=-1)
        order = torch.tensor([distinct.index(prompt) for prompt in prompts], device=text_uD.device)
        return self._scale * (image_bD * text_uD[order]).sum(dim=-1)

    def _embedded_texts(self, prompts: list[str]) -> Tensor:
        # Padded to the full context, so that a prompt's embedding does not depend on its neighbours.
        tokens = self._tokenizer(
            prompts,
            padding="max_length",
            truncation=True,
            max_length=self._model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(self.device)
        found = self._model.get_text_features(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        return nn.functional.normalize(at_least_float32(found.pooler_output), dim=-1)


class CLIPRewardScorer(CLIPModelScorer):
    """exp(logit_scale) * cos(image, prompt), / 30 where `normalise`.

    model: folder or hub id of a CLIP model. processor: folder or hub id of its tokenizer and image processor, the
    model's own where None. Needs the extra `clip`.
    normalise: the division by 30 brings the logits of CLIP ViT-L/14, about 15 to 35, near 1.
    dtype: of the two towers, "fp32", "bf16" or "fp16".
    Images go through transformers' image processor; with gradients through `CropPreprocessing`, which differs by what
    rounding to bytes does.
    Raises ConfigError if a model cannot be loaded, ImportError without transformers.
    """

    model_billions = 0.428
    card = ScorerCard(
        name="clip",
        summary="how well an image fits its prompt",
        media=("image",),
        needs="prompt",
        low=-100,
        high=100,
        typical="logit, 15 to 35",
        normalisation=Normalisation(30, is_default=True),
        extra="clip",
        source="CLIP, arXiv 2103.00020",
    )

    def __init__(
        self,
        *,
        model: str = "openai/clip-vit-large-patch14",
        processor: str | None = None,
        normalise: bool = True,
        dtype: str = "fp32",
        device: str = "cpu",
        name: str = "clip",
        batch_size: PositiveInt = 8,
    ) -> None:
        check_dtype(dtype, name)
        transformers = load_transformers(f"scorer {name}")
        processor = model if processor is None else processor
        for source, option in ((model, "model"), (processor, "processor")):
            check_source(source, f"scorer {name}: {option}")
        loaded = load_complete(
            transformers.CLIPModel, model, f"scorer {name}: model", device=device, dtype=torch.float32
        )
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(processor)
            # The PIL processor, not the torchvision one: rewards must not depend on what else is installed.
            self._processor = transformers.CLIPImageProcessorPil.from_pretrained(processor)
        except (OSError, ValueError) as error:
            raise ConfigError(f"scorer {name}: cannot load processor {processor!r}: {on_one_line(error)}") from error
        super().__init__(
            model=loaded,
            tokenizer=tokenizer,
            scale=loaded.logit_scale.detach().float().exp().item(),
            dtype=dtype,
            device=device,
            name=name,
            batch_size=batch_size,
            normalise=normalise,
        )
        self._preprocess = CropPreprocessing.of(self._processor, f"scorer {name}: processor {processor!r}")

    def model_input(self, pixels_bCHW: Tensor) -> Tensor:
        """Model input by transformers' processor, on PIL images."""
        return self._processor(images=to_pictures(pixels_bCHW), return_tensors="pt")["pixel_values"]

    def model_input_with_gradient(self, pixels_bCHW: Tensor) -> Tensor:
        """Resized, cropped and normalised in torch."""
        return self._preprocess(pixels_bCHW)
