"""The colour of an object in an image, by CLIP and words.

Legend: b objects, c colours, D embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn

from unirl.reward.local.detection.geneval_rules import COLOURS, Detection
from unirl.reward.local.pretrained import check_dtype, check_source, load_transformers
from unirl.types.errors import ConfigError
from unirl.types.precision import DTYPES

BACKGROUND = "#999"
"""What GenEval puts where the object is not."""
_TEMPLATES = ("a photo of a {colour} {label}", "a photo of a {colour}-colored {label}", "a photo of a {colour} object")


class ColourClassifier:
    """The one of COLOURS whose words lie nearest to the object's crop; the words of three templates are averaged.

    model: folder or hub id of a CLIP model; GenEval was published with OpenAI's ViT-L/14. dtype: of its towers.
    Raises ConfigError if the model cannot be loaded.
    """

    model_billions: ClassVar[float] = 0.428
    """Size of CLIP ViT-L/14, for `trainer check --memory`."""

    def __init__(
        self, *, model: str = "openai/clip-vit-large-patch14", dtype: str = "fp32", device: str = "cpu"
    ) -> None:
        owner = f"colour classifier {model}"
        check_dtype(dtype, owner)
        transformers = load_transformers(owner)
        check_source(model, f"{owner}: model")
        try:
            loaded = transformers.CLIPModel.from_pretrained(model, dtype=DTYPES[dtype])
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
            self._processor: Any = transformers.CLIPImageProcessorPil.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{owner}: cannot load it: {error}") from error
        self._model: Any = loaded.to(device).eval().requires_grad_(False)  # Any: transformers is optional
        self._words: dict[str, Tensor] = {}

    def modules(self) -> list[nn.Module]:
        """The CLIP model."""
        return [self._model]

    @torch.no_grad()
    def colours(self, picture: Image.Image, objects: Sequence[Detection]) -> list[str]:
        """Colour of each object; all of one class."""
        crops = [cut_out(picture, each) for each in objects]
        pixels = self._processor(images=crops, return_tensors="pt")["pixel_values"]
        found = self._model.get_image_features(pixel_values=pixels.to(self._model.device, self._model.dtype))
        image_bD = nn.functional.normalize(found.pooler_output.float().cpu(), dim=-1)
        return [COLOURS[i] for i in (image_bD @ self._words_of(objects[0].label).T).argmax(dim=-1).tolist()]

    def _words_of(self, label: str) -> Tensor:
        """[c, D], the normalised mean of the templates' embeddings; kept for the next time."""
        if label not in self._words:
            texts = [template.format(colour=colour, label=label) for colour in COLOURS for template in _TEMPLATES]
            tokens = self._tokenizer(
                texts,
                padding="max_length",
                truncation=True,
                max_length=self._model.config.text_config.max_position_embeddings,
                return_tensors="pt",
            ).to(self._model.device)
            found = self._model.get_text_features(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            )
            each = nn.functional.normalize(found.pooler_output.float().cpu(), dim=-1)
            mean_cD = each.unflatten(0, (len(COLOURS), len(_TEMPLATES))).mean(dim=1)
            self._words[label] = nn.functional.normalize(mean_cD, dim=-1)
        return self._words[label]


def cut_out(picture: Image.Image, found: Detection) -> Image.Image:
    """The object's box out of the image, grey where its mask is not; at least one pixel."""
    if found.mask is not None:
        grey = Image.new("RGB", picture.size, BACKGROUND)
        picture = Image.composite(picture, grey, Image.fromarray(found.mask.numpy()))
    x0, y0, x1, y1 = (round(value) for value in found.box)
    return picture.crop((x0, y0, max(x1, x0 + 1), max(y1, y0 + 1)))
