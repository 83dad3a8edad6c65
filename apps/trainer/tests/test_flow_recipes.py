"""Packaged recipes with the sections of the described flow of embodied training."""

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, published, render, resolve
from unirl.types.errors import ConfigError

WORLD = "worlds/tools/grpo"
REPLICA = "parts/engine=text_replica_cpu"
PLACED = {"actor": "0-3", "rollout": "4-7", "env": "4-7"}
WORDS = [f"component_placement.{name}={text}" for name, text in PLACED.items()]


@pytest.fixture(autouse=True)
def resolvers():
    register_resolvers()


def test_a_recipe_in_these_words_is_the_one_in_ours():
    ours = ["+pools.train.devices=0-3", "+pools.rollout.devices=4-7", "num_devices=8", "runtime=ray"]
    config, own = compose(WORLD, [REPLICA, *WORDS]), compose(WORLD, [REPLICA, *ours])
    assert resolve(config) == resolve(own)
    assert published(config)["pools"] == resolve(own)["pools"]
    shown = render(config)
    assert "component_placement" not in shown and "devices: 4-7" in shown and "${tools:" in shown
    check_recipe(resolve(config))


def test_overlaps_are_refused_where_they_must_not_be():
    words = ["component_placement.actor=0-7", "component_placement.rollout=4-7"]
    with pytest.raises(ConfigError, match=r"both have devices \[4, 5, 6, 7\].*sleep_engine"):
        check_recipe(resolve(compose(WORLD, [REPLICA, "device=cuda", *words])))
    check_recipe(resolve(compose(WORLD, [REPLICA, "device=cuda", "residency.sleep_engine=true", *words])))
