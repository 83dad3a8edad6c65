"""Sampling in stages where samples share their first steps: the same trajectories as one by one, in fewer forwards."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.loop import sample
from unirl.sde.noise import initial_noise, step_noise
from unirl.sde.schedule import linear_sigmas
from unirl.sde.shared_steps import sample_shared
from unirl.sde.solvers import DPMSolverPP2M

SHAPE, SEED, NUM_SAMPLES = (2, 4, 4), 7, 12
SIGMAS = linear_sigmas(6)
STAGES = [(0, 6), (1, 3), (3, 1)]
"""Two trees of six: one until step 1, two of three leaves until step 3, then alone."""
STARTS = ["a"] * 6 + ["b"] * 6
KEYS = [f"{start}{leaf}" for start in "ab" for leaf in range(6)]


class Field(nn.Module):
    """Elementwise in the rows, so that a row's velocity has the same bits in any batch."""

    def forward(self, x: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
        return torch.tanh(x * (1 + step_R.float()[:, None, None, None])) + sigma_R[:, None, None, None]


def size_at(step: int) -> int:
    return next(size for start, size in reversed(STAGES) if start <= step)


def noise(step: int, rows: list[int]) -> Tensor:
    return step_noise([KEYS[row] for row in rows], step, SEED, SHAPE)


def shared(**changes: Any):
    seen: list[tuple[int, int]] = []
    field = Field()

    def velocity_of(rows: list[int]):
        def velocity(x: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
            assert len(x) == len(rows)
            seen.append((int(step_R[0]), len(x)))
            return field(x, sigma_R, step_R)

        return velocity

    options: dict[str, Any] = {
        "strategy": FlowSDEStrategy(),
        "eta": 0.7,
        "sde_indices": [1, 2, 3],
        "stages": STAGES,
        **changes,
    }
    made = sample_shared(velocity_of, initial_noise(STARTS, SEED, SHAPE), SIGMAS, step_noise=noise, **options)
    return made, seen


def one_by_one(**changes: Any):
    """Every sample for itself, with the noise of the first sample that shares its step."""

    def leaders(step: int) -> list[int]:
        return [row - row % size_at(step) for row in range(NUM_SAMPLES)]

    options: dict[str, Any] = {"strategy": FlowSDEStrategy(), "eta": 0.7, "sde_indices": [1, 2, 3], **changes}
    return sample(
        Field(), initial_noise(STARTS, SEED, SHAPE), SIGMAS, step_noise=lambda i: noise(i, leaders(i)), **options
    )


@pytest.mark.parametrize("keep", ["transitions", "all", "last"])
@pytest.mark.parametrize("storage_dtype", [torch.float32, torch.bfloat16])
def test_shared_steps_change_no_bit_of_any_trajectory(keep, storage_dtype):
    options = {"keep": keep, "storage_dtype": storage_dtype, "keep_means": True}
    made, _ = shared(**options)
    alone = one_by_one(**options)
    assert (made.indices, made.sde_indices) == (alone.indices, alone.sde_indices)
    for name in ("latents", "sde_logp", "sde_means"):
        assert torch.equal(getattr(made, name), getattr(alone, name)), name


def test_every_shared_step_is_one_forward_of_fewer_rows():
    _, seen = shared()
    assert seen == [(step, NUM_SAMPLES // size_at(step)) for step in range(6)]


def test_samples_are_equal_until_they_part_and_differ_from_there():
    made, _ = shared(keep="all")
    for position in range(7):
        size = 6 if position <= 1 else 3 if position <= 3 else 1  # a step ends at the position after it
        x = made.at([position])[:, 0]
        assert x.unique(dim=0).shape[0] == NUM_SAMPLES // size, position
        assert torch.equal(x, x[torch.arange(NUM_SAMPLES) // size * size])


def test_one_stage_is_the_loop_and_a_solver_takes_the_last_steps():
    made, _ = shared(stages=[(0, 1)], sde_indices=[1, 2])
    keys: dict[str, Any] = {"strategy": FlowSDEStrategy(), "eta": 0.7, "sde_indices": [1, 2]}
    start, rows = initial_noise(STARTS, SEED, SHAPE), list(range(NUM_SAMPLES))
    assert torch.equal(
        made.latents, sample(Field(), start, SIGMAS, step_noise=lambda i: noise(i, rows), **keys).latents
    )
    solved, _ = shared(solver=DPMSolverPP2M())
    assert torch.equal(solved.final, one_by_one(solver=DPMSolverPP2M()).final)
    assert not torch.equal(solved.final, shared()[0].final)


@pytest.mark.parametrize(
    "stages", [[], [(0, 5), (1, 1)], [(0, 6), (1, 4), (2, 1)], [(0, 6), (1, 3)], [(0, 6), (4, 1)], [(0, 6), (0, 1)]]
)
def test_stages_that_do_not_fit_are_refused(stages):
    with pytest.raises(ValueError, match="stages"):
        shared(stages=stages)
