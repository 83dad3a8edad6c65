"""Recipes of DMD2: each mistake with its message before work starts."""

import re

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.types.errors import ConfigError

from .changed_recipes import changed

SMALL, LARGE = "worlds/shapes/dmd2", "sd3/dmd2"


@pytest.fixture(scope="module")
def recipes():
    """The recipes of these tests, resolved once."""
    register_resolvers()
    return {name: resolve(compose(name)) for name in (SMALL, LARGE)}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (SMALL, {"backend.keep_reference": False}, "DMD2 needs a reference policy: set backend.keep_reference: true"),
        (LARGE, {"backend.lora": None}, "DMD2 needs a reference policy: set backend.keep_reference: true"),
        (SMALL, {"sampling.keep_latents": "transitions"}, "DMD2 needs every latent of the trajectory"),
        (SMALL, {"algorithm.num_timesteps": 3}, "algorithm.num_timesteps = 3 exceeds sampling.num_inference_steps = 2"),
        (SMALL, {"algorithm.min_level": 0.99}, "algorithm.min_level = 0.99 must be below algorithm.max_level = 0.98"),
        (SMALL, {"algorithm.max_level": 1.0}, "algorithm.max_level = 1.0"),
        (
            SMALL,
            {"algorithm.matching": "latents"},
            "algorithm.matching = 'latents' must be one of 'samples', 'trajectory'",
        ),
        (
            SMALL,
            {"algorithm.trajectory_levels": "above"},
            "algorithm.trajectory_levels = above does nothing with algorithm.matching = samples. Remove it",
        ),
        (
            SMALL,
            {"algorithm.matching": "trajectory", "sampling.eta": 0.7, "sampling.sde_indices": [0]},
            "algorithm.matching = trajectory noises where a deterministic step ends. Set sampling.eta: 0",
        ),
        (
            SMALL,
            {"algorithm.matching": "trajectory", "sampling.post_solver": "dpmpp_2m"},
            "algorithm.matching = trajectory noises where an Euler step ends, not one of sampling.post_solver = dpmpp",
        ),
        (SMALL, {"algorithm.teacher_guidance": 0.5}, "algorithm.teacher_guidance = 0.5"),
        (SMALL, {"algorithm.fake_updates": 0}, "algorithm.fake_updates = 0"),
        (
            SMALL,
            {"algorithm.teacher_guidance": 4.0},
            "algorithm.teacher_guidance = 4.0 needs a negative prompt. Set sampling.negative_prompt",
        ),
        (
            LARGE,
            {"engine.drop_text_encoders": True},
            "algorithm.teacher_guidance = 4.0 has the trainer encode the negative prompt, but engine.drop",
        ),
        (
            LARGE,
            {
                "bundle._target_": "unirl.models.sdxl.bundle.SDXLBundle",
                "pipeline._target_": "unirl.models.sdxl.pipeline.SDXLPipeline",
            },
            "DMD2 compares velocities at any noise level, but SDXLPipeline knows those of its timesteps alone",
        ),
        (
            SMALL,
            {"schedule": {"kind": "pipelined", "groups_per_request": 6}},
            "schedule.kind = pipelined adds up the gradients of requests, and DMD2 trains on a whole update before it",
        ),
    ],
)
def test_a_mistake_is_named_with_its_values_and_the_fix(recipes, name, changes, message):
    check_recipe(recipes[name])
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(recipes[name], changes))
