"""Every scorer that comes with the package: what it takes, the numbers that it gives, what it needs. Imports no torch.

Selection is by `_target_`; this is for people who choose, for `trainer list rewards`, and for servers that take names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Medium = Literal["image", "video", "text"]


@dataclass(frozen=True)
class Normalisation:
    """The published way to bring a scorer's values near [0, 1]: (value + offset) / divisor."""

    divisor: float
    offset: float = 0.0
    is_default: bool = False
    """Whether the scorer does it unless told otherwise."""

    def __call__(self, values: Tensor) -> Tensor:
        """Of raw values, in their precision."""
        return (values + self.offset) / self.divisor

    def __str__(self) -> str:
        """As a formula of x."""
        shifted = f"(x {'+' if self.offset > 0 else '-'} {abs(self.offset):g})" if self.offset else "x"
        return f"{shifted} / {self.divisor:g}"


@dataclass(frozen=True)
class ScorerCard:
    """What a scorer states about itself. The scorer's class holds its card as `card`."""

    target: str
    """Dotted path of the class, the `_target_` of a recipe."""
    summary: str
    """One line: what is rewarded."""
    media: tuple[Medium, ...]
    """Kinds of generated media that it scores."""
    source: str
    """Paper, model or project that defines it."""
    low: float = -math.inf
    high: float = math.inf
    """Bounds of its values as published, before `normalisation`; higher is better."""
    typical: str = ""
    """What its values look like where the bounds do not say it, and their unit."""
    needs: str = ""
    """What it reads besides the generated media."""
    extra: str | None = None
    """Of unirl-reward, where it needs one."""
    normalisation: Normalisation | None = None
    """None: the values are used as published."""

    @property
    def inputs(self) -> str:
        """Media and needs in words, such as "image + prompt"."""
        return " + ".join([" or ".join(self.media), *([self.needs] if self.needs else [])])

    @property
    def scale(self) -> str:
        """Bounds, what is typical, and the normalisation with its default."""
        bounds = f"[{self.low:g}, {self.high:g}]" if math.isfinite(self.low) and math.isfinite(self.high) else ""
        shown = [part for part in (bounds, self.typical) if part]
        if self.normalisation is not None:
            state = "on" if self.normalisation.is_default else "off"
            shown.append(f"normalise: {self.normalisation}, {state} by default")
        return "; ".join(shown)


CATALOG: dict[str, ScorerCard] = {
    "aesthetic": ScorerCard(
        target="unirl.reward.local.images.aesthetic.AestheticScorer",
        summary="how people rate the looks of a picture",
        media=("image",),
        typical="1 to 10, mostly 4 to 7",
        extra="clip",
        source="LAION aesthetic predictor; LAION-5B, arXiv 2210.08402",
    ),
    "clip": ScorerCard(
        target="unirl.reward.local.images.clip.CLIPRewardScorer",
        summary="how well a picture fits its prompt",
        media=("image",),
        needs="prompt",
        low=-100,
        high=100,
        typical="logit, 15 to 35",
        normalisation=Normalisation(30, is_default=True),
        extra="clip",
        source="CLIP, arXiv 2103.00020",
    ),
    "edit_reward": ScorerCard(
        target="unirl.reward.local.judges.edit_reward.EditRewardScorer",
        summary="instruction following and quality of an edit, rated by a judge",
        media=("image",),
        needs="prompt, input image, judge",
        low=1,
        high=4,
        extra="judge",
        source="dimensions of EditReward, arXiv 2509.26346",
    ),
    "edits": ScorerCard(
        target="unirl.reward.worlds.edits_scorer.EditsRewardScorer",
        summary="was an instruction of the edits world carried out on the picture given, and all else left as it was",
        media=("image",),
        needs="prompt, input image",
        low=0,
        high=2,
        typical="strict (0 or 1) + soft in [0, 1]",
        extra="shapes",
        source="the edits world of this project",
    ),
    "exact_match": ScorerCard(
        target="unirl.reward.local.texts.exact_match.ExactMatchScorer",
        summary="is the text, or what a pattern finds in it, the answer",
        media=("text",),
        needs="metadata answer",
        low=0,
        high=1,
        typical="0 or 1",
        source="plain comparison",
    ),
    "format": ScorerCard(
        target="unirl.reward.local.texts.format.FormatScorer",
        summary="has the text the sections <think> and <answer>, or the form of a pattern",
        media=("text",),
        low=0,
        high=1,
        typical="0 or 1",
        source="DeepSeek-R1, arXiv 2501.12948",
    ),
    "function": ScorerCard(
        target="unirl.reward.function.FunctionRewardScorer",
        summary="a Python function of your own",
        media=("image", "video", "text"),
        typical="as the function gives",
        source="yours",
    ),
    "geneval": ScorerCard(
        target="unirl.reward.local.detection.geneval.GenEvalScorer",
        summary="objects, counts, colours and positions that the prompt asks for, by a detector and rules",
        media=("image",),
        needs="metadata include, detector",
        high=1,
        typical="0 or 1; partial credit by `score_type`",
        extra="geneval",
        source="GenEval, arXiv 2310.11513",
    ),
    "geneval2": ScorerCard(
        target="unirl.reward.local.judges.geneval2.GenEval2Scorer",
        summary="probability that every atom of the prompt is there (Soft-TIFA), by questions to a judge",
        media=("image", "video"),
        needs="metadata vqa_list, judge",
        low=0,
        high=1,
        extra="judge",
        source="GenEval 2, arXiv 2512.16853",
    ),
    "got_ocr": ScorerCard(
        target="unirl.reward.local.ocr.got_ocr.GOTOCRScorer",
        summary="the text that the prompt quotes stands in the picture, as GOT-OCR 2.0 reads",
        media=("image",),
        needs="prompt with quotes",
        low=0,
        high=1,
        extra="got-ocr",
        source="Flow-GRPO, arXiv 2505.05470; GOT-OCR 2.0, arXiv 2409.01704",
    ),
    "gsm8k_exact_match": ScorerCard(
        target="unirl.reward.local.texts.gsm8k.GSM8KScorer",
        summary="is the final number right",
        media=("text",),
        needs="metadata answer",
        low=0,
        high=1,
        typical="0 or 1",
        source="GSM8K, arXiv 2110.14168",
    ),
    "hpsv2": ScorerCard(
        target="unirl.reward.local.images.hpsv2.HPSv2RewardScorer",
        summary="which picture people prefer for a prompt; HPSv2.1, or 2 by `file`",
        media=("image",),
        needs="prompt",
        low=-1,
        high=1,
        typical="cosine, 0.2 to 0.35",
        extra="clip",
        source="HPSv2, arXiv 2306.09341",
    ),
    "hpsv3": ScorerCard(
        target="unirl.reward.local.vision_language.hpsv3.HPSv3Scorer",
        summary="how much people like a picture for a prompt, by a vision-language model with a reward head",
        media=("image",),
        needs="prompt",
        typical="-10 to 15",
        normalisation=Normalisation(15, is_default=True),
        extra="clip",
        source="HPSv3, arXiv 2508.03789",
    ),
    "image_reward": ScorerCard(
        target="unirl.reward.local.images.image_reward.ImageRewardScorer",
        summary="how much people like a picture for a prompt",
        media=("image",),
        needs="prompt",
        typical="standard deviations, -2.3 to 2",
        normalisation=Normalisation(4, offset=2),
        extra="clip",
        source="ImageReward, arXiv 2304.05977",
    ),
    "jpeg_compressibility": ScorerCard(
        target="unirl.reward.local.images.compressibility.JPEGCompressibilityScorer",
        summary="minus the size of the JPEG: smoothness",
        media=("image",),
        high=0,
        typical="-kB of 1000 bytes",
        normalisation=Normalisation(500),
        source="DDPO, arXiv 2305.13301",
    ),
    "jpeg_incompressibility": ScorerCard(
        target="unirl.reward.local.images.compressibility.JPEGIncompressibilityScorer",
        summary="the size of the JPEG: detail",
        media=("image",),
        low=0,
        typical="kB of 1000 bytes",
        normalisation=Normalisation(500),
        source="DDPO, arXiv 2305.13301",
    ),
    "labels": ScorerCard(
        target="unirl.reward.local.images.labels.LabelScorer",
        summary="the score that the data file gives to the sample",
        media=("image", "video", "text"),
        needs="metadata scores",
        typical="as the data gives",
        source="the data file",
    ),
    "math_boxed": ScorerCard(
        target="unirl.reward.local.texts.math_boxed.BoxedMathScorer",
        summary="does the boxed answer equal the reference, to sympy",
        media=("text",),
        needs="metadata answer",
        low=0,
        high=1,
        typical="0 or 1",
        source="MATH, arXiv 2103.03874",
    ),
    "math_verify": ScorerCard(
        target="unirl.reward.local.texts.math_verify.MathVerifyScorer",
        summary="does the answer equal the reference, to math-verify",
        media=("text",),
        needs="metadata answer",
        low=0,
        high=1,
        typical="0 or 1",
        extra="math",
        source="math-verify of Hugging Face",
    ),
    "mc_exact_match": ScorerCard(
        target="unirl.reward.local.texts.multiple_choice.MultipleChoiceScorer",
        summary="does the text choose the right option",
        media=("text",),
        needs="metadata answer",
        low=0,
        high=1,
        typical="0 or 1",
        source="multiple-choice benchmarks as MMLU, arXiv 2009.03300",
    ),
    "moves": ScorerCard(
        target="unirl.reward.worlds.moves_scorer.MovesRewardScorer",
        summary="does the video show what a prompt of the moves world asks for: objects, colours, steady motion",
        media=("video",),
        needs="prompt",
        low=0,
        high=2,
        typical="strict (0 or 1) + soft in [0, 1]",
        extra="shapes",
        source="the moves world of this project",
    ),
    "ocr": ScorerCard(
        target="unirl.reward.local.ocr.rapid_ocr.RapidOCRScorer",
        summary="the text that the prompt quotes stands in the picture, as RapidOCR reads; offline",
        media=("image",),
        needs="prompt with quotes",
        low=0,
        high=1,
        extra="ocr",
        source="Flow-GRPO, arXiv 2505.05470; RapidOCR",
    ),
    "paddle_ocr": ScorerCard(
        target="unirl.reward.local.ocr.paddle_ocr.PaddleOCRScorer",
        summary="the text that the prompt quotes stands in the picture, as PaddleOCR reads",
        media=("image",),
        needs="prompt with quotes",
        low=0,
        high=1,
        extra="paddleocr",
        source="Flow-GRPO, arXiv 2505.05470; PaddleOCR",
    ),
    "pickscore": ScorerCard(
        target="unirl.reward.local.images.pickscore.PickScoreRewardScorer",
        summary="which picture people would pick for a prompt",
        media=("image",),
        needs="prompt",
        low=-100,
        high=100,
        typical="logit, 18 to 24",
        normalisation=Normalisation(26, is_default=True),
        extra="clip",
        source="Pick-a-Pic, arXiv 2305.01569",
    ),
    "shapes": ScorerCard(
        target="unirl.reward.worlds.shapes_scorer.ShapesRewardScorer",
        summary="does the picture show what a prompt of the shapes world asks for",
        media=("image",),
        needs="prompt",
        low=0,
        high=2,
        typical="strict (0 or 1) + soft in [0, 1]",
        extra="shapes",
        source="the shapes world of this project",
    ),
    "shapes_gradient": ScorerCard(
        target="unirl.reward.worlds.shapes_gradient.ShapesGradientScorer",
        summary="probability that it does, differentiable; its logarithm by `output`",
        media=("image",),
        needs="prompt",
        low=0,
        high=1,
        source="the shapes world of this project",
    ),
    "unified_reward": ScorerCard(
        target="unirl.reward.local.judges.unified_reward.UnifiedRewardScorer",
        summary="alignment, coherence and style, rated by a judge trained to",
        media=("image",),
        needs="prompt, judge",
        low=1,
        high=5,
        normalisation=Normalisation(5),
        extra="judge",
        source="UnifiedReward, arXiv 2503.05236",
    ),
    "video": ScorerCard(
        target="unirl.reward.local.video.frames.FrameScorer",
        summary="a picture scorer on frames of a video, and how little neighbouring frames differ",
        media=("video",),
        needs="what its picture scorer needs",
        typical="0.7 of the picture scorer's value + 0.3 of a consistency in [0, 1]",
        source="this project",
    ),
    "video_align": ScorerCard(
        target="unirl.reward.local.vision_language.video_align.VideoAlignScorer",
        summary="visual quality, motion quality and text alignment, by a vision-language model with a reward head",
        media=("video",),
        needs="prompt",
        typical="standard deviations, summed over the three",
        extra="clip",
        source="VideoAlign, arXiv 2501.13918",
    ),
    "video_pickscore": ScorerCard(
        target="unirl.reward.local.video.frames.VideoPickScoreScorer",
        summary="PickScore of the first frame, or the mean over several",
        media=("video",),
        needs="prompt",
        low=-100,
        high=100,
        typical="logit, 18 to 24",
        normalisation=Normalisation(26, is_default=True),
        extra="clip",
        source="Pick-a-Pic, arXiv 2305.01569",
    ),
    "wise": ScorerCard(
        target="unirl.reward.local.judges.wise.WISEScorer",
        summary="is a prompt that takes knowledge of the world understood (WiScore), rated by a judge",
        media=("image",),
        needs="prompt, metadata explanation, judge",
        low=0,
        high=1,
        extra="judge",
        source="WISE, arXiv 2503.07265",
    ),
}
"""Name -> card. The name is also what the scorer is called unless told otherwise."""


def named_as(target: str) -> str | None:
    """Name of the scorer with this dotted path, None where the package does not ship it."""
    return next((name for name, card in CATALOG.items() if card.target == target), None)
