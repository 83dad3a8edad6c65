"""Values are assigned to a copy of a packaged recipe; Hydra, which takes thirty times as long, gives the same."""

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import OmegaConf

from unirl.app.environment import register_resolvers
from unirl.config import recipes
from unirl.config.recipes import compose, render
from unirl.types.errors import ConfigError

SHAPES = "worlds/shapes/nft"


@pytest.mark.parametrize(
    ("name", "given", "as_hydra_takes_it"),
    [
        (SHAPES, ["num_rollouts=3", "seed=7"], ["num_rollouts=3", "seed=7"]),
        (SHAPES, ["sampling.num_inference_steps=4"], ["sampling.num_inference_steps=4"]),
        (SHAPES, ["trackers=null"], ["trackers=null"]),
        (SHAPES, ["eval.num_samples=8", "eval.num_samples=16"], ["eval.num_samples=8", "eval.num_samples=16"]),
        (SHAPES, ["reward.weights={shapes: 0.5}"], ["++reward.weights={shapes: 0.5}"]),
        (SHAPES, ["new.key.of.mine=[1, two, {three: 3}]"], ["++new.key.of.mine=[1, two, {three: 3}]"]),
        (SHAPES, ["reward.scorers.mine._target_=a.B"], ["++reward.scorers.mine._target_=a.B"]),
        (SHAPES, ["run_dir='a, b'", 'bundle.dtype="${oc.env:D}"'], ["run_dir='a, b'", '++bundle.dtype="${oc.env:D}"']),
        ("worlds/arithmetic/grpo", ["sampling.temperature=0.5"], ["sampling.temperature=0.5"]),
    ],
)
def test_assigned_values_are_those_of_hydra(name: str, given: list[str], as_hydra_takes_it: list[str]) -> None:
    register_resolvers()
    with initialize_config_module(recipes.RECIPES_MODULE, version_base="1.3"):
        expected = hydra_compose(config_name=name, overrides=as_hydra_takes_it)
    OmegaConf.set_struct(expected, False)
    assert render(compose(name, given)) == render(expected)


def test_a_composed_recipe_may_be_changed() -> None:
    config = compose(SHAPES)
    before = render(config)
    config.sampling.num_inference_steps = 1
    config.new_key = 1
    assert render(compose(SHAPES)) == before


def test_a_value_that_cannot_be_assigned_has_the_message_of_hydra() -> None:
    with pytest.raises(ConfigError, match=r"recipe worlds/shapes/nft: .*sampling\.num_inference_steps\.deeper"):
        compose(SHAPES, ["sampling.num_inference_steps.deeper=1"])
