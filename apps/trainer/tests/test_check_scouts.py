"""What scouts cannot serve is refused before work starts, each with its values and what to change."""

import re

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.trainer.resuming import changed_settings
from unirl.types.errors import ConfigError

from .changed_recipes import changed

SCOUTS = "worlds/shapes/nft_scouts"
GRPO, REFL, DISTILL = (f"worlds/shapes/{name}" for name in ("flowgrpo", "refl", "distill"))
TEXTS, STAGES, FILES = "worlds/arithmetic/grpo", "worlds/phrases/both", "sft/shapes"
GIVEN = {"per_prompt": 48, "num_inference_steps": 3}


@pytest.fixture(scope="module")
def recipes():
    """The recipes of these tests, resolved once."""
    register_resolvers()
    return {name: resolve(compose(name)) for name in (SCOUTS, GRPO, REFL, DISTILL, TEXTS, STAGES, FILES)}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (SCOUTS, {"scouts.per_prompt": 16}, "scouts.per_prompt = 16 leaves nothing to choose for sampling.samples_per"),
        (SCOUTS, {"scouts.per_prompt": 0}, "scouts.per_prompt = 0 must be at least 1"),
        (SCOUTS, {"scouts": {"num_inference_steps": 3}}, "scouts.per_prompt is missing. Add it, or remove scouts."),
        (
            SCOUTS,
            {"schedule": {"experience": {"capacity": 48}}},
            "schedule.experience.groups_per_rollout is missing. Add it, or remove schedule.experience.",
        ),
        (SCOUTS, {"scouts.steps": 3}, "scouts.steps: unknown key"),
        (SCOUTS, {"scouts.num_inference_steps": 0}, "scouts.num_inference_steps = 0 must be at least 1"),
        (
            SCOUTS,
            {"scouts.autocast_precision": "int8"},
            "scouts.autocast_precision = 'int8' must be one of 'fp32', 'bf",
        ),
        (SCOUTS, {"sampling.samples_per_prompt": 15}, "sampling.samples_per_prompt = 15 is odd"),
        (SCOUTS, {"scouts.num_inference_steps": 7}, "scouts.num_inference_steps = 7 exceeds sampling.num_inference_st"),
        (SCOUTS, {"scouts": {"per_prompt": 48}}, "scouts have the 6 steps and the precision fp32 of exact samples"),
        (SCOUTS, {"sampling.eta": 0.5}, "sampling.eta = 0.5 adds noise at each step"),
        (SCOUTS, {"schedule": {"kind": "pipelined"}}, "schedule.kind = pipelined asks ahead. Set schedule.kind: sync"),
        (SCOUTS, {"trainer": {"_target_": "my.Trainer"}}, "my"),
        (
            SCOUTS,
            {"runtime": "ray", "num_devices": 3, "batch_size": 3, "scouts.per_prompt": 47, "placement.rollout": None},
            None,
        ),
        (
            SCOUTS,
            {"runtime": "ray", "num_devices": 4, "scouts.per_prompt": 17, "batch_size": 2},
            "batch_size * scouts.per_prompt = 2 * 17 = 34 is not divisible by the 4 devices of num_devices = 4",
        ),
        (GRPO, {"scouts": GIVEN}, "DiffusionGRPO weighs steps by the probability with which they were sampled"),
        (REFL, {"scouts": GIVEN}, "ReFL samples while it trains, so that there is nothing to choose"),
        (DISTILL, {"scouts": GIVEN}, "DiffusionDistillation learns from its teacher, not from rewards"),
        (TEXTS, {"scouts": GIVEN}, "scouts denoise with fewer steps, and ARSamplingParams samples no latents"),
        (STAGES, {"scouts": GIVEN}, "scouts are of one stage, and this run has stages.text, stages.image"),
        (FILES, {"scouts": GIVEN}, "scouts are sampled, and"),
    ],
)
def test_what_scouts_cannot_serve_is_named_with_the_fix(recipes, name, changes, message):
    recipe = changed(recipes[name], changes)
    if message is None:
        check_recipe(recipe)
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(recipe)


def test_a_resumed_run_is_told_that_other_scouts_choose(recipes):
    other = changed(recipes[SCOUTS], {"scouts.per_prompt": 64})
    assert changed_settings(recipes[SCOUTS], other) == {"scouts.per_prompt": [48, 64]}
