"""Recipes with a teacher: what they become, and each mistake with its message before work starts."""

import re

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.types.errors import ConfigError

from .changed_recipes import changed

IMAGES, TEXTS = "worlds/shapes/distill", "worlds/arithmetic/distill"


@pytest.fixture(scope="module")
def recipes():
    """The recipes of these tests, resolved once."""
    register_resolvers()
    return {name: resolve(compose(name)) for name in (IMAGES, TEXTS)}


@pytest.mark.parametrize("name", [IMAGES, TEXTS])
def test_a_teacher_stands_beside_flat_sections_and_changes_no_name_of_the_run(recipes, name):
    run = run_of(recipes[name])
    assert list(run.all_policies) == ["default"] and not run.frozen and not run.is_staged
    teacher = run.teachers["teacher"]
    assert not teacher.trains and len(run.stages) == 1
    assert teacher.pipeline.node == run.policy.pipeline.node
    assert run.policy_of(teacher.bundle) is teacher
    assert any(part is teacher.bundle for part in run.parts())
    check_recipe(recipes[name])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            TEXTS,
            {"algorithm.teacher": "master", "policies": {}},
            "algorithm.teacher = master is no policy of this recipe. Add policies.master with trains: false",
        ),
        (TEXTS, {"algorithm.teacher": "default", "policies": {}}, "algorithm.teacher = default trains or samples"),
        (
            TEXTS,
            {"algorithm.teacher": "master"},
            "policies.teacher.trains: false needs a stage that samples from it, or an algorithm that asks it",
        ),
        (
            TEXTS,
            {"policies.teacher.trains": True},
            "a recipe with policies must not have this section at the top level. Move it to policies.teacher.bundle; "
            "only policies with trains: false may be added to it.",
        ),
        (
            TEXTS,
            {"policies.teacher.engine": {"_target_": "unirl.rollout.engine.trainside.text.TrainsideTextEngine"}},
            "policies.teacher.engine: ",
        ),
        (TEXTS, {"policies.teacher.bundle": ...}, "policies.teacher.bundle is missing from the recipe"),
        (TEXTS, {"algorithm.coef": 0.0}, "algorithm.coef = 0.0"),
        (IMAGES, {"sampling.keep_latents": "transitions"}, "DiffusionDistillation needs every latent"),
        (IMAGES, {"algorithm.num_timesteps": 7}, "algorithm.num_timesteps = 7 exceeds sampling.num_inference_steps"),
        (
            IMAGES,
            {"policies.teacher.bundle._target_": "unirl.models.flux.bundle.FluxBundle"},
            "unirl.models.flux.bundle.FluxBundle reads other conditions than the student's",
        ),
    ],
)
def test_a_mistake_is_named_with_its_values_and_the_fix(recipes, name, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(recipes[name], changes))
