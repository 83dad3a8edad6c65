"""Options of an evaluation that do not fit what a recipe samples, and names of the last release."""

import re

import pytest

from unirl.app.environment import register_resolvers
from unirl.config import former
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.types.errors import ConfigError

IMAGES, TEXTS, BOTH = "worlds/shapes/nft", "worlds/arithmetic/grpo", "worlds/phrases/both"


@pytest.fixture(autouse=True, scope="module")
def resolvers():
    register_resolvers()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (IMAGES, ["eval.max_new_tokens=4"], "eval.max_new_tokens: of texts, but this run samples images or videos"),
        (IMAGES, ["eval.pass_at=[1]", "eval.pass_samples=2"], "eval.pass_at, eval.pass_samples: of texts that are"),
        (TEXTS, ["eval.guidance_scale=2"], "eval.guidance_scale: of images and videos, but this run samples texts."),
        (TEXTS, ["eval.post_solver=unipc"], "eval.post_solver: of images and videos, but this run samples texts."),
        (TEXTS, ["eval.without_writer=true"], "eval.without_writer: of images of texts that a model writes, but"),
        (IMAGES, ["eval.without_writer=true"], "eval.without_writer: of images of texts that a model writes, but"),
        (BOTH, ["eval.pass_at=[1]"], "eval.pass_at: of texts that are scored themselves, but this run samples texts"),
    ],
)
def test_an_option_of_another_kind_of_samples_is_refused(name: str, options: list[str], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(resolve(compose(name, options)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (IMAGES, ["eval.guidance_scale=2", "sampling.negative_prompt=''", "eval.without_writer=false"]),
        (TEXTS, ["eval.pass_at=[1,2]", "eval.temperature=0.5", "eval.max_new_tokens=4"]),
        (BOTH, ["eval.temperature=0.5", "eval.num_inference_steps=3", "eval.without_writer=true"]),
    ],
)
def test_options_of_what_is_sampled_are_taken(name: str, options: list[str]):
    check_recipe(resolve(compose(name, options)))


@pytest.mark.parametrize(
    ("name", "options", "present"),
    [
        (
            TEXTS,
            [f"eval._target_={next(iter(former.CLASSES))}", "eval.temperature=0.5", "eval.num_completions=3"],
            {"pass_temperature": 0.5},
        ),
        (TEXTS, ["eval.top_p=0.5"], {"pass_top_p": 0.5}),
        (BOTH, [f"eval._target_={list(former.CLASSES)[1]}", "eval.temperature=0.5"], {"temperature": 0.5}),
    ],
)
def test_recipes_of_the_last_release_are_taken(name: str, options: list[str], present: dict[str, float]):
    recipe = resolve(compose(name, options))
    assert recipe["eval"].items() >= present.items()
    assert recipe["eval"].get("_target_", former.EVALUATION) == former.EVALUATION
    run = check_recipe(recipe)
    assert run.file.samples.per_evaluation == (3 if "eval.num_completions=3" in options else 16)
