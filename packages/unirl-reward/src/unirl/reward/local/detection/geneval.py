"""GenEval: are the objects that a prompt asks for there, in number, colour and place, by a detector and rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from PIL import Image
from torch import Tensor, nn

from unirl.reward.card import ScorerCard
from unirl.reward.details import DetailedScorer
from unirl.reward.local.detection.colours import ColourClassifier
from unirl.reward.local.detection.detectors import Detector
from unirl.reward.local.detection.geneval_rules import ColoursOf, Detection, check_row, judged, kept
from unirl.reward.local.pixels import to_pictures
from unirl.types.bounds import PositiveInt, UnitInterval, bounded
from unirl.types.errors import ConfigError
from unirl.types.reward import RewardRequest

ScoreType = Literal["strict", "score", "reward"]
COUNTING = "counting"
"""The tag of prompts whose objects must be found with more certainty."""
GENEVAL_NAMES = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}
"""Classes that GenEval calls otherwise than COCO does."""


@bounded("scorer")
class GenEvalScorer(DetailedScorer):
    """The component that `score_type` names; the other two are reported too. See `geneval_rules.Verdict`.

    "reward": 1 where GenEval calls the image right, else 0. "strict": 1 where also no object is too many, else 0.
    "score": partial credit, 1 at best; below 0 where far too many objects are there.
    detector: `MaskDetector` as published, `BoxDetector` or `OpenVocabularyDetector`. colours: needed by prompts with
    colours; None refuses these.
    threshold: of a detection's score; counting_threshold: under the tag "counting". max_objects: a class.
    max_overlap: IoU from which the less sure of two objects of a class is dropped; 1 drops none.
    position_threshold: see `geneval_rules.relations`.
    keeps_details: for `take_details`: `correct`, `reason` (a line per clause that fails) and `boxes` (label -> [x0, y0,
        x1, y1, score] of the kept objects), as GenEval's results have them.
    names: GenEval's name -> the detector's name of a class; COCO's differ in three.
    Metadata of every sample: a row of GenEval's prompts/evaluation_metadata.jsonl (include, exclude, tag).
    Raises ConfigError for a sample whose row is missing or wrong, naming it.
    Source: GenEval (arXiv 2310.11513); strict and score as in Flow-GRPO (arXiv 2505.05470).
    """

    card = ScorerCard(
        name="geneval",
        summary="objects, counts, colours and positions that the prompt asks for, by a detector and rules",
        media=("image",),
        needs="metadata include, detector",
        high=1,
        typical="0 or 1; partial credit by `score_type`",
        extra="geneval",
        source="GenEval, arXiv 2310.11513",
    )

    def __init__(
        self,
        *,
        detector: Detector,
        colours: ColourClassifier | None = None,
        score_type: ScoreType = "score",
        threshold: UnitInterval = 0.3,
        counting_threshold: UnitInterval = 0.9,
        max_objects: PositiveInt = 16,
        max_overlap: UnitInterval = 1.0,
        position_threshold: UnitInterval = 0.1,
        names: Mapping[str, str] | None = None,
        keeps_details: bool = False,
        device: str = "cpu",
        name: str = "geneval",
        batch_size: PositiveInt = 8,
    ) -> None:
        weights = {each: float(each == score_type) for each in get_args(ScoreType)}
        super().__init__(
            keeps_details=keeps_details, name=name, batch_size=batch_size, device=device, component_weights=weights
        )
        self._detector = detector
        self._colours = colours
        self.threshold = threshold
        self.counting_threshold = counting_threshold
        self.max_objects = max_objects
        self.max_overlap = max_overlap
        self.position_threshold = position_threshold
        renamed = {ours: theirs for theirs, ours in (GENEVAL_NAMES if names is None else dict(names)).items()}
        self._label_of = {label: renamed.get(label, label) for label in detector.labels}

    def modules(self) -> list[nn.Module]:
        """Those of the detector and of the colour classifier."""
        return [*self._detector.modules(), *(self._colours.modules() if self._colours is not None else [])]

    def score_batch(self, request: RewardRequest) -> dict[str, Tensor]:
        """strict, score and reward, float32 [b]."""
        metadata = request.metadata or [None] * len(request.sample_ids)
        labels = list(self._label_of.values())
        rows = [
            check_row(row, labels, f"scorer {self.name}: sample {sample}")
            for row, sample in zip(metadata, request.sample_ids, strict=True)
        ]
        pictures = to_pictures(request.pixels)
        found = self._detector.detect(pictures, min(self.threshold, self.counting_threshold))
        verdicts = []
        for sample, picture, objects, row in zip(request.sample_ids, pictures, found, rows, strict=True):
            named = [dataclasses.replace(each, label=self._label_of[each.label]) for each in objects]
            threshold = self.counting_threshold if row.get("tag") == COUNTING else self.threshold
            seen = kept(named, threshold, self.max_objects, self.max_overlap)
            verdict = judged(seen, row, self._colours_in(picture), self.position_threshold)
            verdicts.append(verdict)
            if self._keeps_details:
                boxes = {label: [[*each.box, each.score] for each in own] for label, own in seen.items()}
                self._details[sample] = {"correct": bool(verdict.reward), "reason": "\n".join(verdict.wrong)}
                self._details[sample]["boxes"] = {label: boxes[label] for label in labels if label in boxes}
        return {
            "strict": torch.tensor([verdict.strict for verdict in verdicts]),
            "score": torch.tensor([verdict.score for verdict in verdicts]),
            "reward": torch.tensor([verdict.reward for verdict in verdicts]),
        }

    def _colours_in(self, picture: Image.Image) -> ColoursOf:
        known: dict[Detection, str] = {}

        def colours_of(objects: Sequence[Detection]) -> list[str]:
            if self._colours is None:
                raise ConfigError(
                    f"scorer {self.name}: a prompt asks for a color, but `colours` is None. Give it a ColourClassifier."
                )
            new = [each for each in objects if each not in known]
            if new:
                known.update(zip(new, self._colours.colours(picture, new), strict=True))
            return [known[each] for each in objects]

        return colours_of
