"""GenEval 2: every atom of compositional prompts, by questions to a vision-language model (Soft-TIFA)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from unirl.suites.judges import JUDGE, needs_judge
from unirl.suites.suite import Judged, Metric, Suite, prepared


def _score_lists(judged: Sequence[Judged]) -> Mapping[str, str]:
    """The probability of every atom, prompt by prompt, as soft_tifa_analysis.py reads them."""
    return {"score_lists.json": json.dumps([each.details["atoms"] for each in judged if each.scores]) + "\n"}


GENEVAL2 = Suite(
    name="geneval2",
    what="every atom of compositional prompts, by questions to a judge",
    makes="image",
    prompts=prepared("geneval2"),
    samples_per_prompt=1,
    published_prompts=800,
    scorers={
        "geneval2": {
            "_target_": "unirl.reward.local.judges.geneval2.GenEval2Scorer",
            "keeps_details": True,
            "judge": {**JUDGE, "model": "Qwen/Qwen3-VL-8B-Instruct"},
        }
    },
    needs=needs_judge("geneval2"),
    metrics=(Metric("geneval2", is_fraction=False),),
    publish=_score_lists,
    source="GenEval 2 (arXiv 2512.16853), github.com/facebookresearch/GenEval2",
)
