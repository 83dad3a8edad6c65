import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from unirl.sde.diffusers_scheduler import FlowMatchSDEScheduler
from unirl.sde.kernels import CPSSDEStrategy, DanceSDEStrategy, DDIMStrategy, FlowSDEStrategy
from unirl.sde.loop import replay, sample, transition_rows
from unirl.sde.noise import step_noise

from .tiny_sd3 import diffusers, tiny_sd3

CALL: dict[str, Any] = {
    "prompt": ["a cat", "a dog"],
    "num_inference_steps": 5,
    "guidance_scale": 4.5,
    "height": 8,
    "width": 8,
    "output_type": "pt",
    "max_sequence_length": 8,
}
KEYS = ["cat:0", "dog:0"]


@pytest.fixture(scope="module")
def pipe():
    return tiny_sd3()


def run(pipe: Any, scheduler: Any = None, keys: list[str] | None = None, **changes: Any) -> torch.Tensor:
    pipe.scheduler = scheduler or diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    if keys is not None:
        pipe.scheduler.set_noise_keys(keys)
    return pipe(**{**CALL, **changes}, generator=torch.Generator().manual_seed(0)).images


def sde(**settings: Any) -> Any:
    return FlowMatchSDEScheduler(**{"shift": 3.0, "noise_seed": 5, **settings})


def test_eta_zero_gives_the_images_of_the_stock_scheduler_exactly(pipe):
    images = run(pipe, sde(eta=0.0))
    assert torch.equal(images, run(pipe))
    # And without a stochastic step at all, whatever eta.
    assert torch.equal(run(pipe, sde(eta=0.7, sde_indices=[])), images)


def test_stock_sd3_pipeline_collects_log_probs_and_latents(pipe):
    scheduler = sde(eta=0.7, sde_indices=[0, 2])
    images = run(pipe, scheduler, keys=KEYS)
    assert not torch.equal(images, run(pipe))
    assert [logp.shape for logp in scheduler.log_probs] == [(2,), (2,)]
    trajectory = scheduler.trajectory()
    assert trajectory.indices == [0, 1, 2, 3, 5]
    assert trajectory.sde_indices == [0, 2]
    assert trajectory.latents.shape == (2, 5, 4, 8, 8)
    assert torch.equal(trajectory.sde_logp, torch.stack(scheduler.log_probs, dim=1))
    assert torch.isfinite(trajectory.sde_logp).all()


@pytest.mark.parametrize("kernel_class", [FlowSDEStrategy, DanceSDEStrategy, CPSSDEStrategy, DDIMStrategy])
def test_replay_of_the_pipeline_trajectory_gives_its_log_probs(pipe, kernel_class):
    """The transitions of a stock pipeline call replay through `unirl.sde.loop` with the pipeline's own transformer."""
    scheduler = sde(eta=0.7, strategy=kernel_class.name)
    run(pipe, scheduler, keys=KEYS)
    trajectory = scheduler.trajectory()
    with torch.no_grad():
        embeds, negative, pooled, negative_pooled = pipe.encode_prompt(
            prompt=CALL["prompt"], prompt_2=None, prompt_3=None, max_sequence_length=8
        )
    sample_R, step_R = transition_rows(2, trajectory.sde_indices)

    def velocity(x, sigma_R, step_R):
        unguided, guided = pipe.transformer(
            hidden_states=torch.cat([x, x]),
            timestep=1000 * torch.cat([sigma_R, sigma_R]),
            encoder_hidden_states=torch.cat([negative[sample_R], embeds[sample_R]]),
            pooled_projections=torch.cat([negative_pooled[sample_R], pooled[sample_R]]),
            return_dict=False,
        )[0].chunk(2)
        return unguided + 4.5 * (guided - unguided)

    x, following = (rows.flatten(0, 1) for rows in trajectory.transitions())
    sigmas = scheduler.sigmas
    with torch.no_grad():
        again = replay(
            velocity,
            x,
            following,
            sigmas[step_R],
            sigmas[step_R + 1],
            step_R,
            strategy=kernel_class(),
            eta=0.7,
            sigma_max=sigmas[1].item(),
        )
    # The double shift leaves steps of std 0.006 at the end, which divide the float32 rounding of the network.
    assert trajectory.sde_logp is not None
    torch.testing.assert_close(again.logp_R.view(2, -1), trajectory.sde_logp, rtol=1e-4, atol=1e-4)


def test_ddim_leaves_out_the_last_step_of_a_pipeline_and_refuses_it_by_name(pipe):
    scheduler = sde(eta=0.7, strategy="ddim")
    run(pipe, scheduler, keys=KEYS)
    assert scheduler.trajectory().sde_indices == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"sde_indices = \[4\]: the ddim kernel adds no noise on the last step"):
        sde(eta=0.7, strategy="ddim", sde_indices=[4]).set_timesteps(5)


def test_noise_is_that_of_the_keys(pipe):
    scheduler = sde(eta=0.7, sde_indices=[1])
    run(pipe, scheduler, keys=KEYS)
    first = scheduler.trajectory()
    run(pipe, scheduler, keys=KEYS)
    assert torch.equal(scheduler.trajectory().latents, first.latents)
    run(pipe, scheduler, keys=["cat:1", "dog:1"])
    assert not torch.equal(scheduler.trajectory().at([2]), first.at([2]))
    assert torch.equal(scheduler.trajectory().at([1]), first.at([1]))


def test_without_a_seed_noise_comes_from_the_generator_given_to_step():
    scheduler: Any = FlowMatchSDEScheduler(shift=3.0, eta=0.7)
    scheduler.set_timesteps(4)
    x, v = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)
    out = scheduler.step(v, scheduler.timesteps[0], x, generator=torch.Generator().manual_seed(1)).prev_sample
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    sigmas = scheduler.sigmas
    expected = FlowSDEStrategy().step(
        x, v, sigmas[:1].expand(2), sigmas[1:2].expand(2), eta=0.7, sigma_max=sigmas[1].item(), noise=noise
    )
    assert torch.equal(out, expected.next)
    assert expected.logp_R is not None
    assert torch.equal(scheduler.log_probs[0], expected.logp_R)


def test_half_precision_latents_are_rounded_before_the_log_prob():
    scheduler = sde(eta=0.7, noise_keys=["a", "b"])
    scheduler.set_timesteps(4)
    x, v = torch.randn(2, 4, 8, 8).bfloat16(), torch.randn(2, 4, 8, 8).bfloat16()
    (following,) = scheduler.step(v, scheduler.timesteps[0], x, return_dict=False)
    assert following.dtype == torch.bfloat16
    sigmas = scheduler.sigmas
    evaluated = FlowSDEStrategy().step(
        x, v, sigmas[:1].expand(2), sigmas[1:2].expand(2), eta=0.7, sigma_max=sigmas[1].item(), next_sample=following
    )
    assert evaluated.logp_R is not None
    assert torch.equal(scheduler.log_probs[0], evaluated.logp_R)


def test_configuration_survives_from_config_and_saving(tmp_path):
    stock = diffusers.FlowMatchEulerDiscreteScheduler(
        shift=2.0, use_dynamic_shifting=True, max_shift=0.9, shift_terminal=0.02
    )
    scheduler: Any = FlowMatchSDEScheduler.from_config(stock.config, eta=0.4, strategy="cps", sde_indices=[1, 2])
    scheduler.save_pretrained(tmp_path)
    loaded: Any = FlowMatchSDEScheduler.from_pretrained(tmp_path)
    for each in (scheduler, loaded):
        assert (each.config.eta, each.config.strategy, each.config.sde_indices) == (0.4, "cps", [1, 2])
        assert (each.config.max_shift, each.config.shift_terminal) == (0.9, 0.02)
    for each in (stock, loaded):
        each.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25], mu=0.6)
    assert torch.equal(loaded.sigmas, stock.sigmas)


def test_common_mistakes_are_named(pipe):
    with pytest.raises(ValueError, match="strategy = 'heun'"):
        sde(strategy="heun")
    with pytest.raises(ValueError, match="eta = -1"):
        sde(eta=-1.0)
    with pytest.raises(ValueError, match="stochastic_sampling = True"):
        sde(stochastic_sampling=True)
    with pytest.raises(ValueError, match="without a noise_seed"):
        sde(noise_seed=None, noise_keys=["a"])
    with pytest.raises(ValueError, match="without a noise_seed"):
        sde(noise_seed=None).set_noise_keys(["a"])
    with pytest.raises(ValueError, match=r"sde_indices = \[7\] must be distinct and within 0 .. 4"):
        sde(sde_indices=[7]).set_timesteps(5)
    with pytest.raises(ValueError, match=r"noise_keys = \['a'\] for a batch of 2"):
        run(pipe, sde(), keys=["a"])
    with pytest.raises(ValueError, match="before set_timesteps"):
        sde().step(torch.zeros(1, 4), torch.tensor(1000.0), torch.zeros(1, 4))
    unfinished = sde()
    unfinished.set_timesteps(3)
    with pytest.raises(ValueError, match="not complete"):
        unfinished.trajectory()


def test_the_scheduler_walks_the_same_trajectory_as_the_loop():
    """Same velocity, sigmas and keys: latents and log-probs agree bit for bit, stochastic or not."""
    v = torch.randn(2, 4, 8, 8)
    x = initial = torch.randn(2, 4, 8, 8)
    scheduler = sde(eta=0.7, noise_keys=["a", "b"], sde_indices=[0, 2])
    scheduler.set_timesteps(4)
    for timestep in scheduler.timesteps:
        x = scheduler.step(v, timestep, x).prev_sample
    expected = sample(
        lambda x, sigma_R, step_R: v,
        initial,
        scheduler.sigmas,
        strategy=FlowSDEStrategy(),
        eta=0.7,
        sde_indices=[0, 2],
        step_noise=lambda step: step_noise(["a", "b"], step, 5, (4, 8, 8)),
    )
    assert scheduler.trajectory().indices == expected.indices
    assert torch.equal(scheduler.trajectory().latents, expected.latents)
    assert expected.sde_logp is not None
    assert torch.equal(torch.stack(scheduler.log_probs, dim=1), expected.sde_logp)


def test_missing_diffusers_names_the_extra():
    code = "import sys; sys.modules['diffusers'] = None\nimport unirl.sde.diffusers_scheduler"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode != 0
    assert "pip install 'unirl-sde[diffusers]'" in result.stderr
