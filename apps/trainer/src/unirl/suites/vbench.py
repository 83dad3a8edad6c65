"""VBench: the dimensions of video quality that a scorer here measures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence

from unirl.suites.suite import Judged, Metric, Suite, prepared

AESTHETIC, FLICKERING = "aesthetic_quality", "temporal_flickering"
MISSING = (
    "subject_consistency background_consistency motion_smoothness dynamic_degree imaging_quality object_class "
    "multiple_objects human_action color spatial_relationship scene appearance_style temporal_style overall_consistency"
).split()
ALL_FRAMES = 100_000
TEN = 10.0
"""VBench divides the aesthetic predictor's value by it."""


def _results(judged: Sequence[Judged]) -> Mapping[str, str]:
    """`{dimension: [mean, [{video_path, video_results}]]}`, as VBench writes *_eval_results.json."""
    found = {}
    for dimension, name, divisor in ((AESTHETIC, "frames/frames", TEN), (FLICKERING, "frames/consistency", 1.0)):
        own = [
            {"video_path": f"samples/{each.media.get('file')}", "video_results": each.scores[name] / divisor}
            for each in judged
            if each.scores and dimension in each.metadata.get("dimensions", ())
        ]
        if own:
            found[dimension] = [statistics.fmean(float(each["video_results"]) for each in own), own]
    return {"vbench_eval_results.json": json.dumps(found, indent=1) + "\n"}


VBENCH = Suite(
    name="vbench",
    what="aesthetic quality and temporal flickering of VBench",
    makes="video",
    prompts=prepared("vbench"),
    samples_per_prompt=5,
    scorers={
        "frames": {
            "_target_": "unirl.reward.local.video.frames.FrameScorer",
            "num_frames": ALL_FRAMES,
            "frames_weight": 1.0,
            "consistency_weight": 0.0,
            "scorer": {"_target_": "unirl.reward.local.images.aesthetic.AestheticScorer"},
        }
    },
    needs="It needs openai/clip-vit-large-patch14 and trl-lib/ddpo-aesthetic-predictor of the hub, or folders: "
    "suite.scorers.frames.scorer.model=FOLDER suite.scorers.frames.scorer.head=FOLDER.",
    metrics=(
        Metric("frames/frames", is_fraction=False, only=AESTHETIC),
        Metric("frames/consistency", is_fraction=False, only=FLICKERING),
    ),
    only_key="dimensions",
    limits=f"no scorer here for {', '.join(MISSING)}, and no filter of moving videos for {FLICKERING}: see VBench",
    publish=_results,
    source="VBench (arXiv 2311.17982), github.com/Vchitect/VBench",
)
