"""Suites whose samples are scored by models of human preference: HPDv2's benchmark and PartiPrompts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from unirl.suites.suite import Judged, Metric, Suite, prepared

GROUP = 80
"""Prompts of a style that are averaged before the published standard deviation."""


def _by_style(judged: Sequence[Judged]) -> Mapping[str, str]:
    """A line per style, as hpsv2.evaluate prints it: mean and standard deviation of groups of 80, times 100."""
    styles: dict[str, list[float]] = {}
    for each in judged:
        if each.scores:
            styles.setdefault(each.categories[0], []).append(each.scores["hpsv2"] * 100)
    lines = []
    for style, values in styles.items():
        groups = [statistics.fmean(values[start : start + GROUP]) for start in range(0, len(values), GROUP)]
        lines.append(f"{style:<15} {statistics.fmean(groups):.2f} \t {statistics.pstdev(groups):.4f}")
    return {"hpsv2.txt": "\n".join(lines) + "\n"}


HPDV2 = Suite(
    name="hpdv2",
    what="four styles of HPDv2's benchmark, by HPS v2.1",
    makes="image",
    prompts=prepared("hpdv2_benchmark"),
    samples_per_prompt=1,
    published_prompts=3200,
    scorers={"hpsv2": {"_target_": "unirl.reward.local.images.hpsv2.HPSv2RewardScorer"}},
    needs="It needs xswu/HPSv2 and laion/CLIP-ViT-H-14-laion2B-s32B-b79K of the hub, or a folder of each: "
    "suite.scorers.hpsv2.checkpoint=FOLDER suite.scorers.hpsv2.model=FOLDER.",
    metrics=(Metric("hpsv2", is_fraction=False),),
    overall="categories",
    publish=_by_style,
    source="HPSv2 (arXiv 2306.09341), github.com/tgxs002/HPSv2",
)

PARTIPROMPTS = Suite(
    name="partiprompts",
    what="PartiPrompts by category and by challenge, by PickScore and CLIP",
    makes="image",
    prompts=prepared("partiprompts"),
    samples_per_prompt=1,
    published_prompts=1632,
    scorers={
        "pickscore": {"_target_": "unirl.reward.local.images.pickscore.PickScoreRewardScorer", "normalise": False},
        "clip": {"_target_": "unirl.reward.local.images.clip.CLIPRewardScorer", "normalise": False},
    },
    needs="It needs yuvalkirstain/PickScore_v1, laion/CLIP-ViT-H-14-laion2B-s32B-b79K and "
    "openai/clip-vit-large-patch14 of the hub, or folders: suite.scorers.pickscore.model=FOLDER "
    "suite.scorers.pickscore.processor=FOLDER suite.scorers.clip.model=FOLDER.",
    metrics=(Metric("pickscore", is_fraction=False), Metric("clip", is_fraction=False)),
    categories=("category", "challenge"),
    source="PartiPrompts (arXiv 2206.10789), github.com/google-research/parti; it was published with human raters",
)
