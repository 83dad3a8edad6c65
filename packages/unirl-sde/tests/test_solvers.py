import math

import pytest
import torch
from torch import Tensor

from unirl.sde.schedule import dpm_sigmas, linear_sigmas, unipc_sigmas
from unirl.sde.solvers import DPMSolverPP2M, EulerSolver, Solver, UniPCSolver

MEAN, STD = 0.7, 0.4


def gaussian_velocity(x: Tensor, sigma: float) -> Tensor:
    """E[eps - x0 | x] for x0 ~ N(MEAN, STD^2)."""
    u = x - (1 - sigma) * MEAN
    variance = (1 - sigma) ** 2 * STD**2 + sigma**2
    return sigma * u / variance - MEAN - (1 - sigma) * STD**2 * u / variance


def deviation(sigma: float) -> float:
    """Standard deviation of x_sigma about (1 - sigma) MEAN; the probability-flow ODE scales with it."""
    return math.sqrt((1 - sigma) ** 2 * STD**2 + sigma**2)


def solve(solver: Solver, x: Tensor, sigmas: Tensor) -> Tensor:
    solver.reset(sigmas)
    for index, sigma in enumerate(sigmas[:-1].tolist()):
        x = solver.step(x, gaussian_velocity(x, sigma), index)
    return x


def error(solver: Solver, num_steps: int, start: float, end: float) -> float:
    """Largest error at `end` of `num_steps` equal steps from `start`, against the known solution, in float64."""
    u = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    sigmas = torch.linspace(start, end, num_steps + 1, dtype=torch.float64)
    found = solve(solver, (1 - start) * MEAN + deviation(start) * u, sigmas)
    return (found - (1 - end) * MEAN - deviation(end) * u).abs().max().item()


def order(solver: Solver, start: float, end: float) -> float:
    """Order of convergence between 40 and 160 steps."""
    return math.log(error(solver, 40, start, end) / error(solver, 160, start, end), 4)


@pytest.mark.parametrize("solver", [DPMSolverPP2M(), UniPCSolver()])
def test_multistep_solvers_converge_with_second_order(solver):
    # UniPC's steps are of third order, but for the last, which nothing corrects.
    assert 1.95 < order(solver, 0.95, 0.3) < 2.05


@pytest.mark.parametrize("solver", [DPMSolverPP2M(), UniPCSolver()])
def test_multistep_solvers_keep_most_of_their_order_over_the_whole_schedule(solver):
    # The log-SNR is infinite at both ends, which costs a logarithm.
    assert 1.5 < order(solver, 1.0, 0.0) < 2.2


def test_euler_converges_with_first_order():
    # EulerSolver rounds to float32, far below a first-order error.
    assert 0.85 < order(EulerSolver(), 1.0, 0.0) < 1.15


def test_multistep_solvers_beat_euler_at_the_step_counts_of_evaluation():
    for num_steps in (10, 20, 40):
        for solver in (DPMSolverPP2M(), UniPCSolver()):
            assert error(solver, num_steps, 1.0, 0.0) < error(EulerSolver(), num_steps, 1.0, 0.0) / 2


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("num_steps", [4, 10, 25])
def test_dpm_solver_equals_the_one_of_diffusers(num_steps, shift):
    """Their own flow sigmas (which start below 1) and a random velocity field; both end with a first-order step."""
    diffusers = pytest.importorskip("diffusers")
    theirs = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=shift,
        algorithm_type="dpmsolver++",
        solver_type="midpoint",
        lower_order_final=False,
        final_sigmas_type="zero",
    )
    theirs.set_timesteps(num_steps)
    ours = DPMSolverPP2M()
    ours.reset(theirs.sigmas)
    generator = torch.Generator().manual_seed(0)
    x = y = torch.randn(2, 3, 4, generator=generator)
    for index, timestep in enumerate(theirs.timesteps):
        v = torch.randn(2, 3, 4, generator=generator)
        x = ours.step(x, v, index)
        y = theirs.step(v, timestep, y, return_dict=False)[0]
        # diffusers keeps its coefficients in float32.
        torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-5)


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
# scheduler_config.json of Sana 1600M and of Wan 2.1 and 2.2, where it differs from the classes' defaults.
SANA = {**FLOW, "flow_shift": 3.0, "algorithm_type": "dpmsolver++", "solver_order": 2, "final_sigmas_type": "zero"}
WAN = {**FLOW, "flow_shift": 3.0, "solver_order": 2, "solver_type": "bh2", "final_sigmas_type": "zero"}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("num_steps", [2, 3, 8, 20, 50])
@pytest.mark.parametrize(
    ("scheduler", "released", "ours", "levels"),
    [
        ("DPMSolverMultistepScheduler", SANA, DPMSolverPP2M(), dpm_sigmas),
        ("UniPCMultistepScheduler", WAN, UniPCSolver(), unipc_sigmas),
        ("UniPCMultistepScheduler", {**WAN, "flow_shift": 5.0}, UniPCSolver(), unipc_sigmas),
    ],
    ids=["sana", "wan", "wan-720p"],
)
def test_released_schedulers_are_walked_step_by_step(scheduler, released, ours, levels, num_steps):
    """On our own levels, which are theirs but for their first (1 - 1e-6); a random velocity field, float32.

    Tolerance: theirs has coefficients of float32, with differences of logarithms up to 14.
    """
    diffusers = pytest.importorskip("diffusers")
    theirs = getattr(diffusers, scheduler)(**released)
    theirs.set_timesteps(num_steps)
    sigmas = levels(num_steps, released["flow_shift"])
    torch.testing.assert_close(sigmas, theirs.sigmas, rtol=0, atol=2e-6)
    ours.reset(sigmas)
    generator = torch.Generator().manual_seed(0)
    x = y = torch.randn(2, 3, 4, 5, generator=generator)
    for index, timestep in enumerate(theirs.timesteps):
        theirs._step_index = index  # small steps share an integer timestep
        v = torch.randn(x.shape, generator=generator)
        x = ours.step(x, v, index)
        y = theirs.step(v, timestep, y, return_dict=False)[0]
        torch.testing.assert_close(x, y, rtol=1e-5, atol=3e-5)


def test_unipc_takes_over_after_an_observed_step():
    """Without correcting the step that it did not take, and with the prediction made there."""
    sigmas = linear_sigmas(5)
    solver = UniPCSolver()
    solver.reset(sigmas)
    generator = torch.Generator().manual_seed(0)
    x, v, after, v_after = torch.randn(4, 2, 3, generator=generator)
    solver.observe(x, v, 1)
    found = solver.step(after, v_after, 2)
    # The predicted step of second order alone.
    lambdas = ((1 - sigmas) / sigmas).log()
    m, previous = after - sigmas[2] * v_after, x - sigmas[1] * v
    r = (lambdas[1] - lambdas[2]) / (lambdas[3] - lambdas[2])
    shrink = sigmas[3] / sigmas[2]
    torch.testing.assert_close(found, shrink * after + (1 - shrink) * (m + (previous - m) / (2 * r)))


def test_first_and_last_steps_are_euler():
    sigmas = linear_sigmas(5)
    dpm, euler = DPMSolverPP2M(), EulerSolver()
    for solver in (dpm, euler):
        solver.reset(sigmas)
    x = torch.linspace(-1, 1, 8)[:, None]
    for index, sigma in enumerate(sigmas[:-1].tolist()):
        v = torch.cos(3 * x) * (index + 1) + sigma
        second, first = dpm.step(x, v, index), euler.step(x, v, index)
        # Step 1 follows a step from sigma = 1, whose log-SNR is infinite; steps 2 and 3 are of second order.
        assert torch.allclose(second, first, rtol=1e-5, atol=1e-6) == (index in (0, 1, 4))
        x = first


def test_a_straight_path_is_solved_exactly_by_any_solver():
    x = torch.tensor([[2.0], [-1.0]])
    for solver in (EulerSolver(), DPMSolverPP2M(), UniPCSolver()):
        state = x
        solver.reset(linear_sigmas(7))
        for index in range(7):
            state = solver.step(state, x, index)
        torch.testing.assert_close(state, torch.zeros_like(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("solver", [DPMSolverPP2M(), UniPCSolver()])
def test_reset_forgets_the_previous_trajectory(solver):
    x = torch.linspace(-1, 1, 5)[:, None]
    first = solve(solver, x, linear_sigmas(6))
    solve(solver, -x, linear_sigmas(9))
    assert torch.equal(solve(solver, x, linear_sigmas(6)), first)


@pytest.mark.parametrize("solver", [DPMSolverPP2M(), UniPCSolver()])
def test_state_stays_in_its_precision(solver):
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        solver.reset(linear_sigmas(3))
        x = torch.ones(2, 3, dtype=dtype)
        assert solver.step(x, x, 0).dtype == expected


@pytest.mark.parametrize("solver_class", [EulerSolver, DPMSolverPP2M, UniPCSolver])
def test_mistakes_are_named(solver_class):
    solver, x = solver_class(), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="before reset"):
        solver.step(x, x, 0)
    solver.reset(linear_sigmas(4))
    with pytest.raises(ValueError, match=r"index = 4 is outside 0 .. 3"):
        solver.step(x, x, 4)
    with pytest.raises(ValueError, match="velocity has shape"):
        solver.step(x, x[:, :2], 0)
