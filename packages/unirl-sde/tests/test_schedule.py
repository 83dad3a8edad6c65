import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.sde.schedule import (
    SigmaSchedule,
    compressed_tail,
    diffusers_sigmas,
    dpm_sigmas,
    dynamic_mu,
    dynamic_sigmas,
    empirical_mu,
    linear_sigmas,
    unipc_sigmas,
)

UNKNOWN: Any = "unknown"
STEPS = [1, 2, 4, 10, 16, 25, 28, 50]
SHIFTS = [1.0, 1.5, 3.0, 5.0, 7.0, 12.0]
# Height and width in pixels; FLUX and Qwen-Image have 16 x 16 pixels per token.
RESOLUTIONS = [(256, 256), (512, 512), (720, 720), (768, 1344), (1024, 1024), (2048, 2048)]


def scheduler_of(**settings: Any) -> Any:
    diffusers = pytest.importorskip("diffusers")
    return diffusers.FlowMatchEulerDiscreteScheduler(**settings)


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """1e-6 absolute; diffusers computes its grid partly in float32."""
    assert ours.dtype == torch.float32 and ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("num_steps", STEPS)
def test_diffusers_convention_equals_set_timesteps(num_steps, shift):
    scheduler = scheduler_of(shift=shift)
    scheduler.set_timesteps(num_steps)
    agree(diffusers_sigmas(num_steps, shift), scheduler.sigmas)
    agree(SigmaSchedule(convention="diffusers", shift=shift).sigmas(num_steps), scheduler.sigmas)


@pytest.mark.parametrize("num_train_timesteps", [100, 1000, 4000])
def test_diffusers_convention_follows_the_number_of_training_timesteps(num_train_timesteps):
    scheduler = scheduler_of(shift=3.0, num_train_timesteps=num_train_timesteps)
    scheduler.set_timesteps(10)
    agree(diffusers_sigmas(10, 3.0, num_train_timesteps), scheduler.sigmas)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("num_steps", STEPS)
def test_unipc_convention_equals_set_timesteps(num_steps, shift):
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )
    scheduler.set_timesteps(num_steps)
    sigmas = unipc_sigmas(num_steps, shift)
    agree(sigmas[1:], scheduler.sigmas[1:])
    assert sigmas[0] == 1 and scheduler.sigmas[0] == pytest.approx(1 - 1e-6, abs=1e-7)
    assert torch.equal(SigmaSchedule(convention="unipc", shift=shift).sigmas(num_steps), sigmas)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("num_steps", STEPS)
def test_dpm_convention_equals_set_timesteps(num_steps, shift):
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )
    scheduler.set_timesteps(num_steps)
    agree(dpm_sigmas(num_steps, shift), scheduler.sigmas)
    agree(SigmaSchedule(convention="dpm", shift=shift).sigmas(num_steps), scheduler.sigmas)
    saved = {**scheduler.config, "_class_name": "DPMSolverMultistepScheduler"}
    assert SigmaSchedule.from_scheduler_config(saved) == SigmaSchedule(convention="dpm", shift=shift)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("num_steps", STEPS)
def test_linear_convention_equals_diffusers_with_explicit_sigmas(num_steps, shift):
    scheduler = scheduler_of(shift=shift)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64).tolist())
    agree(linear_sigmas(num_steps, shift), scheduler.sigmas)
    agree(SigmaSchedule(convention="linear", shift=shift).sigmas(num_steps), scheduler.sigmas)


@pytest.mark.parametrize(
    ("constants", "settings"),
    [
        ({}, {}),
        ({"max_seq_len": 8192, "max_shift": 0.9, "shift_terminal": 0.02}, {"shift_terminal": 0.02}),
        ({"time_shift_type": "linear"}, {"time_shift_type": "linear"}),
    ],
    ids=["flux", "qwen_image", "linear_time_shift"],
)
@pytest.mark.parametrize("resolution", RESOLUTIONS)
@pytest.mark.parametrize("num_steps", STEPS[1:])
def test_dynamic_convention_equals_diffusers(num_steps, resolution, constants, settings):
    tokens = (resolution[0] // 16) * (resolution[1] // 16)
    schedule = SigmaSchedule(convention="dynamic", **constants)
    mu = dynamic_mu(tokens, schedule.base_seq_len, schedule.max_seq_len, schedule.base_shift, schedule.max_shift)
    scheduler = scheduler_of(use_dynamic_shifting=True, **settings)
    grid = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64).tolist()
    scheduler.set_timesteps(sigmas=grid, mu=mu)
    agree(schedule.sigmas(num_steps, image_seq_len=tokens), scheduler.sigmas)
    agree(dynamic_sigmas(num_steps, mu, schedule.time_shift_type, schedule.shift_terminal), scheduler.sigmas)


@pytest.mark.parametrize("convention", ["linear", "diffusers"])
def test_shift_terminal_of_a_static_schedule_equals_diffusers(convention):
    scheduler = scheduler_of(shift=3.0, shift_terminal=0.1)
    grid = {"linear": {"sigmas": torch.linspace(1, 0.1, 10).tolist()}, "diffusers": {"num_inference_steps": 10}}
    scheduler.set_timesteps(**grid[convention])
    agree(SigmaSchedule(convention=convention, shift=3.0, shift_terminal=0.1).sigmas(10), scheduler.sigmas)


def test_dynamic_mu_equals_the_pipelines():
    pipeline = pytest.importorskip("diffusers.pipelines.flux.pipeline_flux")
    for tokens in (64, 256, 1024, 4096, 16384):
        assert dynamic_mu(tokens) == pytest.approx(pipeline.calculate_shift(tokens), abs=1e-12)
    assert dynamic_mu(1024) == pytest.approx(0.63)
    assert dynamic_mu(1024, max_seq_len=8192, max_shift=0.9) == pytest.approx(0.5387, abs=1e-4)


@pytest.mark.parametrize("num_steps", [1, 4, 10, 28, 50, 200])
@pytest.mark.parametrize("tokens", [16, 1024, 4096, 4300, 4301, 16384])
def test_the_empirical_shift_equals_flux2s(tokens, num_steps):
    pipeline = pytest.importorskip("diffusers.pipelines.flux2.pipeline_flux2_klein")
    mu = pipeline.compute_empirical_mu(tokens, num_steps)
    # The published lines are evaluated in another order, in float64 both.
    assert empirical_mu(tokens, num_steps) == pytest.approx(mu, rel=1e-12)
    scheduler = scheduler_of(use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64).tolist(), mu=mu)
    agree(SigmaSchedule(convention="empirical").sigmas(num_steps, tokens), scheduler.sigmas)


def test_the_two_conventions_at_ten_steps_and_shift_three():
    twice = [1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0]
    once = [1, 0.9643, 0.9231, 0.8750, 0.8182, 0.7500, 0.6667, 0.5625, 0.4286, 0.2500, 0]
    # The published values have four digits.
    assert diffusers_sigmas(10).tolist() == pytest.approx(twice, abs=6e-5)
    assert linear_sigmas(10).tolist() == pytest.approx(once, abs=6e-5)


@settings(deadline=None)  # a loaded machine is not a failure
@given(
    num_steps=st.integers(1, 200),
    shift=st.floats(0.2, 20),
    tokens=st.integers(16, 20_000),
    terminal=st.none() | st.floats(0.005, 0.3),
    convention=st.sampled_from(["linear", "diffusers", "unipc", "dpm", "dynamic", "empirical"]),
)
def test_every_schedule_falls_strictly_from_one_to_exactly_zero(num_steps, shift, tokens, terminal, convention):
    if num_steps == 1:
        terminal = None
    schedule = SigmaSchedule(convention=convention, shift=shift, shift_terminal=terminal)
    sigmas = schedule.sigmas(num_steps, image_seq_len=tokens)
    assert sigmas.shape == (num_steps + 1,) and sigmas.dtype == torch.float32 and sigmas.device.type == "cpu"
    assert sigmas[-1] == 0
    if convention != "dpm":
        assert sigmas[0] == 1
    elif terminal is None:
        assert sigmas[0].item() == pytest.approx(0.999 * shift / (1 + (shift - 1) * 0.999))
    assert (sigmas.diff() < 0).all()
    if terminal is not None:
        assert sigmas[-2].item() == pytest.approx(terminal, rel=1e-5)


def test_default_dtype_and_device_of_the_process_do_not_change_a_schedule():
    expected = [linear_sigmas(10), diffusers_sigmas(10), dynamic_sigmas(10, 0.6)]
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = [linear_sigmas(10), diffusers_sigmas(10), dynamic_sigmas(10, 0.6)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_checkpoint_configuration_is_read():
    qwen = {
        "use_dynamic_shifting": True,
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "shift": 1.0,
        "shift_terminal": 0.02,
        "time_shift_type": "exponential",
        "use_karras_sigmas": False,
        "invert_sigmas": False,
    }
    assert SigmaSchedule.from_scheduler_config(qwen) == SigmaSchedule(
        convention="dynamic", shift=1.0, max_seq_len=8192, max_shift=0.9, shift_terminal=0.02
    )
    sd3 = {"shift": 3.0, "shift_terminal": None, "use_dynamic_shifting": False}
    assert SigmaSchedule.from_scheduler_config(sd3) == SigmaSchedule(convention="linear", shift=3.0)
    assert SigmaSchedule.from_scheduler_config(sd3, convention="diffusers").convention == "diffusers"
    wan = {"_class_name": "UniPCMultistepScheduler", "flow_shift": 5.0, "use_flow_sigmas": True}
    assert SigmaSchedule.from_scheduler_config(wan) == SigmaSchedule(convention="unipc", shift=5.0)
    assert SigmaSchedule.from_scheduler_config(wan, "linear") == SigmaSchedule(convention="linear", shift=5.0)


def test_a_diffusers_scheduler_and_its_configuration_give_the_same_sigmas():
    scheduler = scheduler_of(shift=2.5)
    scheduler.set_timesteps(12)
    agree(SigmaSchedule.from_scheduler_config(scheduler.config, convention="diffusers").sigmas(12), scheduler.sigmas)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear_sigmas(0), "num_steps = 0"),
        (lambda: linear_sigmas(4, 0.0), "shift = 0.0"),
        (lambda: linear_sigmas(4, math.inf), "shift = inf"),
        (lambda: diffusers_sigmas(4, 3.0, 1), "num_train_timesteps = 1"),
        (lambda: unipc_sigmas(4, 3.0, 1), "num_train_timesteps = 1"),
        (lambda: dpm_sigmas(4, 3.0, 1), "num_train_timesteps = 1"),
        (lambda: linear_sigmas(10_000, 1e4), "not strictly decreasing in float32"),
        (lambda: dynamic_sigmas(4, math.nan), "mu = nan"),
        (lambda: dynamic_sigmas(4, -1.0, "linear"), "mu = -1.0"),
        (lambda: dynamic_sigmas(1, 0.6, shift_terminal=0.02), "needs at least 2 steps"),
        (lambda: dynamic_sigmas(4, 0.6, shift_terminal=1.5), "shift_terminal = 1.5"),
        (lambda: dynamic_sigmas(4, 0.6, UNKNOWN), "time_shift_type = 'unknown'"),
        (lambda: dynamic_mu(0), "image_seq_len = 0"),
        (lambda: dynamic_mu(10, 256, 256), "base_seq_len = max_seq_len = 256"),
        (lambda: SigmaSchedule(convention=UNKNOWN), "convention = 'unknown'"),
        (lambda: empirical_mu(0, 4), "image_seq_len = 0"),
        (lambda: empirical_mu(16, 0), "num_steps = 0"),
        (lambda: SigmaSchedule(convention="dynamic").sigmas(4), "needs image_seq_len"),
        (lambda: SigmaSchedule.from_scheduler_config({}), "neither shift nor flow_shift"),
        (lambda: SigmaSchedule.from_scheduler_config({"shift": 1.0, "use_karras_sigmas": True}), "use_karras_sigmas"),
        (lambda: SigmaSchedule.from_scheduler_config({"shift": 1.0, "invert_sigmas": True}), "invert_sigmas"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_compressed_tail_by_hand():
    sigmas = torch.tensor([1.0, 0.9, 0.8, 0.6, 0.5, 0.3, 0.1, 0.0])
    # From position 2 on there are six levels; half are three: positions 2, 4 (4.5 rounds to even), 7.
    assert torch.equal(compressed_tail(sigmas, 2, 0.5), sigmas[[0, 1, 2, 4, 7]])
    assert torch.equal(compressed_tail(sigmas, 2, 0.4), sigmas[[0, 1, 2, 7]])
    # One level of six would be no step; the published linspace(p, 0, 1) stays at p.
    assert torch.equal(compressed_tail(sigmas, 2, 0.2), sigmas[[0, 1, 2, 7]])
    assert torch.equal(compressed_tail(sigmas, 2, 0.01), sigmas[[0, 1, 2, 7]])
    assert torch.equal(compressed_tail(sigmas, 6, 0.4), sigmas)


@pytest.mark.parametrize("window_end", range(3, 20))
def test_a_compressed_tail_takes_the_steps_of_the_published_code(window_end):
    # T = 25, shift 3 and ratio .4, written down from its code; window_end is the last stochastic step.
    levels = torch.linspace(1, 0, 26, dtype=torch.float64)
    num_levels = int(max((25 - window_end) * 0.4, 1))
    tail = torch.linspace(float(levels[window_end + 1]), 0, num_levels, dtype=torch.float64)
    published = torch.cat([levels[: window_end + 1], tail])
    published = 3 * published / (1 + 2 * published)
    found = compressed_tail(linear_sigmas(25, 3.0), window_end + 1, 0.4)
    assert found.numel() == published.numel()
    if window_end == 3:
        assert found.numel() - 1 == 11
        torch.testing.assert_close(found, published.float(), rtol=1e-6, atol=1e-7)


@given(st.integers(1, 40), st.floats(0.01, 1.0), st.data())
@settings(max_examples=100, deadline=None)
def test_a_compressed_tail_keeps_its_ends_and_always_reaches_zero(num_steps, ratio, data):
    sigmas = linear_sigmas(num_steps)
    start = data.draw(st.integers(0, num_steps - 1))
    found = compressed_tail(sigmas, start, ratio)
    assert torch.equal(found[: start + 1], sigmas[: start + 1])
    assert found[-1] == 0 and bool((found.diff() < 0).all())
    assert set(found.tolist()) <= set(sigmas.tolist())
    assert found.numel() - 1 == start + max(int((num_steps - start + 1) * ratio + 1e-9) - 1, 1)
    assert torch.equal(compressed_tail(sigmas, start, 1.0), sigmas)


@pytest.mark.parametrize(("start", "ratio"), [(-1, 0.5), (4, 0.5), (1, 0.0), (1, 1.5)])
def test_a_tail_that_is_not_there_or_a_share_outside_one_is_refused(start, ratio):
    with pytest.raises(ValueError, match=r"must lie in 0 .. 3, ratio"):
        compressed_tail(linear_sigmas(4), start, ratio)
