"""OCR reward by PaddleOCR, the engine of the published runs."""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np
from PIL import Image

from unirl.reward.card import ScorerCard
from unirl.reward.local.ocr.ocr import OCRScorer
from unirl.types.bounds import PositiveInt
from unirl.types.errors import ConfigError


class PaddleOCRScorer(OCRScorer):
    """The OCR reward as PaddleOCR 3 reads. Needs the extra `paddleocr`, and paddlepaddle for the device.

    language: whose models PaddleOCR fetches. detection_dir, recognition_dir: instead, folders of models for machines
    without a network, both or neither; detection_model, recognition_model name what they hold ("PP-OCRv5_server_det").
    device: PaddleOCR's name of it, "cpu" or "gpu:0". Images are neither rotated nor unwarped first.
    Raises ConfigError if PaddleOCR cannot load its models, ImportError without it.
    """

    card = ScorerCard(
        name="paddle_ocr",
        summary="the text that the prompt quotes stands in the image, as PaddleOCR reads",
        media=("image",),
        needs="prompt with quotes",
        low=0,
        high=1,
        extra="paddleocr",
        source="Flow-GRPO, arXiv 2505.05470; PaddleOCR",
    )

    def __init__(
        self,
        *,
        language: str = "en",
        detection_dir: str | None = None,
        recognition_dir: str | None = None,
        detection_model: str | None = None,
        recognition_model: str | None = None,
        device: str = "cpu",
        name: str = "paddle_ocr",
        batch_size: PositiveInt = 8,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size)
        if (detection_dir is None) != (recognition_dir is None):
            raise ConfigError(
                f"scorer {name}: detection_dir = {detection_dir!r}, recognition_dir = {recognition_dir!r}. "
                "Give both or neither."
            )
        paddleocr = _load_paddleocr(name)
        models = {
            "text_detection_model_dir": detection_dir,
            "text_recognition_model_dir": recognition_dir,
            "text_detection_model_name": detection_model,
            "text_recognition_model_name": recognition_model,
        }
        chosen = {key: value for key, value in models.items() if value is not None} or {"lang": language}
        try:
            self._engine = paddleocr.PaddleOCR(
                use_doc_orientation_classify=False,
                use_doc_unwarping=False,
                use_textline_orientation=False,
                device=device,
                **chosen,
            )
        except Exception as error:  # Paddle's exceptions share no base
            raise ConfigError(f"scorer {name}: PaddleOCR does not start with {chosen}: {error}") from error

    def read(self, pictures: list[Image.Image]) -> list[str]:
        """Lines in reading order. Raises RuntimeError if the engine fails."""
        bgr = [np.asarray(picture)[..., ::-1].copy() for picture in pictures]
        try:
            found = self._engine.predict(bgr)
        except Exception as error:  # Paddle's exceptions share no base
            raise RuntimeError(f"PaddleOCR failed: {type(error).__name__}: {error}") from error
        return ["".join(page["rec_texts"]) for page in found]


def _load_paddleocr(name: str) -> ModuleType:
    try:
        return importlib.import_module("paddleocr")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"scorer {name} needs {error.name}. Install it with: pip install 'unirl-reward[paddleocr]' paddlepaddle"
        ) from error
