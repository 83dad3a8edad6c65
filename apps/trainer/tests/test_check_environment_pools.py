"""What `trainer check` says of pools of environments."""

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.types.errors import ConfigError
from unirl.types.recipe import Machine

TURNS, MOVES = "worlds/tools/grpo", "vla/tabletop_push_grpo"
RAY = ["runtime=ray", "num_devices=2", "cluster.num_nodes=2"]


def found(name, *words):
    """The messages on a changed recipe."""
    register_resolvers()
    try:
        check_recipe(resolve(compose(name, list(words))), Machine(num_cpus=8, num_gpus=0))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (TURNS, ["parts/environments=pool"]),
        (TURNS, ["parts/environments=pool", *RAY, "+pools.env.nodes=1", "+pools.env.members=3"]),
        (TURNS, ["parts/environments=pool", *RAY, "+pools.env.nodes=big", "+cluster.node_groups={big: 0-1}"]),
        (MOVES, ["parts/environments=action_pool"]),
    ],
)
def test_a_pool_that_is_played_in_is_accepted(name, words):
    assert found(name, *words) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["+pools.env.devices=0"],
            "pools.env.devices does nothing in a pool of kind env, which has no devices. Remove",
        ),
        (["+pools.env.served=true"], "pools.env.served does nothing in a pool of kind env"),
        (["pools.env.kind=devices", "+pools.env.devices=0"], "pools.env.processes does nothing in a pool of devices."),
        (["+pools.env.members=0"], "pools.env.members = 0 must be at least 1"),
        (["pools.env.processes=0"], "pools.env.processes = 0 must be at least 1"),
        (["turns.pool=null"], "pools.env: no environment plays in it. Name it in turns.pool or"),
        (["turns.pool=games"], "turns.pool = games: there is no such pool of kind env; there are env. Add"),
        (
            ["+turns.num_workers=2"],
            "turns.num_workers = 2 are processes next to the engine, and turns.pool = env plays",
        ),
        (["+pools.env.nodes=0"], "pools.env.nodes does nothing with runtime: local. Set runtime: ray, or remove it."),
        (["+pools.env.cpus=2"], "pools.env.cpus does nothing with runtime: local."),
        ([*RAY, "+pools.env.nodes=2"], "pools.env.nodes = 2 names node 2, but cluster.num_nodes has 2 (0 to 1)."),
        (
            ["component_placement.actor=0", "component_placement.env=0"],
            "component_placement.env and pools.env both say where environments are played. Remove one",
        ),
    ],
)
def test_a_mistake_in_a_pool_is_named_with_the_fix(words, message):
    assert message in found(TURNS, "parts/environments=pool", *words)


def test_processes_next_to_the_engine_and_a_pool_are_not_both_taken():
    said = found(MOVES, "parts/environments=action_pool", "+engine.environment.num_processes=2")
    assert "engine.environment.num_processes = 2 are processes next to the engine" in said
    assert "GymnasiumEnvironment has no argument 'pool'" in found(
        MOVES, "+pools.env={kind: env}", "+engine.environment.pool=env"
    )
