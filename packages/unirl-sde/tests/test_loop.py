import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, DDIMStrategy, FlashSDEStrategy, FlowSDEStrategy
from unirl.sde.loop import replay, sample, transition_rows
from unirl.sde.noise import initial_noise, step_noise
from unirl.sde.schedule import diffusers_sigmas, linear_sigmas
from unirl.sde.solvers import DPMSolverPP2M, EulerSolver

KERNELS = [FlowSDEStrategy, DanceSDEStrategy, FlashSDEStrategy, CPSSDEStrategy, DDIMStrategy]
KEYS = ["a", "b", "c"]
SHAPE = (2, 4, 4)
SIGMAS = linear_sigmas(6)


class TinyVelocity(nn.Module):
    """A network whose output depends on latent, sigma and step, like a transformer with a time embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Conv2d(2, 8, 3, padding=1)
        self.time = nn.Linear(2, 8)
        self.outer = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
        assert x.dtype == sigma_R.dtype == torch.float32 and step_R.dtype == torch.int64
        assert sigma_R.shape == step_R.shape == x.shape[:1]
        time = self.time(torch.stack([sigma_R, step_R / 10], dim=1))
        return self.outer(torch.tanh(self.inner(x) + time[:, :, None, None]))


@pytest.fixture
def velocity():
    return TinyVelocity()


def noise_of(step: int) -> Tensor:
    return step_noise(KEYS, step, 7, SHAPE)


def run(velocity, sigmas=SIGMAS, strategy=None, **changes: Any):
    keywords: dict[str, Any] = {"eta": 0.7, "sde_indices": [0, 2, 3], "step_noise": noise_of, **changes}
    with torch.no_grad():
        return sample(
            velocity, initial_noise(KEYS, 7, SHAPE), sigmas, strategy=strategy or FlowSDEStrategy(), **keywords
        )


@pytest.mark.parametrize("storage_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel_class", KERNELS)
def test_replay_at_the_same_rows_equals_sampling_bit_for_bit(velocity, kernel_class, storage_dtype):
    trajectory = run(velocity, strategy=kernel_class(), storage_dtype=storage_dtype, keep_means=True)
    x, following = trajectory.transitions()
    assert x.dtype == storage_dtype
    for slot, step in enumerate(trajectory.sde_indices):
        rows = torch.full((3,), step)
        again = replay(
            velocity,
            x[:, slot],
            following[:, slot],
            SIGMAS[rows],
            SIGMAS[rows + 1],
            rows,
            strategy=kernel_class(),
            eta=0.7,
            sigma_max=SIGMAS[1].item(),
        )
        assert torch.equal(again.logp_R, trajectory.sde_logp[:, slot])
        assert torch.equal(again.mean, trajectory.sde_means[:, slot])


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_replay_batched_over_steps_equals_sampling_to_rounding(velocity, kernel_class):
    # Convolutions over 9 rows may add in another order than over 3; log-probs are O(1), so 2e-6 is a few ulps.
    trajectory = run(velocity, strategy=kernel_class())
    x, following = trajectory.transitions()
    sample_R, step_R = transition_rows(3, trajectory.sde_indices)
    again = replay(
        velocity,
        x.flatten(0, 1),
        following.flatten(0, 1),
        SIGMAS[step_R],
        SIGMAS[step_R + 1],
        step_R,
        strategy=kernel_class(),
        eta=0.7,
        sigma_max=SIGMAS[1].item(),
    )
    torch.testing.assert_close(again.logp_R.view(3, 3), trajectory.sde_logp, rtol=2e-6, atol=2e-6)
    assert sample_R.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_replay_carries_gradients_to_the_velocity_only(velocity):
    trajectory = run(velocity)
    x, following = (rows.flatten(0, 1) for rows in trajectory.transitions())
    following.requires_grad_()
    _, step_R = transition_rows(3, trajectory.sde_indices)
    again = replay(
        velocity,
        x,
        following,
        SIGMAS[step_R],
        SIGMAS[step_R + 1],
        step_R,
        strategy=FlowSDEStrategy(),
        eta=0.7,
        sigma_max=SIGMAS[1].item(),
    )
    again.logp_R.sum().backward()
    assert following.grad is None
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in velocity.parameters())


def test_sampling_is_a_chain_of_kernel_steps_written_out(velocity):
    trajectory = run(velocity, keep="all")
    kernel, x = FlowSDEStrategy(), initial_noise(KEYS, 7, SHAPE)
    for step in range(6):
        sigma_R, sigma_next_R = SIGMAS[step].expand(3), SIGMAS[step + 1].expand(3)
        with torch.no_grad():
            v = velocity(x, sigma_R, torch.full((3,), step))
        eta = 0.7 if step in (0, 2, 3) else 0.0
        x = kernel.step(x, v, sigma_R, sigma_next_R, eta=eta, sigma_max=SIGMAS[1].item(), noise=noise_of(step)).next
        assert torch.equal(trajectory.at([step + 1])[:, 0], x)


@pytest.mark.parametrize(
    ("keep", "sde_indices", "positions"),
    [
        ("transitions", [0, 2, 3], [0, 1, 2, 3, 4, 6]),
        ("transitions", [4, 5], [4, 5, 6]),
        ("transitions", [], [6]),
        ("all", [1], [0, 1, 2, 3, 4, 5, 6]),
        ("last", [0, 2, 3], [6]),
    ],
)
def test_kept_positions(velocity, keep, sde_indices, positions):
    trajectory = run(velocity, keep=keep, sde_indices=sde_indices)
    assert trajectory.indices == positions
    assert trajectory.latents.shape == (3, len(positions), *SHAPE)
    assert trajectory.sde_indices == sde_indices
    if sde_indices:
        assert trajectory.sde_logp.shape == (3, len(sde_indices))
    else:
        assert trajectory.sde_logp is None
    assert torch.equal(trajectory.final, trajectory.latents[:, -1])


@pytest.mark.parametrize("storage_dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_does_not_change_the_trajectory(velocity, storage_dtype):
    runs = [run(velocity, keep=keep, storage_dtype=storage_dtype) for keep in ("transitions", "all", "last")]
    assert all(torch.equal(each.final, runs[0].final) for each in runs)
    assert all(torch.equal(each.sde_logp, runs[0].sde_logp) for each in runs)
    assert torch.equal(runs[0].latents, runs[1].at(runs[0].indices))


def test_steps_between_stochastic_ones_keep_float32_state(velocity):
    """Only the latents on both sides of a stochastic step are rounded, so a bf16 store costs an ODE stretch nothing."""
    seen = {}
    run(velocity, sde_indices=[3], storage_dtype=torch.bfloat16, on_step=lambda step, x: seen.__setitem__(step, x))
    rounded = {step: torch.equal(x, x.to(torch.bfloat16).float()) for step, x in seen.items()}
    # on_step(i) sees position i + 1; position 3 is rounded on entry to step 3, after on_step(2) has seen it.
    assert rounded == {0: False, 1: False, 2: False, 3: True, 4: False, 5: False}


def test_sde_indices_may_come_in_any_order(velocity):
    assert torch.equal(run(velocity, sde_indices=[3, 0, 2]).latents, run(velocity).latents)


def test_noise_of_every_sample_is_its_own(velocity):
    """The batch a sample sits in changes its trajectory by no more than the arithmetic of the network."""
    together = run(velocity)
    with torch.no_grad():
        alone = sample(
            velocity,
            initial_noise(["b"], 7, SHAPE),
            SIGMAS,
            strategy=FlowSDEStrategy(),
            eta=0.7,
            sde_indices=[0, 2, 3],
            step_noise=lambda step: step_noise(["b"], step, 7, SHAPE),
        )
    torch.testing.assert_close(alone.latents[0], together.latents[1], rtol=1e-5, atol=1e-5)


def test_deterministic_steps_are_euler(velocity):
    trajectory = run(velocity, sde_indices=[])
    x = initial_noise(KEYS, 7, SHAPE)
    with torch.no_grad():
        for step in range(6):
            x = x + velocity(x, SIGMAS[step].expand(3), torch.full((3,), step)) * (SIGMAS[step + 1] - SIGMAS[step])
    assert torch.equal(trajectory.final, x)
    assert torch.equal(run(velocity, sde_indices=[], solver=EulerSolver()).final, x)


def test_a_solver_takes_over_after_the_last_stochastic_step(velocity):
    plain = run(velocity, sde_indices=[1, 2], keep="all")
    flash = run(velocity, sde_indices=[1, 2], keep="all", solver=DPMSolverPP2M())
    assert torch.equal(plain.at(range(4)), flash.at(range(4)))
    assert torch.equal(plain.sde_logp, flash.sde_logp)
    # Steps 3 and 4 are of second order, step 3 by the prediction of the stochastic step 2; step 5, the last, is Euler.
    x0 = []
    with torch.no_grad():
        for step in (2, 3):
            x = flash.at([step])[:, 0]
            x0.append(x - SIGMAS[step] * velocity(x, SIGMAS[step].expand(3), torch.full((3,), step)))
    snr = [math.log((1 - float(SIGMAS[step])) / float(SIGMAS[step])) for step in (2, 3, 4)]
    extrapolated = x0[1] + (snr[2] - snr[1]) / (2 * (snr[1] - snr[0])) * (x0[1] - x0[0])
    kept = SIGMAS[4] / SIGMAS[3]
    expected = kept * flash.at([3])[:, 0] + (1 - kept) * extrapolated
    torch.testing.assert_close(flash.at([4])[:, 0], expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(plain.at([4]), flash.at([4]), rtol=1e-5, atol=1e-6)


def test_a_solver_that_would_never_run_is_an_error(velocity):
    with pytest.raises(ValueError, match=r"sde_indices = \[0, 5\], 6 steps"):
        run(velocity, sde_indices=[0, 5], solver=DPMSolverPP2M())


def test_first_step_uses_the_second_sigma_of_its_own_schedule(velocity):
    for sigmas in (linear_sigmas(6), diffusers_sigmas(6)):
        trajectory = run(velocity, sigmas=sigmas, sde_indices=[0], keep_means=True)
        residual = trajectory.at([1])[:, 0] - trajectory.sde_means[:, 0]
        second = sigmas[1].item()
        std = 0.7 / math.sqrt(1 - second) * math.sqrt(1 - second)
        torch.testing.assert_close(residual, std * noise_of(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("solver", [None, DPMSolverPP2M()])
@pytest.mark.parametrize("kernel_class", KERNELS)
def test_nothing_is_read_back_from_the_device_and_nothing_leaves_it(velocity, kernel_class, solver):
    """A meta tensor stands for one on an accelerator: it has a device but no values, so any read would raise."""
    velocity = velocity.to("meta")
    trajectory = sample(
        velocity,
        torch.empty(3, *SHAPE, device="meta"),
        SIGMAS,
        strategy=kernel_class(),
        eta=0.7,
        sde_indices=[0, 2],
        step_noise=noise_of,
        storage_dtype=torch.bfloat16,
        solver=solver,
        keep_means=True,
    )
    x, following = (rows.flatten(0, 1) for rows in trajectory.transitions())
    rows = [torch.empty(6, device="meta") for _ in range(2)]
    again = replay(
        velocity, x, following, *rows, torch.zeros(6, dtype=torch.int64, device="meta"),
        strategy=kernel_class(), eta=0.7, sigma_max=0.9,
    )  # fmt: skip
    for tensor in (
        trajectory.latents,
        trajectory.sde_logp,
        trajectory.sde_means,
        again.logp_R,
        again.mean,
        again.std_R,
    ):
        assert tensor is not None and tensor.device.type == "meta"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sde_indices": [6]}, r"sde_indices = \[6\] must be distinct and within 0 .. 5"),
        ({"sde_indices": [-1]}, r"sde_indices = \[-1\]"),
        ({"sde_indices": [1, 1]}, r"sde_indices = \[1, 1\]"),
        ({"eta": 0.0}, "eta = 0.0"),
        ({"eta": -1.0}, "eta = -1.0"),
        ({"step_noise": None}, "step_noise = None"),
        ({"keep": "some"}, "keep = 'some'"),
        ({"sde_indices": [], "keep_means": True}, "keep_means needs stochastic steps"),
        ({"sigmas": SIGMAS.flip(0)}, "strictly decreasing"),
        ({"sigmas": SIGMAS[None]}, r"got shape \(1, 7\)"),
        ({"sigmas": torch.tensor([1.0, math.nan, 0.0])}, "strictly decreasing"),
        ({"sigmas": torch.tensor([1.5, 0.5, 0.0])}, r"within \[0, 1\]"),
    ],
)
def test_bad_arguments_are_named(velocity, changes, message):
    with pytest.raises(ValueError, match=message):
        run(velocity, **changes)


def test_positions_that_were_not_kept_are_named(velocity):
    with pytest.raises(ValueError, match=r"positions \[5\] were not kept"):
        run(velocity).at([4, 5])


def test_replay_without_noise_is_an_error(velocity):
    x = torch.zeros(1, *SHAPE)
    with pytest.raises(ValueError, match="eta = 0"):
        replay(
            velocity,
            x,
            x,
            SIGMAS[:1],
            SIGMAS[1:2],
            torch.tensor([0]),
            strategy=FlowSDEStrategy(),
            eta=0.0,
            sigma_max=0.9,
        )


def test_a_trajectory_goes_on_from_any_position_before_the_stochastic_steps(velocity):
    whole = run(velocity, sde_indices=[3, 4], keep="all")
    with torch.no_grad():
        rest = sample(
            velocity,
            whole.at([2])[:, 0],
            SIGMAS,
            strategy=FlowSDEStrategy(),
            eta=0.7,
            sde_indices=[3, 4],
            step_noise=noise_of,
            keep="all",
            start=2,
        )
    assert rest.indices == [2, 3, 4, 5, 6]
    assert torch.equal(rest.latents, whole.latents[:, 2:])
    torch.testing.assert_close(rest.sde_logp, whole.sde_logp, rtol=0, atol=0)
    for start, steps, message in ((6, [], "start = 6 must lie in 0 .. 5"), (4, [3], "before the stochastic steps")):
        with pytest.raises(ValueError, match=message):
            run(velocity, sde_indices=steps, start=start)
    with pytest.raises(ValueError, match="a solver needs every step after the last stochastic one"):
        run(velocity, sde_indices=[], solver=DPMSolverPP2M(), start=1)
