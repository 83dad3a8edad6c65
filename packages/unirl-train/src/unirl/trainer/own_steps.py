"""Deals stochastic steps to samples that have one each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from unirl.sde.noise import keyed_permutation, keyed_uniform
from unirl.types.batch import rows_by
from unirl.types.sampling import DiffusionSamplingParams


def deal_steps(group_ids: Sequence[str], params: DiffusionSamplingParams, rollout_id: int) -> list[int]:
    """The one stochastic step of each sample; empty where samples have all of them.

    params: resolved for this rollout. "prompt": the g-th of G groups, in an order drawn for each rollout, takes step
    floor((g + u) S / G) of the S steps, with one u in [0, 1) drawn for all. So each step serves its share of the
    prompts, rounded up or down, and over rollouts each serves as many as any other, also where G < S.
    "branch": the samples of a group take the steps in order, equally many each.
    """
    steps = sorted(params.sde_indices or [])
    if params.one_step is None or not steps:
        return []
    groups = rows_by(group_ids)
    dealt = [0] * len(group_ids)
    key = f"own_steps::{rollout_id}::{next(iter(groups), '')}"
    places = keyed_permutation(key, params.seed, len(groups)).tolist()
    offset = float(keyed_uniform([key], params.seed, (1,)))
    for place, rows in zip(places, groups.values(), strict=True):
        for number, row in enumerate(rows):
            share = (place + offset) / len(groups) if params.one_step == "prompt" else number / len(rows)
            # A product of floats may fall an ulp short of the integer, and a share just below 1 round up to it.
            dealt[row] = steps[min(math.floor(share * len(steps) + 1e-9), len(steps) - 1)]
    return dealt
