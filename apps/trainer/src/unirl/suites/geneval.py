"""GenEval: six tasks on objects, counts, colours and places, by a detector and rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from unirl.suites.suite import Judged, Metric, Suite, prepared
from unirl.types.errors import ConfigError

METRIC = "geneval/reward"


def _results(judged: Sequence[Judged]) -> Mapping[str, str]:
    """`results.jsonl` with the keys of evaluation/evaluate_images.py, and the words of evaluation/summary_scores.py."""
    scored = [each for each in judged if each.scores]
    lines = [
        {
            "filename": f"samples/{each.media.get('file')}",
            "tag": each.metadata["tag"],
            "prompt": each.prompt,
            "correct": each.details["correct"],
            "reason": each.details["reason"],
            "metadata": json.dumps(_published(each)),
            "details": json.dumps(each.details["boxes"]),
        }
        for each in scored
    ]
    return {"results.jsonl": "".join(json.dumps(line) + "\n" for line in lines), "summary.txt": _summary(scored)}


def _published(each: Judged) -> dict[str, object]:
    """The row as GenEval has it."""
    return {**{key: value for key, value in each.metadata.items() if key != "category"}, "prompt": each.prompt}


def _summary(scored: Sequence[Judged]) -> str:
    right = [bool(each.scores[METRIC]) for each in scored]
    prompts: dict[str, bool] = {}
    tasks: dict[str, list[bool]] = {}
    for each, is_right in zip(scored, right, strict=True):
        prompts[each.prompt_id] = prompts.get(each.prompt_id, False) or is_right
        if "tag" not in each.metadata:
            raise ConfigError(f"suite geneval: the row of {each.prompt!r} has no tag. Make: {GENEVAL_PROMPTS}.")
        tasks.setdefault(str(each.metadata["tag"]), []).append(is_right)
    means = {task: sum(own) / len(own) for task, own in tasks.items()}
    lines = ["Summary", "=======", f"Total images: {len(scored)}", f"Total prompts: {len(prompts)}"]
    lines.append(f"% correct images: {sum(right) / len(right):.2%}")
    lines.append(f"% correct prompts: {sum(prompts.values()) / len(prompts):.2%}")
    lines += ["", "Task breakdown", "=============="]
    lines += [f"{task:<16} = {means[task]:.2%} ({sum(own)} / {len(own)})" for task, own in tasks.items()]
    lines += ["", f"Overall score (avg. over tasks): {sum(means.values()) / len(means):.5f}"]
    return "\n".join(lines) + "\n"


GENEVAL_PROMPTS = "uv run trainer data prepare geneval_benchmark"
GENEVAL = Suite(
    name="geneval",
    what="objects, counts, colours and places, by a detector and rules",
    makes="image",
    prompts=prepared("geneval_benchmark"),
    samples_per_prompt=4,
    published_prompts=553,
    scorers={
        "geneval": {
            "_target_": "unirl.reward.local.detection.geneval.GenEvalScorer",
            "score_type": "reward",
            "keeps_details": True,
            "detector": {"_target_": "unirl.reward.local.detection.detectors.MaskDetector"},
            "colours": {"_target_": "unirl.reward.local.detection.colours.ColourClassifier"},
        }
    },
    needs="It needs facebook/mask2former-swin-small-coco-instance and openai/clip-vit-large-patch14 of the hub, or "
    "folders of them: suite.scorers.geneval.detector.model=FOLDER suite.scorers.geneval.colours.model=FOLDER.",
    metrics=(Metric(METRIC, is_fraction=True),),
    overall="categories",
    publish=_results,
    source="GenEval (arXiv 2310.11513), github.com/djghosh13/geneval; Mask2Former Swin-S of transformers, not mmdet's",
)
