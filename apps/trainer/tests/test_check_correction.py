"""What `check` says of `algorithm.rollout_correction` on denoising steps."""

import re

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.types.errors import ConfigError

from .changed_recipes import changed

PATH = "unirl.algorithms.rollout_correction.RolloutCorrection"


@pytest.fixture(scope="module")
def recipe():
    """Flow-GRPO on shapes."""
    register_resolvers()
    return resolve(compose("worlds/shapes/flowgrpo"))


def corrected(recipe, changes, correction):
    """The recipe with other values and a correction."""
    return changed(recipe, {"algorithm.rollout_correction": {"_target_": PATH, **correction}, **changes})


@pytest.mark.parametrize(
    ("changes", "correction", "message"),
    [
        ({}, {}, "algorithm.rollout_correction.upper = 2.0 with pipeline.strategy.reduction = mean bounds nothing"),
        ({}, {"lower": 0.5, "upper": 1.001}, "lower = 0.5 with pipeline.strategy.reduction = mean bounds nothing"),
        ({"algorithm.old_logp_source": "rollout"}, {"upper": 1.001}, "compares a replay with the rollout"),
        (
            {},
            {"upper": None, "m2_threshold": 0.04},
            "m2_threshold = 0.04 with pipeline.strategy.reduction = mean masks",
        ),
        ({}, {"upper": None, "m2_threshold": 0}, "m2_threshold = 0 must be above 0"),
        ({}, {"upper": None}, "algorithm.rollout_correction needs at least one bound; got lower = null, upper = null."),
        ({}, {"upper": 0.999}, "algorithm.rollout_correction needs 0 <= lower <= 1 <= upper; got lower = null, upper"),
        (
            {},
            {"mode": "reject", "lower": 0, "upper": None},
            "mode = reject with lower = 0, upper = null weighs everything",
        ),
        (
            {"algorithm.rows_per_forward": 4},
            {"upper": 1.001, "level": "sequence"},
            "algorithm.rows_per_forward = 4 is not a multiple of the 6 trained steps of a sample",
        ),
    ],
)
def test_a_correction_that_cannot_work_is_refused(recipe, changes, correction, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(corrected(recipe, changes, correction))


def test_a_noise_floor_is_for_denoising_steps(recipe):
    ahead = resolve(compose("worlds/shapes/replica", ["parts/schedule=async"]))
    check_recipe(corrected(ahead, {}, {"upper": 1.001, "noise_floor": 0.1}))
    with pytest.raises(ConfigError, match="noise_floor = 0 must be above 0"):
        check_recipe(corrected(recipe, {}, {"upper": 1.001, "noise_floor": 0}))
    tokens = resolve(compose("worlds/arithmetic/grpo"))
    with pytest.raises(ConfigError, match="rollout_correction.noise_floor leaves out denoising steps"):
        check_recipe(corrected(tokens, {}, {"noise_floor": 0.1}))


LINE = {"algorithm.old_logp_source": "log-linear"}


def test_a_log_linear_anchor_is_refused_where_more_is_replayed(recipe):
    with pytest.raises(ConfigError, match="m2_threshold needs a replay before the first update, which old_logp_source"):
        check_recipe(corrected(recipe, LINE, {"upper": None, "m2_threshold": 1e-6}))
    means = resolve(compose("worlds/shapes/flowdppo"))
    with pytest.raises(ConfigError, match="FlowDPPO compares transition means, which a rollout does not keep"):
        check_recipe(changed(means, LINE))
    critic = resolve(compose("worlds/arithmetic/ppo"))
    with pytest.raises(ConfigError, match="ARPPO needs a replay before the first update"):
        check_recipe(changed(critic, LINE))
    check_recipe(changed(recipe, LINE))
    check_recipe(changed(resolve(compose("worlds/arithmetic/grpo")), LINE))


@pytest.mark.parametrize(
    ("changes", "correction"),
    [
        ({}, {"upper": 1.001}),
        ({"pipeline.strategy.reduction": "sum", "algorithm.clip_range": 0.2}, {}),
        ({}, {"upper": None, "m2_threshold": 1e-6}),
        ({}, {"mode": "reject", "upper": None, "m2_threshold": 1e-6}),
        ({}, {"lower": 0, "upper": None}),
        ({"pipeline.strategy.reduction": "sum", "algorithm.clip_range": 0.2}, {"m2_threshold": 0.04}),
        ({"algorithm.rows_per_forward": 4}, {"upper": 1.001}),
        ({"algorithm.rows_per_forward": 12}, {"upper": 1.001, "level": "sequence"}),
    ],
)
def test_a_correction_of_the_right_size_is_accepted(recipe, changes, correction):
    check_recipe(corrected(recipe, changes, correction))
