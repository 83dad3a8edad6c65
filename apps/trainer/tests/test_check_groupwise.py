"""Recipes whose scorers compare samples, and rewards that ignore the prompt: messages before work starts."""

import re

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.trainer.reward_rules import ignored_prompt
from unirl.types.errors import ConfigError
from unirl.types.recipe import Machine

from .changed_recipes import changed

PLENTY = Machine(num_cpus=1024, num_gpus=1024)
TWO = {"num_devices": 2, "runtime": "ray", "stack.num_updates_per_batch": 4, "batch_size": 3}
FUNCTION = {
    "_target_": "unirl.reward.function.FunctionRewardScorer",
    "function": "shutil.copytree",  # any that takes three arguments by place
    "groupwise": True,
}


@pytest.fixture(scope="module")
def recipe():
    """Pref-GRPO on shapes."""
    register_resolvers()
    return resolve(compose("worlds/shapes/pref_grpo"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sampling.samples_per_prompt": 1},
            "reward.scorers.pairs compares samples of a prompt, but sampling.samples_per_prompt is 1",
        ),
        (TWO, "but batch_size = 3 prompts do not divide over the 2 devices of num_devices = 2, so that some prompts"),
        (
            {"reward.scorers.shapes": ..., "reward.weights.shapes": ...},
            "eval has one sample per prompt, and pairs compare samples of a prompt. Add a scorer of single samples",
        ),
        (
            {"reward.scorers.shapes": FUNCTION},
            "eval has one sample per prompt, and shapes, pairs compare samples of a prompt",
        ),
    ],
)
def test_mistakes_have_messages(recipe, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(recipe, changes), machine=PLENTY)


@pytest.mark.parametrize("changes", [{}, {**TWO, "batch_size": 4}])
def test_what_fits_is_accepted(recipe, changes):
    check_recipe(changed(recipe, changes), machine=PLENTY)


JPEG = "unirl.reward.local.images.compressibility.JPEGCompressibilityScorer"
FRAMES = "unirl.reward.local.video.frames.FrameScorer"
PICKSCORE = "unirl.reward.local.images.pickscore.PickScoreRewardScorer"


@pytest.mark.parametrize(
    ("scorers", "weights", "ignores"),
    [
        ({"jpeg": {"_target_": JPEG}}, None, "jpeg"),
        ({"jpeg": {"_target_": JPEG}, "pick": {"_target_": PICKSCORE}}, None, None),
        ({"jpeg": {"_target_": JPEG}, "pick": {"_target_": PICKSCORE}}, {"jpeg": 1.0, "pick": 0.0}, "jpeg"),
        ({"video": {"_target_": FRAMES, "scorer": {"_target_": JPEG}}}, None, "video"),
        ({"video": {"_target_": FRAMES, "scorer": {"_target_": PICKSCORE}}}, None, None),
        ({"own": FUNCTION}, None, None),
    ],
)
def test_a_reward_that_ignores_the_prompt_is_warned_about(recipe, scorers, weights, ignores):
    reward = {"_target_": recipe["reward"]["_target_"], "scorers": scorers, "weights": weights}
    run = check_recipe(changed(recipe, {"reward": reward, "eval": None, "save.best_metric": "reward"}), machine=PLENTY)
    note = ignored_prompt(run)
    assert (note is None) == (ignores is None)
    assert ignores is None or f"no scorer with a weight reads the prompt ({ignores})" in str(note)
