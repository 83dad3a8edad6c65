"""The held-out prompts of the shapes world, judged by its verifier: a suite that runs whole on one CPU core."""

from __future__ import annotations

from unirl.suites.suite import Metric, Suite

SHAPES = Suite(
    name="shapes",
    what="coloured shapes, their number and places, by a verifier",
    makes="image",
    prompts="shapes:data/heldout.jsonl",
    samples_per_prompt=4,
    scorers={"shapes": {"_target_": "unirl.reward.worlds.shapes_scorer.ShapesRewardScorer"}},
    metrics=(Metric("shapes/strict", is_fraction=True), Metric("shapes/soft", is_fraction=False)),
    source="the shapes world of this project (docs/worlds/shapes.md)",
)
