"""The judge that suites ask unless told otherwise, and how to name another one."""

from __future__ import annotations

JUDGE = {"_target_": "unirl.reward.local.judges.vlm_judge.VLMJudge"}
API = "unirl.reward.local.judges.api_judge.APIJudge"


def needs_judge(scorer: str) -> str:
    """How to get the judge of a scorer."""
    place = f"suite.scorers.{scorer}.judge"
    return (
        f"Its judge is a model of the hub, or a folder: {place}.model=FOLDER; or an endpoint, with "
        f"'{place}={{_target_: {API}, base_url: http://host:8000/v1, model: NAME}}'."
    )
