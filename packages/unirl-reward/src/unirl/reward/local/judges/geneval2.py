"""GenEval 2: does an image hold every atom of its prompt, by questions to a vision-language model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from unirl.reward.base import Scored
from unirl.reward.card import ScorerCard
from unirl.reward.details import DetailedScorer
from unirl.reward.local.judges.judge import Judge, JudgeError, Question, pictures_of
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.reward import RewardRequest

Mean = Literal["gm", "am"]
FLOOR = 1e-300
"""Probabilities below it count as it in the geometric mean, whose logarithm would be infinite."""


@bounded("scorer")
class GenEval2Scorer(DetailedScorer):
    """Soft-TIFA: the mean, over the atoms of a prompt, of P(expected answer to the atom's question); 0 to 1.

    judge: `APIJudge` or `VLMJudge`; published with Qwen3-VL-8B-Instruct.
    mean: "gm", the geometric mean, which asks for every atom; "am", the arithmetic mean.
    Atoms are [question, answer] pairs in the sample's metadata under "vqa_list"; or, where a row has none, those of its
    prompt in `questions_file`, JSON lines with "prompt" and "vqa_list", as GenEval 2 publishes them.
    num_frames: of a video, that the judge sees. keeps_details: for `take_details`: `atoms`, the probability of
    each in their order.
    Raises ConfigError for a sample without atoms, naming it.
    Source: GenEval 2 (arXiv 2512.16853).
    """

    card = ScorerCard(
        name="geneval2",
        summary="probability that every atom of the prompt is there (Soft-TIFA), by questions to a judge",
        media=("image", "video"),
        needs="metadata vqa_list, judge",
        low=0,
        high=1,
        extra="judge",
        source="GenEval 2, arXiv 2512.16853",
    )

    def __init__(
        self,
        *,
        judge: Judge,
        mean: Mean = "gm",
        questions_file: str | None = None,
        num_frames: PositiveInt = 8,
        keeps_details: bool = False,
        device: str = "cpu",
        name: str = "geneval2",
        batch_size: PositiveInt = 8,
    ) -> None:
        super().__init__(keeps_details=keeps_details, name=name, batch_size=batch_size, device=device)
        self._judge = judge
        self.mean: Mean = mean
        self.num_frames = num_frames
        self._atoms_of = {} if questions_file is None else _atoms_by_prompt(questions_file, name)

    def modules(self) -> list[nn.Module]:
        """Those of the judge."""
        return self._judge.modules()

    def score_batch(self, request: RewardRequest) -> Scored:
        """Soft-TIFA [b]; a sample with a question that got no answer has failed."""
        pictures = pictures_of(request, self.num_frames)
        metadata = request.metadata or [None] * len(pictures)
        atoms = [self._atoms(*each) for each in zip(request.sample_ids, request.prompts, metadata, strict=True)]
        questions = [
            Question(f"{question} Answer in one word.", seen)
            for seen, pairs in zip(pictures, atoms, strict=True)
            for question, _ in pairs
        ]
        answers = [answer for pairs in atoms for _, answer in pairs]
        found = iter(self._judge.answer_probabilities(questions, answers))
        values, reasons = [], []
        for sample, pairs in zip(request.sample_ids, atoms, strict=True):
            mine = [next(found) for _ in pairs]
            failed = [each for each in mine if isinstance(each, JudgeError)]
            reasons.append(str(failed[0]) if failed else None)
            if self._keeps_details and not failed:
                self._details[sample] = {"atoms": mine}
            values.append(
                math.nan if failed else soft_tifa([each for each in mine if isinstance(each, float)], self.mean)
            )
        return Scored(torch.tensor(values), reasons)

    def _atoms(self, sample: str, prompt: str, row: dict[str, Any] | None) -> list[tuple[str, str]]:
        found = (row or {}).get("vqa_list") or self._atoms_of.get(prompt)
        if not found:
            raise ConfigError(
                f"scorer {self.name}: sample {sample} ({prompt[:60]!r}) has no questions. Give its data row a "
                "vqa_list of [question, answer] pairs, or set questions_file."
            )
        return _checked(found, f"scorer {self.name}: sample {sample}")


def soft_tifa(probabilities: Sequence[float], mean: Mean) -> float:
    """Geometric ("gm") or arithmetic ("am") mean of at least one probability, in float64."""
    if mean == "am":
        return math.fsum(probabilities) / len(probabilities)
    return math.exp(math.fsum(math.log(max(each, FLOOR)) for each in probabilities) / len(probabilities))


def _checked(pairs: Any, owner: str) -> list[tuple[str, str]]:  # Any: a row of a user's data file
    if not isinstance(pairs, Sequence) or isinstance(pairs, str):
        raise ConfigError(f"{owner}: vqa_list is a {type(pairs).__name__}, expected [question, answer] pairs")
    for pair in pairs:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or [type(each) for each in pair] != [str, str]:
            raise ConfigError(f"{owner}: vqa_list holds {pair!r}, expected [question, answer], two strings")
    return [(question, answer) for question, answer in pairs]


def _atoms_by_prompt(file: str, name: str) -> dict[str, list[tuple[str, str]]]:
    found = {}
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"scorer {name}: cannot read questions_file {file!r}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found[row["prompt"]] = _checked(row["vqa_list"], f"questions_file {file} line {number}")
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"scorer {name}: questions_file {file} line {number} is no object with prompt and vqa_list: {error}"
            ) from error
    return found
