"""What `trainer check` says of a model that draws images token by token."""

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import build_values, check_recipe
from unirl.config.recipes import compose, resolve
from unirl.types.errors import ConfigError

from .changed_recipes import changed

TEXT_ENGINE = "unirl.rollout.engine.trainside.text.TrainsideTextEngine"
IMAGE_ENGINE = "unirl.rollout.engine.trainside.image_tokens.TrainsideImageTokenEngine"
VLLM = {"_target_": "unirl.rollout.engine.vllm_llm.engine.VLLMRolloutEngine", "model": "m", "context_length": 64}
TOPOLOGY = "unirl.train.configs.TrainTopology"
SYNC = {"_target_": "unirl.distributed.weight_sync.full.FullWeightSync"}


@pytest.fixture(scope="module")
def recipes():
    register_resolvers()
    return {name: resolve(compose(name, [])) for name in ("janus/grpo", "worlds/arithmetic/grpo")}


def test_the_guidance_and_temperature_of_evaluations_are_as_written(recipes):
    run = check_recipe(recipes["janus/grpo"])
    build_values(run)
    assert run.evaluation is not None and run.evaluation.get("temperature") == 1.0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "janus/grpo",
            {"engine": VLLM, "sync": SYNC, "stack.track": "text"},
            f"draws images by a second head, with guidance, and VLLMRolloutEngine serves neither.*{IMAGE_ENGINE}",
        ),
        (
            "janus/grpo",
            {"engine._target_": TEXT_ENGINE, "stack.track": "text"},
            f"TrainsideTextEngine makes no images of the tokens that JanusBundle draws. Set .*{IMAGE_ENGINE}",
        ),
        (
            "worlds/arithmetic/grpo",
            {"engine._target_": IMAGE_ENGINE, "stack.track": "image"},
            f"makes images of tokens, which Qwen3Bundle does not draw. Set engine._target_: {TEXT_ENGINE}",
        ),
        (
            "worlds/arithmetic/grpo",
            {"sampling.guidance_scale": 2.0},
            r"sampling.guidance_scale = 2.0, but Qwen3Bundle draws tokens without guidance. Set it to 1",
        ),
        ("janus/grpo", {"sampling.guidance_scale": 0.5}, "guidance_scale = 0.5 must be at least 1"),
        ("janus/grpo", {"sampling.top_p": 0.9}, "draws from a part of the vocabulary"),
        ("janus/grpo", {"backend.topology": {"_target_": TOPOLOGY, "sp": 2}}, r"topology\.sp = 2"),
        ("janus/grpo", {"backend.topology": {"_target_": TOPOLOGY, "tp": 2}}, r"topology\.tp = 2"),
    ],
)
def test_a_mistake_is_named_with_what_to_set(recipes, name, changes, message):
    with pytest.raises(ConfigError, match=message):
        build_values(check_recipe(changed(recipes[name], changes)))
