"""DGPO on latents of the way to a sample: a surrogate that learns the reward of unfinished images, too.

A sample's advantage is that of every latent of its trajectory, since the sampler is deterministic. For each group and
level one step n of T is drawn, the later the likelier, with probability proportional to n + 1; all samples of the group
are taken after it and noised alike (`unirl.algorithms.trajectory_matching`), and the loss weighs (n + 1) / T.
Source: the code of TDM-R1, Luo et al. 2026 (arXiv 2603.07700).
Legend: B samples, K levels per sample, T steps, R = B K rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unirl.algorithms.base import MicroBatch, row_chunks, sampled_with
from unirl.algorithms.dgpo import DGPO
from unirl.algorithms.forward_process import ForwardRows, nearest_steps, unit_order
from unirl.algorithms.trajectory_matching import StepLevels, latent_target, raised
from unirl.sde.noise import keyed_normal, keyed_uniform


def drawn_steps(draws: Tensor, num_steps: int) -> Tensor:
    """Steps 0..T-1, int64, for draws uniform in [0, 1): n with probability (n + 1) / (1 + 2 + ... + T)."""
    upto_T = torch.arange(1, num_steps + 1, dtype=torch.float64).cumsum(0)
    return torch.searchsorted(upto_T / upto_T[-1], draws.double(), right=True).clamp(max=num_steps - 1)


@dataclass(frozen=True)
class LatentRows(ForwardRows):
    """Rows whose `x0` are latents at some level; the loss of each weighs `weight_R`."""

    weight_R: Tensor


class TrajectoryDGPO(DGPO):
    """DGPO whose rows are latents of the trajectories. Levels are uniform between `min_level` and 1."""

    def __init__(self, *args: Any, min_level: float, **options: Any) -> None:  # Any: those of DGPO
        super().__init__(*args, **options)
        self.min_level = min_level

    def forward_rows(self, micro: MicroBatch) -> Iterator[tuple[slice, LatentRows]]:
        """The rows of a micro-batch, `rows_per_forward` at a time, with their place among all of its rows."""
        segment = micro.segment
        params = sampled_with(segment.params, self._params)
        device, keys, count = segment.latents.device, self.noise_keys(micro.track), self.num_levels(segment)
        draws_2BK = torch.stack([
            keyed_uniform([f"{key}::{name}" for key in keys], self.seed, (count,)) for name in ("steps", "levels")
        ])  # fmt: skip
        shape = (count, *segment.clean_latents.shape[1:])
        noise = keyed_normal([f"{key}::noise" for key in keys], self.seed, shape).to(device).flatten(0, 1)
        order_R = unit_order(len(keys), count, self.samples_per_unit)
        owner_R, place_R = order_R // count, order_R.to(device)
        step_R = drawn_steps(draws_2BK[0].flatten(), segment.num_steps)[order_R]
        sigmas = segment.sigmas.cpu()
        at = StepLevels(sigmas[step_R], sigmas[step_R + 1])
        level_R = at.drawn(draws_2BK[1].flatten()[order_R], self.min_level, 1.0, levels="above").to(device)
        after_R, weight_R = at.after.to(device), ((step_R + 1) / segment.num_steps).float().to(device)
        slots_R = torch.tensor([segment.slot_of(step + 1) for step in step_R.tolist()])
        near_R = nearest_steps(segment, level_R)
        for rows in row_chunks(len(order_R), self.rows_per_forward):
            x_m, eps = segment.latents[owner_R[rows], slots_R[rows]].float(), noise[place_R[rows]]
            x_s = raised(x_m, eps, after_R[rows], level_R[rows])
            conditions = {name: item.select(owner_R[rows]) for name, item in micro.track.conditions.items()}

            def velocity(x_s=x_s, rows=rows, conditions=conditions) -> Tensor:
                return self._pipeline.velocity(conditions, x_s, level_R[rows], near_R[rows], params).float()

            target = latent_target(x_m, eps, after_R[rows], level_R[rows])
            sample_R = owner_R[rows].to(device)
            yield rows, LatentRows(sample_R, x_m, x_s, target, level_R[rows], velocity, weight_R[rows])

    def row_weights(self, rows: ForwardRows) -> Tensor | None:
        """(n + 1) / T of the step that a row was taken after."""
        assert isinstance(rows, LatentRows)  # noqa: S101 - made above
        return rows.weight_R
