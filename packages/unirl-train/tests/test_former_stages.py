"""Recipes from before stages become recipes with stages, which give the same samples."""

import copy
from typing import Any

import pytest

from unirl.config.former import modernised
from unirl.config.former_stages import COMPOSED, IMAGES, MODALITY, SAMPLING, SERVED, SERVED_IMAGES, TEXTS, UNIFIED
from unirl.types.errors import ConfigError

BOTH = {
    "_target_": SAMPLING,
    "ar": {"_target_": "unirl.types.sampling.ARSamplingParams", "temperature": 1.0},
    "diffusion": {"_target_": "unirl.types.sampling.DiffusionSamplingParams", "eta": 0.9},
}
READING = "unirl.rollout.stages.reading."


def test_the_engines_of_two_policies_become_two_stages():
    old: dict[str, Any] = {
        "modality": {"_target_": MODALITY},
        "engine": {"_target_": COMPOSED, "writer": "poet", "instruction": "{prompt} =", "max_chars": 80},
        "sampling": BOTH,
        "eval": {"prompts": "p", "policy": "painter/old,poet/ema"},
        "policies": {
            "poet": {"engine": {"_target_": TEXTS, "track": "line"}, "sampling": BOTH["ar"]},
            "painter": {"engine": {"_target_": IMAGES}, "sampling": BOTH["diffusion"]},
        },
    }
    before = copy.deepcopy(old)
    assert modernised(old) == {
        "stages": {
            "line": {"policy": "poet", "reads": {"_target_": f"{READING}Instruction", "template": "{prompt} ="}},
            "image": {
                "policy": "painter",
                "grows_from": "line",
                "reads": {"_target_": f"{READING}WrittenPrompt", "max_chars": 80},
            },
        },
        "eval": {"prompts": "p", "policy": {"painter": "old", "poet": "ema"}},
        "policies": {
            "poet": {"engine": {"_target_": TEXTS}, "sampling": BOTH["ar"]},
            "painter": {"engine": {"_target_": IMAGES}, "sampling": BOTH["diffusion"]},
        },
    }
    assert old == before


@pytest.mark.parametrize(
    ("path", "painting", "options"),
    [(UNIFIED, IMAGES, {"media_bits": 8}), (SERVED, SERVED_IMAGES, {"model": "m", "num_instances": 2})],
)
def test_the_two_tracks_of_a_unified_model_become_two_stages(path, painting, options):
    engine = {"_target_": path, "text_batch_size": 4, "forward_batch_size": 8, **options}
    assert modernised({"engine": engine, "sampling": BOTH}) == {
        "stages": {
            "text": {"engine": {"_target_": TEXTS, "forward_batch_size": 4}, "sampling": BOTH["ar"]},
            "image": {
                "grows_from": "text",
                "reads": {"_target_": f"{READING}Thought"},
                "engine": {"_target_": painting, "forward_batch_size": 8, **options},
                "sampling": BOTH["diffusion"],
            },
        }
    }


def test_an_engine_of_two_stages_beside_stages_is_refused():
    with pytest.raises(ConfigError, match=r"sampling._target_ = .*: `stages` replaces these, .*Remove sampli"):
        modernised({"stages": {"text": {}}, "sampling": BOTH})


def test_what_has_one_stage_stays():
    recipe = {"engine": {"_target_": IMAGES}, "sampling": BOTH["diffusion"], "eval": {"policy": "old"}}
    assert modernised(recipe) == recipe
