"""WISE: prompts that need knowledge of the world, rated by a judge (WiScore)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from unirl.suites.judges import JUDGE, needs_judge
from unirl.suites.suite import Judged, Metric, Suite, prepared

WEIGHTS = {"cultural": 0.4, "time": 0.167, "space": 0.133, "biology": 0.1, "physics": 0.1, "chemistry": 0.1}
"""Shares in the overall WiScore, as the repository gives them."""
FAILED = 999
"""What the repository writes for a rating that is missing."""


def _scores(judged: Sequence[Judged]) -> Mapping[str, str]:
    """The lines of gpt_eval.py's scores, all in one file."""
    lines = [
        {
            "prompt_id": each.metadata["number"],
            "Subcategory": each.metadata["subcategory"],
            "consistency": each.scores.get("wise/consistency", FAILED),
            "realism": each.scores.get("wise/realism", FAILED),
            "aesthetic_quality": each.scores.get("wise/aesthetic", FAILED),
        }
        for each in judged
    ]
    return {"scores_results.jsonl": "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)}


WISE = Suite(
    name="wise",
    what="prompts that need knowledge of the world, rated by a judge",
    makes="image",
    prompts=prepared("wise_benchmark"),
    samples_per_prompt=1,
    published_prompts=1000,
    scorers={
        "wise": {
            "_target_": "unirl.reward.local.judges.wise.WISEScorer",
            "judge": {**JUDGE, "model": "Qwen/Qwen3-VL-8B-Instruct"},
        }
    },
    needs=needs_judge("wise"),
    metrics=(
        Metric("wise", is_fraction=False),
        *(Metric(f"wise/{rating}", is_fraction=False) for rating in ("consistency", "realism", "aesthetic")),
    ),
    overall="categories",
    weights=WEIGHTS,
    publish=_scores,
    source="WISE (arXiv 2503.07265), github.com/PKU-YuanGroup/WISE; published with GPT-4o as judge and other words",
)
