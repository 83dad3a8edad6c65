"""Suites of questions with an answer that a program can check: AIME, MATH-500, GPQA, Geometry3K.

Numbers are pass@1, the mean over the samples of a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from unirl.suites.suite import Judged, Metric, Suite, prepared

BOXED = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
LETTER = '{prompt}\n\nThink step by step, then end with "The answer is" and the letter.'
MATH = {"_target_": "unirl.reward.local.texts.math_boxed.BoxedMathScorer"}
CHOICE = {"_target_": "unirl.reward.local.texts.multiple_choice.MultipleChoiceScorer"}


def _answers(judged: Sequence[Judged]) -> Mapping[str, str]:
    """A line per sample: the question, what was answered and whether it is right. No one format is published."""
    lines = [
        {
            "prompt_id": each.prompt_id,
            "index": each.index,
            "prompt": each.prompt,
            "completion": each.media.get("text"),
            "answer": each.metadata.get("answer"),
            "correct": bool(next(iter(each.scores.values()))) if each.scores else None,
        }
        for each in judged
    ]
    return {"answers.jsonl": "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)}


AIME = Suite(
    name="aime",
    what="the 30 problems of AIME 2024, 32 samples each",
    makes="text",
    prompts=prepared("aime24"),
    samples_per_prompt=32,
    published_prompts=30,
    template=BOXED,
    scorers={"math": MATH},
    metrics=(Metric("math", is_fraction=True),),
    publish=_answers,
    source="AIME 2024 (huggingface.co/datasets/Maxwell-Jia/AIME_2024); samples as DAPO (arXiv 2503.14476) takes them",
)

MATH500 = Suite(
    name="math500",
    what="500 problems of MATH by subject",
    makes="text",
    prompts=prepared("math500"),
    samples_per_prompt=1,
    published_prompts=500,
    template=BOXED,
    scorers={"math": MATH},
    metrics=(Metric("math", is_fraction=True),),
    publish=_answers,
    source="MATH (arXiv 2103.03874), the 500 of arXiv 2305.20050",
)

GPQA = Suite(
    name="gpqa",
    what="GPQA Diamond: graduate science as multiple choice",
    makes="text",
    prompts=prepared("gpqa"),
    samples_per_prompt=4,
    published_prompts=198,
    template=LETTER,
    scorers={"choice": CHOICE},
    metrics=(Metric("choice", is_fraction=True),),
    publish=_answers,
    source="GPQA (arXiv 2311.12022), huggingface.co/datasets/Idavidrein/gpqa (gated)",
)

GEO3K = Suite(
    name="geo3k",
    what="geometry with a diagram, as multiple choice",
    makes="text",
    prompts=prepared("geo3k"),
    samples_per_prompt=1,
    template=LETTER,
    scorers={"choice": CHOICE},
    metrics=(Metric("choice", is_fraction=True),),
    publish=_answers,
    source="Geometry3K (arXiv 2105.04165), github.com/lupantech/InterGPS",
)
