"""CLIP score: how well a picture fits its prompt, as a CLIP model sees it.

Legend: b samples, u distinct prompts among them, D embedding.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from unirl.reward.base import LocalScorer
from unirl.reward.local.pixels import to_pictures
from unirl.types.errors import ConfigError
from unirl.types.reward import RewardRequest

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class CLIPRewardScorer(LocalScorer):
    """exp(logit_scale) * cos(picture, prompt) / `divisor`.

    model: folder or hub id of a CLIP model. processor: folder or hub id of its tokenizer and image processor, the
    model's own where None. Needs the extra `clip`.
    divisor: 30 brings the logits of CLIP ViT-L/14, about 15 to 35, near 1.
    dtype: of the two towers, "fp32", "bf16" or "fp16"; normalisation and product run in fp32, because a logit of 25
    in bf16 moves in steps of 0.125.
    Prompts longer than the model's context are cut, as CLIP does.
    Raises ConfigError where a model cannot be loaded, ImportError without transformers.
    """

    def __init__(
        self,
        *,
        model: str = "openai/clip-vit-large-patch14",
        processor: str | None = None,
        divisor: float = 30.0,
        dtype: str = "fp32",
        device: str = "cpu",
        name: str = "clip",
        batch_size: int = 8,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size, device=device)
        if dtype not in _DTYPES:
            raise ConfigError(f"scorer {name}: dtype = {dtype!r} must be one of {sorted(_DTYPES)}")
        if not (math.isfinite(divisor) and divisor != 0):
            raise ConfigError(f"scorer {name}: divisor = {divisor} must be a finite number other than 0")
        transformers = _transformers(name)
        processor = model if processor is None else processor
        for source, option in ((model, "model"), (processor, "processor")):
            _check_source(source, f"scorer {name}: {option}")
        try:
            self._model = transformers.CLIPModel.from_pretrained(model, dtype=torch.float32)
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(processor)
            # The PIL processor, not the torchvision one: rewards must not depend on what else is installed.
            self._processor = transformers.CLIPImageProcessorPil.from_pretrained(processor)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"scorer {name}: cannot load model {model!r} with processor {processor!r}: {error}"
            ) from error
        self._logit_scale = self._model.logit_scale.detach().float().exp().item()
        self._model = self._model.to(device=device, dtype=_DTYPES[dtype]).eval().requires_grad_(False)
        self._dtype = _DTYPES[dtype]
        self.divisor = divisor

    def modules(self) -> list[nn.Module]:
        """The CLIP model."""
        return [self._model]

    def score_batch(self, request: RewardRequest) -> Tensor:
        """Scaled logits, float32 [b]."""
        prompts = list(dict.fromkeys(request.prompts))
        text_uD = self._embedded_texts(prompts)
        image_bD = self._embedded_images(request.pixels)
        order = torch.tensor([prompts.index(prompt) for prompt in request.prompts], device=text_uD.device)
        return self._logit_scale * (image_bD * text_uD[order]).sum(dim=-1) / self.divisor

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
        return nn.functional.normalize(found.pooler_output.float(), dim=-1)

    def _embedded_images(self, pixels_bCHW: Tensor) -> Tensor:
        ready = self._processor(images=to_pictures(pixels_bCHW), return_tensors="pt")
        found = self._model.get_image_features(pixel_values=ready["pixel_values"].to(self.device, self._dtype))
        return nn.functional.normalize(found.pooler_output.float(), dim=-1)


def _transformers(name: str) -> ModuleType:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ImportError(
            f"scorer {name} needs transformers. Install it with: pip install 'unirl-reward[clip]'"
        ) from error
    return transformers


def _check_source(source: str, what: str) -> None:
    """Raises ConfigError for a string that is neither an existing folder nor shaped like a hub id."""
    if not Path(source).is_dir() and not _HUB_ID.fullmatch(source):
        raise ConfigError(f"{what} = {source!r} is no folder. Give an existing folder or a hub id, owner/name.")
