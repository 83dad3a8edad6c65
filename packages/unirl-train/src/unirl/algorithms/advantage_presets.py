"""Conventions of advantages by name. Imports no torch, so that rules of recipes read them."""

from __future__ import annotations

from unirl.types.recipe import Part

PRESETS: dict[str, dict[str, object]] = {
    "flow_grpo": {"center": "group", "scale": "group", "ddof": 0, "eps": 1e-4},
    "flow_grpo_global_std": {"center": "group", "scale": "batch", "ddof": 0, "eps": 1e-4},
    "dance_grpo": {"center": "group", "scale": "group", "ddof": 1, "eps": 1e-8},
    "unirl": {"center": "group", "scale": "group", "ddof": 0, "eps": 1e-8, "eps_inside_sqrt": True},
    "unirl_global_std": {"center": "group", "scale": "batch", "ddof": 1, "eps": 1e-8},
    "trl": {"center": "group", "scale": "group", "ddof": 1, "eps": 1e-4},
    "dr_grpo": {"center": "group", "scale": "none", "ddof": 0, "eps": 0.0},
    "dapo": {"center": "group", "scale": "group", "ddof": 1, "eps": 1e-6},
    "maxrl": {"center": "group", "scale": "mean", "ddof": 0, "eps": 0.0},
    "rloo": {"center": "group", "scale": "none", "ddof": 0, "eps": 0.0, "leave_one_out": True},
    "reinforce_pp": {
        "center": "batch",
        "scale": "batch",
        "ddof": 1,
        "eps": 1e-8,
        "eps_inside_sqrt": True,
        "statistics": "tokens",
    },
    "reinforce_pp_baseline": {
        "center": "group",
        "scale": "residual",
        "ddof": 1,
        "eps": 1e-8,
        "eps_inside_sqrt": True,
        "statistics": "tokens",
    },
    "batch_whitened": {"center": "batch", "scale": "batch", "ddof": 0, "eps": 1e-8, "eps_inside_sqrt": True},
    "group_centred_batch_whitened": {
        "center": "group",
        "scale": "residual",
        "ddof": 0,
        "eps": 1e-8,
        "eps_inside_sqrt": True,
    },
}
"""Conventions of reference implementations (facts checked against their closed forms in the tests): `dapo` is verl's,
`rloo` arXiv 2402.14740, `maxrl` arXiv 2602.02710, `reinforce_pp` and its baseline variant arXiv 2501.03262, whose
statistics count tokens as verl's and the authors' code do; `batch_whitened` and `group_centred_batch_whitened` are the
same over samples."""


def with_preset(own: Part) -> dict[str, object]:
    """The options of a section's preset with those that the section names."""
    return {**PRESETS.get(own.get("preset"), {}), **{key: value for key, value in own.node.items() if value}}
