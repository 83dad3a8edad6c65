"""DPG-Bench: are the propositions of a dense prompt true of an image, by questions to a vision-language model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unirl.reward.base import Scored
from unirl.reward.card import ScorerCard
from unirl.reward.details import DetailedScorer
from unirl.reward.local.judges.judge import Judge, JudgeError, Question, pictures_of
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.reward import RewardRequest

YES = 0.5
"""Probability of yes from which a question counts as answered so."""


@bounded("scorer")
class DPGScorer(DetailedScorer):
    """Share of a prompt's questions that are answered yes, where a question counts as no if one that it depends on is.

    judge: `APIJudge` or `VLMJudge`; published with mPLUG-large, so numbers by another judge are comparable with one
    another alone.
    Metadata of every sample: "questions", mappings {id, question, parents: ids of the questions that it depends on}.
    keeps_details: for `take_details`: `answers`, of each question, before dependencies.
    Raises ConfigError for a sample without questions, naming it.
    Source: ELLA (arXiv 2403.05135), dpg_bench/compute_dpg_bench.py.
    """

    card = ScorerCard(
        name="dpg",
        summary="share of a dense prompt's propositions that hold (DPG-Bench), by questions to a judge",
        media=("image",),
        needs="metadata questions, judge",
        low=0,
        high=1,
        extra="judge",
        source="ELLA, arXiv 2403.05135",
    )

    def __init__(
        self,
        *,
        judge: Judge,
        keeps_details: bool = False,
        device: str = "cpu",
        name: str = "dpg",
        batch_size: PositiveInt = 8,
    ) -> None:
        super().__init__(keeps_details=keeps_details, name=name, batch_size=batch_size, device=device)
        self._judge = judge

    def modules(self) -> list[nn.Module]:
        """Those of the judge."""
        return self._judge.modules()

    def score_batch(self, request: RewardRequest) -> Scored:
        """[b] in [0, 1]; a sample with a question that got no answer has failed."""
        pictures = pictures_of(request, num_frames=1)
        metadata = request.metadata or [None] * len(pictures)
        asked = [self._questions(*each) for each in zip(request.sample_ids, metadata, strict=True)]
        questions = [
            Question(f"{each['question']} Answer yes or no.", seen)
            for seen, own in zip(pictures, asked, strict=True)
            for each in own
        ]
        found = iter(self._judge.answer_probabilities(questions, ["yes"] * len(questions)))
        values, reasons = [], []
        for sample, own in zip(request.sample_ids, asked, strict=True):
            mine = [next(found) for _ in own]
            failed = [each for each in mine if isinstance(each, JudgeError)]
            answers = {
                each["id"]: chance >= YES
                for each, chance in zip(own, mine, strict=True)
                if not isinstance(chance, JudgeError)
            }
            reasons.append(str(failed[0]) if failed else None)
            values.append(math.nan if failed else dpg_score(answers, {each["id"]: each["parents"] for each in own}))
            if self._keeps_details and not failed:
                self._details[sample] = {"answers": [answers[each["id"]] for each in own]}
        return Scored(torch.tensor(values), reasons)

    def _questions(self, sample: str, row: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:  # Any: a data row
        found = (row or {}).get("questions")
        if not found:
            raise ConfigError(f"scorer {self.name}: sample {sample} has no questions. Give its data row some.")
        known = {each["id"] for each in found}
        unknown = sorted({parent for each in found for parent in each["parents"]} - known)
        if unknown:
            raise ConfigError(
                f"scorer {self.name}: sample {sample} has questions that depend on {unknown}, which it has not."
            )
        return found


def dpg_score(answers: Mapping[Any, bool], parents: Mapping[Any, Sequence[Any]]) -> float:  # Any: ids
    """Mean of the answers, in the order of the questions, after a yes becomes a no if a parent is (or has become) one.

    A parent that comes later counts by its own answer, as in the published script.
    """
    kept = dict(answers)
    for question in answers:
        if not all(kept[parent] for parent in parents[question]):
            kept[question] = False
    return sum(kept.values()) / len(kept)
