"""DPG-Bench: propositions of dense prompts, by questions to a vision-language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unirl.suites.judges import JUDGE, needs_judge
from unirl.suites.suite import Judged, Metric, Suite, prepared


def _by_category(judged: Judged) -> dict[str, list[float]]:
    """Answers to the questions of each category, before dependencies, as published: `entity`, `attribute`, ..."""
    found: dict[str, list[float]] = {}
    for question, answer in zip(judged.metadata["questions"], judged.details["answers"], strict=True):
        found.setdefault(str(question["category"]).partition("-")[0].strip(), []).append(float(answer))
    return found


def _results(judged: Sequence[Judged]) -> Mapping[str, str]:
    """The words of dpg_bench/compute_dpg_bench.py, and a line per question."""
    scored = [each for each in judged if each.scores]
    first: dict[str, list[float]] = {}
    second: dict[str, list[float]] = {}
    details = []
    for each in scored:
        for question, answer in zip(each.metadata["questions"], each.details["answers"], strict=True):
            category = str(question["category"])
            second.setdefault(category, []).append(float(answer))
            first.setdefault(category.partition("-")[0].strip(), []).append(float(answer))
            said = "yes" if answer else "no"
            details.append(f"samples/{each.media.get('file')}, {question['question']}, {said}")
    lines = [f"samples/{each.media.get('file')}, {each.scores['dpg']}" for each in scored]
    lines += ["L1 category scores:", *(f"\t{name}: {_mean(own) * 100}" for name, own in first.items())]
    lines += ["L2 category scores:", *(f"\t{name}: {_mean(own) * 100}" for name, own in sorted(second.items()))]
    lines.append(f"DPG-Bench score: {_mean([each.scores['dpg'] for each in scored]) * 100}")
    return {"dpg-bench_results.txt": "\n".join(lines) + "\n", "dpg-bench_results_detail.txt": "\n".join(details) + "\n"}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


DPG = Suite(
    name="dpg",
    what="propositions of dense prompts, by questions to a judge",
    makes="image",
    prompts=prepared("dpg"),
    samples_per_prompt=4,
    published_prompts=1065,
    scorers={
        "dpg": {
            "_target_": "unirl.reward.local.judges.dpg.DPGScorer",
            "keeps_details": True,
            "judge": {**JUDGE, "model": "Qwen/Qwen3-VL-8B-Instruct"},
        }
    },
    needs=needs_judge("dpg"),
    metrics=(Metric("dpg", is_fraction=False),),
    parts=_by_category,
    publish=_results,
    source="ELLA (arXiv 2403.05135), github.com/TencentQQGYLab/ELLA; published with mPLUG-large as judge",
)
