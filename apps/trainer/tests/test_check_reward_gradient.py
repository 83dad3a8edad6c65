"""Recipes that train through the reward: the packaged ones hold their published numbers, and mistakes have messages."""

import copy
import re

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.types.errors import ConfigError

METHODS = ("drtune", "refl", "draft", "draft_lv", "alignprop", "srpo")
STRICT = {"_target_": "unirl.reward.worlds.shapes_scorer.ShapesRewardScorer"}
SMOOTH = {"_target_": "unirl.reward.worlds.shapes_gradient.ShapesGradientScorer"}


@pytest.fixture(scope="module")
def recipes():
    register_resolvers()
    names = [f"{folder}/{method}" for folder in ("sd3", "worlds/shapes") for method in METHODS]
    return {name: resolve(compose(name)) for name in names}


@pytest.mark.parametrize("method", METHODS)
def test_shapes_are_trained_on_the_smooth_verifier_and_judged_by_the_strict_one(recipes, method):
    recipe = recipes[f"worlds/shapes/{method}"]
    assert recipe["reward"]["weights"] == {"gradient": 1.0, "shapes": 0.0}
    assert recipe["reward"]["scorers"]["gradient"]["_target_"] == SMOOTH["_target_"]
    assert recipe["save"]["best_metric"] == "shapes/strict"
    assert recipe["sampling"]["eta"] == 0 and recipe["sampling"]["keep_latents"] == "all"
    assert recipe["stack"]["num_updates_per_batch"] == 1


@pytest.mark.parametrize(("method", "batch"), [("drtune", 64), ("refl", 64), ("draft_lv", 32)])
def test_real_size_recipes_hold_the_numbers_published_for_this_model(recipes, method, batch):
    """arXiv 2606.11075, the authors' configurations of SD3.5-M."""
    recipe = recipes[f"sd3/{method}"]
    assert recipe["batch_size"] == batch and recipe["num_rollouts"] == 300 and recipe["num_devices"] == 8
    sampling = recipe["sampling"]
    assert (sampling["num_inference_steps"], sampling["guidance_scale"], sampling["height"]) == (25, 3.5, 512)
    optimizer = recipe["backend"]["optimizer"]
    assert (optimizer["learning_rate"], optimizer["weight_decay"]) == (1e-5, 1e-4)
    assert recipe["backend"]["ema"]["decay"] == 0.995 and recipe["eval"]["num_inference_steps"] == 40
    assert (recipe["algorithm"]["scale"], recipe["algorithm"]["margin"]) == (1.0, 0.55)
    own = {
        "drtune": {"num_gradient_steps": 3, "early_stop": 10},
        "refl": {"num_last_steps": 11},
        "draft_lv": {"num_last_steps": 1, "num_noisings": 2},
    }
    assert {key: recipe["algorithm"][key] for key in own[method]} == own[method]


MISTAKES = [
    ({"reward.weights": {"gradient": 1.0, "shapes": 0.5}}, "reward.scorers.shapes (ShapesRewardScorer) is not"),
    ({"reward.scorers": [STRICT], "reward.weights": None}, "reward.scorers.0 (ShapesRewardScorer) is not"),
    (
        {
            "reward.scorers": {
                "jpeg": {"_target_": "unirl.reward.local.images.compressibility.JPEGCompressibilityScorer"}
            },
            "reward.weights": None,
        },
        "DRTune trains through the reward, but reward.scorers.jpeg (JPEGCompressibilityScorer) is not differentiable",
    ),
    ({"stack.num_updates_per_batch": 2}, "stack.num_updates_per_batch = 2 would train the second update on stale"),
    ({"sampling.keep_latents": "transitions"}, "sampling.keep_latents = 'transitions'. Set sampling.keep_latents: all"),
    ({"sampling.eta": 0.7}, "DRTune goes back along deterministic steps. Set sampling.eta: 0"),
    ({"sampling.post_solver": "dpmpp_2m"}, "goes back along Euler steps, not sampling.post_solver = dpmpp_2m"),
    ({"algorithm.num_gradient_step": 2}, "Did you mean num_gradient_steps?"),
    ({"algorithm.kl_coef": 0.1}, "algorithm.kl_coef = 0.1 needs a reference policy"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_a_mistake_has_one_message_before_work_starts(recipes, changes, message):
    recipe = copy.deepcopy(recipes["worlds/shapes/drtune"])
    for key, value in changes.items():
        *path, last = key.split(".")
        node = recipe
        for part in path:
            node = node[part]
        node[last] = value
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(recipe)


@pytest.mark.parametrize("scorer", ["images.pickscore.PickScoreRewardScorer", "images.clip.CLIPRewardScorer"])
def test_differentiable_scorers_pass(recipes, scorer):
    recipe = copy.deepcopy(recipes["worlds/shapes/drtune"])
    recipe["reward"]["scorers"]["shapes"] = {"_target_": f"unirl.reward.local.{scorer}"}
    recipe["reward"]["weights"] = {"gradient": 1.0, "shapes": 0.5}
    check_recipe(recipe)
