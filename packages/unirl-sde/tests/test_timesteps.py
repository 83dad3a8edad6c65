from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.sde.timesteps import TimestepSchedule
from unirl.sde.variance_preserving import alphas_cumprod_of

diffusers: Any = pytest.importorskip("diffusers")

SCALED = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "clip_sample": False}
CONFIGS = {
    "sd": {**SCALED, "timestep_spacing": "leading", "steps_offset": 1, "set_alpha_to_one": False},
    "ddpm": {**SCALED, "beta_schedule": "linear", "beta_end": 0.02, "timestep_spacing": "linspace"},
    "zero_snr": {**SCALED, "timestep_spacing": "trailing", "rescale_betas_zero_snr": True},
}
COGVIDEOX = {
    "2b": {**SCALED, "timestep_spacing": "linspace", "rescale_betas_zero_snr": True, "snr_shift_scale": 3.0},
    "5b": {**SCALED, "timestep_spacing": "trailing", "rescale_betas_zero_snr": True, "snr_shift_scale": 1.0},
}


@pytest.mark.parametrize("num_steps", [1, 4, 7, 25, 50, 333])
@pytest.mark.parametrize("name", [*CONFIGS, *COGVIDEOX])
def test_levels_and_timesteps_are_those_of_diffusers(name, num_steps):
    is_video = name in COGVIDEOX
    config = COGVIDEOX[name] if is_video else CONFIGS[name]
    scheduler = (diffusers.CogVideoXDDIMScheduler if is_video else diffusers.DDIMScheduler)(**config)
    schedule = TimestepSchedule.from_scheduler_config(scheduler.config)
    # DDIMScheduler multiplies a thousand factors in float32; CogVideoX's in float64.
    tolerance = 1e-12 if is_video else 2e-6
    torch.testing.assert_close(schedule.alphas_cumprod(), scheduler.alphas_cumprod.double(), rtol=0, atol=tolerance)
    scheduler.set_timesteps(num_steps)
    assert torch.equal(schedule.timesteps(num_steps), scheduler.timesteps)
    sigmas = schedule.sigmas(num_steps)
    assert sigmas.shape == (num_steps + 1,) and sigmas.dtype == torch.float32
    expected = torch.cat([scheduler.alphas_cumprod[scheduler.timesteps], scheduler.final_alpha_cumprod.view(1)])
    torch.testing.assert_close(alphas_cumprod_of(sigmas.double()), expected.double(), rtol=0, atol=3e-6)


@given(
    spacing=st.sampled_from(["leading", "trailing", "linspace"]),
    num_steps=st.integers(1, 400),
    is_zero_snr=st.booleans(),
    shift=st.floats(0.3, 5),
)
@settings(max_examples=100, deadline=None)
def test_every_sigma_of_a_schedule_leads_back_to_its_timestep(spacing, num_steps, is_zero_snr, shift):
    schedule = TimestepSchedule(
        timestep_spacing=spacing, rescale_betas_zero_snr=is_zero_snr, snr_shift_scale=shift, steps_offset=0
    )
    sigmas = schedule.sigmas(num_steps)
    assert torch.equal(schedule.timestep_of(sigmas[:-1]), schedule.timesteps(num_steps))
    assert sigmas[-1] == 0 and bool((sigmas.diff() < 0).all())
    table = schedule.table()
    assert table.diff().min() > 1e-5  # far from the tolerance of the look-up
    assert (table[-1] == 1) == is_zero_snr


def test_a_sigma_between_two_timesteps_is_refused_by_name():
    schedule = TimestepSchedule()
    table = schedule.table()
    for wrong in ((table[400] + table[401]) / 2, torch.tensor(0.99), torch.tensor(0.0)):
        with pytest.raises(ValueError, match=r"sigmas \[[^,]*\] are not levels of the model's 1000"):
            schedule.timestep_of(torch.stack([table[3], wrong]))


def test_bad_settings_are_named():
    config = CONFIGS["sd"]
    for given_, match in (
        ({**config, "clip_sample": True}, "sets \\['clip_sample'\\]"),
        ({**config, "trained_betas": [0.1]}, "trained_betas"),
        ({name: value for name, value in config.items() if name != "beta_start"}, "lacks \\['beta_start'\\]"),
        ({**config, "beta_schedule": "squaredcos_cap_v2"}, "beta_schedule = 'squaredcos_cap_v2' is not one of"),
        ({**config, "timestep_spacing": "karras"}, "timestep_spacing = 'karras'"),
    ):
        with pytest.raises(ValueError, match=match):
            TimestepSchedule.from_scheduler_config(given_)
    with pytest.raises(ValueError, match="beta_start = 0.1 must not exceed"):
        TimestepSchedule(beta_start=0.1)
    for num_steps in (0, 1001):
        with pytest.raises(ValueError, match=f"num_steps = {num_steps} must lie in 1 .. num_train_timesteps"):
            TimestepSchedule().timesteps(num_steps)
    with pytest.raises(ValueError, match="has no 1000 timesteps"):
        TimestepSchedule(steps_offset=1).timesteps(1000)
    with pytest.raises(ValueError, match="does not decrease at its end"):
        TimestepSchedule(set_alpha_to_one=False).sigmas(10)


def test_the_file_of_a_checkpoint_may_be_overruled_at_its_end():
    assert TimestepSchedule.from_scheduler_config(CONFIGS["sd"]).sigmas(10)[-1] > 0
    assert TimestepSchedule.from_scheduler_config(CONFIGS["sd"], set_alpha_to_one=True).sigmas(10)[-1] == 0
