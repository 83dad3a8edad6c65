"""The sections of the described flow of embodied training, and what they become in a recipe."""

import pytest

from unirl.config.flow import in_own_words
from unirl.types.errors import ConfigError

PLACED = {"actor": "0-3", "rollout": "4-7", "env": "4-7"}


def flow(**sections):
    own = {"turns": {"num_workers": 1}, "num_devices": 1, "runtime": "local", "engine": {}, "stack": {}}
    return in_own_words({**own, **sections})


@pytest.mark.parametrize(
    "sections",
    [
        {"component_placement": PLACED},
        {"cluster": {"num_nodes": 1, "component_placement": PLACED}},
        {"component_placement": {"actor": "0-3", "rollout, env": "4-7"}},
    ],
)
def test_placed_components_are_pools_and_the_run_has_their_devices(sections):
    made = flow(**sections)
    assert made["pools"] == {"train": {"devices": "0-3"}, "rollout": {"devices": "4-7"}}
    assert (made["num_devices"], made["runtime"]) == (8, "ray")
    assert made.get("cluster") in (None, {"num_nodes": 1}) and "component_placement" not in made


def test_a_recipe_without_these_sections_is_as_it_was():
    recipe = {"pools": {"train": {"devices": 1}}, "cluster": {"num_nodes": 1}, "num_devices": 4}
    assert in_own_words(recipe) == recipe


def test_nodes_are_filled_and_devices_that_are_named_stay():
    assert flow(component_placement={"actor": "0-4"}, cluster={"num_nodes": 2})["num_devices"] == 6
    made = flow(component_placement={"actor": "0", "rollout": "1"}, num_devices=4, runtime="ray")
    assert made["num_devices"] == 4
    one = flow(component_placement={"actor": 0, "rollout": 0})
    assert (one["num_devices"], one["runtime"]) == (1, "local")


def test_environments_on_other_nodes_than_the_engine_are_a_pool():
    placed = {"actor": "0-7", "rollout": "0-3", "env": "4-7"}
    made = flow(component_placement=placed, cluster={"num_nodes": 2}, env={"num_workers": 3})
    assert made["pools"]["env"] == {"kind": "env", "nodes": "1", "processes": 3}
    assert made["turns"] == {"num_workers": None, "pool": "env"}
    both = flow(component_placement=placed | {"env": "all"}, cluster={"num_nodes": 2}, turns={"max_turns": 3})
    assert both["pools"]["env"] == {"kind": "env", "nodes": "0,1"} and both["turns"] == {"max_turns": 3, "pool": "env"}
    acting = {"environment": {"id": "e", "num_processes": 2}}
    made = flow(component_placement=placed, cluster={"num_nodes": 2}, engine=acting, turns=None)
    assert made["engine"]["environment"] == {"id": "e", "num_processes": None, "pool": "env"}
    assert made["pools"]["env"]["processes"] == 2


def test_a_pool_of_environments_may_stand_next_to_placed_components():
    made = flow(component_placement={"actor": "0-3", "rollout": "4-7"}, pools={"games": {"kind": "env"}})
    assert list(made["pools"]) == ["games", "train", "rollout"]


def test_options_are_set_where_the_recipe_has_them():
    sampling = {"samples_per_prompt": 8}
    made = flow(
        component_placement=PLACED,
        batch_size=16,
        sampling=sampling,
        actor={"micro_batch_size": 4, "global_batch_size": 32},
        rollout={"served": True, "members": 2, "pipeline_stage_num": 2},
        env={"num_workers": 3},
        runner={"max_steps": 5, "logger": {"log_path": "somewhere"}},
    )
    assert made["pools"]["rollout"] == {"devices": "4-7", "served": True, "members": 2}
    assert made["stack"] == {"micro_batch_size": 4, "num_updates_per_batch": 4}
    assert made["turns"] == {"num_workers": 3, "pipeline_stages": 2}
    assert (made["num_rollouts"], made["run_dir"]) == (5, "somewhere")
    acting = in_own_words({"engine": {"environment": {"id": "e"}}, "env": {"num_workers": 3, "num_envs": 64}})
    assert acting["engine"] == {"environment": {"id": "e", "num_processes": 3}, "forward_batch_size": 64}


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"component_placement": PLACED, "placement": {"train": "0"}}, "component_placement and placement are both"),
        ({"component_placement": PLACED, "pools": {"a": {"devices": 0}}}, "component_placement and pools are both"),
        ({"component_placement": PLACED, "cluster": {"component_placement": PLACED}}, "are both set"),
        ({"component_placement": {"rollout": 0}}, "names rollout, and no actor"),
        ({"component_placement": "0-3"}, "must name devices by component"),
        ({"component_placement": {"actor": 0, "actors": 1}}, "no such component.*Did you mean actor"),
        ({"component_placement": {"actor": 0, "actor,env": 1}}, "places actor twice"),
        ({"component_placement": {"actor": "0-8"}, "num_devices": 8}, "actor = 0-8 names device 8, but num_devices"),
        ({"component_placement": {**PLACED, "env": 8}, "num_devices": 8}, "env = 8 names device 8"),
        ({"component_placement": {"actor": "3-1"}}, "component_placement.actor"),
        ({"component_placement": PLACED, "turns": None}, "the recipe has no environment"),
        (
            {"component_placement": PLACED, "pools": {"games": {"kind": "env"}}},
            "component_placement.env and pools.games both say where environments are played. Remove one",
        ),
        ({"rollout": {"served": True}}, "component_placement places none"),
        ({"component_placement": {"actor": 0}, "rollout": {"served": True}}, "needs a pool of the engine"),
        ({"actor": {"micro_batch_sise": 3}}, "no counterpart here. Did you mean actor.micro_batch_size"),
        ({"rollout": {"model": {"model_path": "b"}}, "bundle": {"pretrained_model": "a"}}, "the actor has a"),
        ({"actor": {"optim": {"lr": 1}}}, "the recipe has no backend.optimizer"),
        ({"actor": {"global_batch_size": 5}, "batch_size": 2, "sampling": {"samples_per_prompt": 4}}, "not divide"),
        ({"actor": {"global_batch_size": 5}}, "needs whole numbers batch_size"),
    ],
)
def test_what_cannot_be_meant_is_refused(sections, reason):
    with pytest.raises(ConfigError, match=reason):
        flow(**sections)
