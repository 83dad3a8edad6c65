"""VBench: the dimensions of video quality that a scorer here measures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence

from unirl.suites.suite import Judged, Metric, Suite, prepared

AESTHETIC, FLICKERING = "aesthetic_quality", "temporal_flickering"
SUBJECT, BACKGROUND, STYLE = "subject_consistency", "background_consistency", "appearance_style"
MISSING = (
    "motion_smoothness dynamic_degree imaging_quality object_class multiple_objects human_action color "
    "spatial_relationship scene temporal_style overall_consistency"
).split()
ALL_FRAMES = 100_000
TEN = 10.0
"""VBench divides the aesthetic predictor's value by it."""
METRICS = (
    Metric("frames/frames", is_fraction=False, only=AESTHETIC),
    Metric("frames/consistency", is_fraction=False, only=FLICKERING),
    *(Metric(name, is_fraction=False, only=name) for name in (SUBJECT, BACKGROUND, STYLE)),
)


def _results(judged: Sequence[Judged]) -> Mapping[str, str]:
    """`{dimension: [mean, [{video_path, video_results}]]}`, as VBench writes *_eval_results.json."""
    found = {}
    for metric in METRICS:
        dimension, divisor = metric.only, TEN if metric.only == AESTHETIC else 1.0
        own = [
            {"video_path": f"samples/{each.media.get('file')}", "video_results": each.scores[metric.name] / divisor}
            for each in judged
            if each.scores and VBENCH.counts(metric, each.metadata)
        ]
        if own:
            found[dimension] = [statistics.fmean(float(each["video_results"]) for each in own), own]
    return {"vbench_eval_results.json": json.dumps(found, indent=1) + "\n"}


VIDEO = "unirl.reward.local.video"
VBENCH = Suite(
    name="vbench",
    what="five of VBench's dimensions: looks, flickering, constant subjects and scenes, style",
    makes="video",
    prompts=prepared("vbench"),
    samples_per_prompt=5,
    scorers={
        "frames": {
            "_target_": f"{VIDEO}.frames.FrameScorer",
            "num_frames": ALL_FRAMES,
            "frames_weight": 1.0,
            "consistency_weight": 0.0,
            "scorer": {"_target_": "unirl.reward.local.images.aesthetic.AestheticScorer"},
        },
        SUBJECT: {"_target_": f"{VIDEO}.consistency.SubjectConsistencyScorer"},
        BACKGROUND: {"_target_": f"{VIDEO}.consistency.BackgroundConsistencyScorer"},
        STYLE: {"_target_": f"{VIDEO}.consistency.AppearanceStyleScorer"},
    },
    needs="It needs openai/clip-vit-large-patch14, trl-lib/ddpo-aesthetic-predictor, openai/clip-vit-base-patch32 and "
    "facebook/dino-vitb16 of the hub, or folders: suite.scorers.frames.scorer.model=FOLDER "
    f"suite.scorers.frames.scorer.head=FOLDER suite.scorers.{SUBJECT}.model=FOLDER and so on.",
    metrics=METRICS,
    only_key="dimensions",
    limits=f"no scorer here for {', '.join(MISSING)}, and no filter of moving videos for {FLICKERING}: see VBench",
    publish=_results,
    source="VBench (arXiv 2311.17982), github.com/Vchitect/VBench",
)
