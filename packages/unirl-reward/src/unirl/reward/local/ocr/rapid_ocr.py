"""OCR reward by RapidOCR, whose models come with the package: works offline, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL import Image

from unirl.reward.card import ScorerCard
from unirl.reward.local.ocr.ocr import OCRScorer
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError


@bounded("scorer")
class RapidOCRScorer(OCRScorer):
    """The OCR reward as RapidOCR (PP-OCR models under onnxruntime) reads. Needs the extra `ocr`.

    num_threads: of onnxruntime; None lets it take all cores. settings: RapidOCR's own, by dotted name, such as
    {"Global.text_score": 0.3, "Rec.model_path": "..."}; without them its bundled models for Chinese and English.
    Raises ConfigError for settings that RapidOCR refuses, ImportError without it.
    """

    card = ScorerCard(
        name="ocr",
        summary="the text that the prompt quotes stands in the image, as RapidOCR reads; offline",
        media=("image",),
        needs="prompt with quotes",
        low=0,
        high=1,
        extra="ocr",
        source="Flow-GRPO, arXiv 2505.05470; RapidOCR",
    )

    def __init__(
        self,
        *,
        num_threads: PositiveInt | None = None,
        settings: Mapping[str, Any] | None = None,  # Any: RapidOCR's settings are numbers, strings and its enums
        name: str = "ocr",
        batch_size: PositiveInt = 8,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size)
        try:
            from rapidocr import RapidOCR
        except ModuleNotFoundError as error:
            raise ImportError(
                f"scorer {name} needs {error.name}. Install it with: pip install 'unirl-reward[ocr]'"
            ) from error
        chosen = {"Global.log_level": "error", **(settings or {})}
        if num_threads is not None:
            chosen["EngineConfig.onnxruntime.intra_op_num_threads"] = num_threads
        unknown = [key for key in chosen if not _is_setting(RapidOCR().cfg, key)]
        if unknown:
            raise ConfigError(f"scorer {name}: RapidOCR has no settings {unknown}; its config.yaml lists them")
        try:
            self._engine = RapidOCR(params=chosen)
            self._engine(Image.new("RGB", (64, 64), "white"))  # it loads its models only when it reads
        except Exception as error:  # its own exceptions share no base, and configuration and onnxruntime have theirs
            raise ConfigError(f"scorer {name}: RapidOCR does not start with settings {chosen}: {error}") from error
        if not (self._engine.use_det and self._engine.use_rec):
            raise ConfigError(
                f"scorer {name}: settings {chosen} switch a stage off; detection and recognition must be on"
            )

    def read(self, pictures: list[Image.Image]) -> list[str]:
        """Lines in reading order. Raises RuntimeError if the engine fails."""
        try:
            found = [self._engine(picture) for picture in pictures]
        except Exception as error:  # see above
            raise RuntimeError(f"RapidOCR failed: {type(error).__name__}: {error}") from error
        return ["".join(each.txts or ()) for each in found]  # ty: ignore[missing-union-attribute]  # stages are on


def _is_setting(config: Any, key: str) -> bool:  # Any: RapidOCR's own nested mapping
    for part in key.split("."):
        if part not in config:
            return False
        config = config[part]
    return True
