"""Recipes of DMD2 with a learnt reward: each mistake with its message before work starts."""

import re

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.types.errors import ConfigError

from .changed_recipes import changed

SMALL, LARGE, GROUPS = "worlds/shapes/dmd2_reward", "sd3/dmd2_reward", "worlds/shapes/dgpo"


@pytest.fixture(scope="module")
def recipes():
    """The recipes of these tests, resolved once."""
    register_resolvers()
    return {name: resolve(compose(name)) for name in (SMALL, LARGE, GROUPS)}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (SMALL, {"backend.keep_reference": False}, "DMD2WithReward needs a reference policy"),
        (SMALL, {"sampling.keep_latents": "transitions"}, "DMD2WithReward needs every latent of the trajectory"),
        (SMALL, {"algorithm.min_level": 0.99}, "algorithm.min_level = 0.99 must be below algorithm.max_level = 0.98"),
        (
            SMALL,
            {"algorithm.reward_min_level": 0.985},
            "algorithm.reward_min_level = 0.985 must be below algorithm.max_level = 0.98. Lower the first",
        ),
        (SMALL, {"algorithm.reward_min_level": 0.0}, "algorithm.reward_min_level = 0.0"),
        (SMALL, {"algorithm.reward_weight": 0.0}, "algorithm.reward_weight = 0.0"),
        (
            SMALL,
            {"algorithm.surrogate_latents": "trajectory", "sampling.eta": 0.7, "sampling.sde_indices": [0]},
            "algorithm.surrogate_latents = trajectory gives latents the reward of the sample that they lead to",
        ),
        (SMALL, {"algorithm.surrogate_beta": 0.0}, "algorithm.surrogate_beta = 0.0"),
        (SMALL, {"algorithm.surrogate_kl": -0.1}, "algorithm.surrogate_kl = -0.1"),
        (SMALL, {"algorithm.surrogate_levels": 0}, "algorithm.surrogate_levels = 0"),
        (SMALL, {"algorithm.surrogate_max_grad_norm": 0.0}, "algorithm.surrogate_max_grad_norm = 0.0"),
        (SMALL, {"algorithm.surrogate_guidance": 0.5}, "algorithm.surrogate_guidance = 0.5"),
        (SMALL, {"algorithm.fake_updates": 0}, "algorithm.fake_updates = 0"),
        (
            SMALL,
            {"algorithm.surrogate_guidance": 4.5},
            "algorithm.surrogate_guidance = 4.5 needs a negative prompt. Set sampling.negative_prompt",
        ),
        (
            SMALL,
            {"algorithm.samples_per_group": 8},
            "DMD2WithReward trains on 8 samples of a prompt, but sampling.samples_per_prompt = 16",
        ),
        (SMALL, {"algorithm.rows_per_forward": 24}, "algorithm.rows_per_forward = 24 must be a multiple of 16"),
        (
            LARGE,
            {"engine.drop_text_encoders": True},
            "algorithm.surrogate_guidance = 4.5 has the trainer encode the negative prompt, but engine.drop",
        ),
        (
            SMALL,
            {"schedule": {"kind": "pipelined", "groups_per_request": 6}},
            "schedule.kind = pipelined adds up the gradients of requests, and DMD2WithReward trains on a whole update",
        ),
    ],
)
def test_a_mistake_is_named_with_its_values_and_the_fix(recipes, name, changes, message):
    check_recipe(recipes[name])
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(recipes[name], changes))


@pytest.mark.parametrize("name", [SMALL, GROUPS])
@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        ({"center": "none"}, "but advantages.center = none. Set advantages.center: group."),
        ({"center": "batch", "scale": "batch"}, "but advantages.center = batch. Set advantages.center: group."),
        (
            {"preset": "batch_whitened"},
            "but advantages.center = batch (preset batch_whitened). Set advantages.center: gr",
        ),
        ({"trim": 2}, "but advantages.trim = 2. Set advantages.trim: 0."),
        (
            {"center": "none", "trim": 2},
            "center = none and advantages.trim = 2. Set advantages.center: group and advantages.trim: 0.",
        ),
        (
            {"_target_": "unirl.algorithms.prompt_statistics.PromptStatistics"},
            "PromptStatistics does not make. Set advantages._target_: unirl.algorithms.advantages.AdvantageConfig.",
        ),
    ],
)
def test_advantages_that_are_not_centred_on_their_group_are_refused(recipes, name, advantages, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        check_recipe(changed(recipes[name], {"advantages": advantages}))
    assert "compares the samples of a group by advantages that sum to 0 there" in str(caught.value)


@pytest.mark.parametrize("name", [SMALL, GROUPS])
def test_weights_instead_of_advantages_are_refused_and_other_centred_ones_taken(recipes, name):
    for kind, number in (("best_of_n", {"num_best": 2}), ("accepted", {"threshold": 0.5})):
        weights = {"_target_": "unirl.algorithms.sample_weights.SampleWeights", "kind": kind, **number}
        with pytest.raises(ConfigError, match="SampleWeights makes weights of at least 0") as caught:
            check_recipe(changed(recipes[name], {"advantages": weights}))
        assert "that sum to 0 there" not in str(caught.value)
    for preset in ("flow_grpo_global_std", "rloo", "dr_grpo"):
        check_recipe(changed(recipes[name], {"advantages": {"preset": preset}}))
    check_recipe(changed(recipes[name], {"advantages": {"preset": "batch_whitened", "center": "group"}}))
