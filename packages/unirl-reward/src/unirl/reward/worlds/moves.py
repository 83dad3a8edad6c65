"""The verifier of the moves world: does a video show exactly the objects of its prompt, each moving as it says?

Every frame is read by the verifier of the shapes world; an object is followed from frame to frame by its colour, and
two objects of a prompt have different colours. Shape letters: B videos, T frames, N frames of all videos, H W pixels,
P colours of the palette and one place for all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unirl.reward.worlds.moves_grammar import DIRECTIONS, MovingObject, parse_prompt
from unirl.reward.worlds.shapes import Objects, as_unit_float, class_histogram, find_objects, match_objects
from unirl.reward.worlds.shapes_grammar import COLORS

MIN_TRAVEL = 0.12
"""Least way from the first frame to the last, as a fraction of the side; drawn videos have 0.22."""
MAX_DRIFT = 0.07
"""Most that the place across the motion, or of what stays, may vary, as a fraction of the side."""
MIN_STEP = 0.25
"""Least step from one frame to the next, as a fraction of the mean step."""
MAX_GROWTH = 1.7
"""Largest ratio of an object's areas in two frames."""
MOTION_WEIGHT = 0.5
"""Share of the motion in the soft score."""


def score_moves(videos: Sequence[Tensor], prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Strict and soft scores of a batch.

    videos: [T, 3, H, W] each, at least two frames of one size, on any device, float in [0, 1] or uint8.
    strict (0 or 1): every frame has exactly the objects asked for, and each moves steadily as asked: at least
    MIN_TRAVEL of the side, forward in every step, without drift across, or nowhere; of steady size.
    soft: half the mean over frames of the shapes world's soft score, half the mean over asked objects of their motion
    (1; 0.5 where the way from first to last frame is right but not steady; else 0). It is 1 exactly when strict is.
    Returns strict_B, soft_B: float32 on the CPU.
    Raises ValueError for a prompt outside the grammar, a video of one frame, or when the number of prompts is not B.
    """
    if len(videos) != len(prompts) or any(each.ndim != 4 or each.shape[1] != 3 or len(each) < 2 for each in videos):
        shapes = sorted({tuple(each.shape) for each in videos})
        raise ValueError(f"expected B videos [T > 1, 3, H, W] and B prompts, got {shapes}, {len(prompts)} prompts")
    specs = [parse_prompt(prompt) for prompt in prompts]
    if not specs:
        return torch.zeros(0), torch.zeros(0)
    pixels_NCHW = np.concatenate([as_unit_float(each) for each in videos])
    lengths = [len(each) for each in videos]
    objects = find_objects(pixels_NCHW)
    asked_BN = np.stack([class_histogram([each.item for each in spec.objects]) for spec in specs])
    is_exact_N, credit_N = match_objects(objects, np.repeat(asked_BN, lengths, axis=0))
    center_NP2, area_NP = _largest_of_each_color(objects, len(pixels_NCHW))
    strict_B, soft_B = [], []
    for spec, end, length in zip(specs, np.cumsum(lengths), lengths, strict=True):
        rows = slice(end - length, end)
        followed = center_NP2[rows], area_NP[rows], pixels_NCHW.shape[-1]
        motion = np.mean([_motion(each, *followed) for each in spec.objects])
        strict_B.append(bool(is_exact_N[rows].all()) and motion == 1)
        soft_B.append((1 - MOTION_WEIGHT) * credit_N[rows].mean() + MOTION_WEIGHT * motion)
    return torch.tensor(strict_B, dtype=torch.float32), torch.tensor(np.array(soft_B), dtype=torch.float32)


def _largest_of_each_color(objects: Objects, num_frames: int) -> tuple[np.ndarray, np.ndarray]:
    """Centre (y, x) and area of the largest region of every colour in every frame; NaN and 0 where there is none."""
    center_NP2 = np.full((num_frames, len(COLORS) + 1, 2), np.nan)
    area_NP = np.zeros((num_frames, len(COLORS) + 1))
    # Of repeated indices the last assignment stays, and areas ascend.
    order = np.argsort(objects.area_K, kind="stable")
    where = objects.image_K[order], objects.color_K[order]
    center_NP2[where] = objects.center_K2[order]
    area_NP[where] = objects.area_K[order]
    return center_NP2, area_NP


def _motion(asked: MovingObject, center_TP2: np.ndarray, area_TP: np.ndarray, side: int) -> float:
    """1: moves steadily as asked; 0.5: only from first to last frame; 0: not, or absent in some frame."""
    color = COLORS.index(asked.item.color)
    center_T2, area_T = center_TP2[:, color], area_TP[:, color]
    if not area_T.all():
        return 0.0
    direction = np.array(DIRECTIONS[asked.motion], dtype=float)
    along_T = center_T2 @ direction
    across_T2 = center_T2 - along_T[:, None] * direction
    travel = along_T[-1] - along_T[0]
    is_moving = bool(direction.any())
    if np.abs(across_T2[-1] - across_T2[0]).max() > MAX_DRIFT * side or (is_moving and travel < MIN_TRAVEL * side):
        return 0.0
    is_steady = np.ptp(across_T2, axis=0).max() <= MAX_DRIFT * side and area_T.max() <= MAX_GROWTH * area_T.min()
    if is_moving:
        is_steady = is_steady and np.diff(along_T).min() >= MIN_STEP * travel / (len(along_T) - 1)
    return 1.0 if is_steady else 0.5
