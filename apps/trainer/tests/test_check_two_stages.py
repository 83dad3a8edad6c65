"""Mistakes of recipes with a writer and a painter, each with its message."""

import re

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import build_values, check_recipe
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.types.errors import ConfigError

from .changed_recipes import changed


@pytest.fixture(scope="module")
def recipe():
    register_resolvers()
    return resolve(compose("pe/shapes"))


DIFFUSION = "policies.painter.sampling"
MISTAKES = [
    (
        {"engine.writer": "poet"},
        "engine.writer = poet is no policy of this recipe; there are writer, painter. Name one.",
    ),
    (
        {"engine.writer": "painter", "engine.painter": "writer"},
        "policies.painter.sampling samples images, but engine.writer = painter makes texts. Name the other policy.",
    ),
    (
        {f"{DIFFUSION}.num_inference_steps": 9},
        "sampling.diffusion is not policies.painter.sampling, which the policy's own parts are judged by. Write "
        "diffusion: ${policies.painter.sampling}.",
    ),
    (
        {"reward.track": ...},
        "reward.track = null, the texts, but the painter's track is image. Set reward.track: image.",
    ),
    (
        {"policies.painter.engine.drop_text_encoders": True},
        "policies.painter.engine.drop_text_encoders encodes every prompt before the run, but they are written in it. "
        "Set it to false.",
    ),
    (
        {"policies.painter.engine": ...},
        "policies.painter.engine is missing: engine._target_ is composed of the engines of all policies. Add it there.",
    ),
    (
        {"policies.painter.trains": False, "policies.writer.trains": False},
        "policies: writer, painter all have trains: false. Let one of them train.",
    ),
    ({"policies.painter.trains": "no"}, "policies.painter.trains = 'no' must be true or false."),
    ({"policies.painter.frozen": True}, "policies.painter.frozen: unknown key."),
    (
        {"batch_size": 3, "policies.writer.sampling.samples_per_prompt": 3, "sampling.ar.samples_per_prompt": 3},
        "batch_size * sampling.ar.samples_per_prompt = 3 * 3 = 9 is 9 samples a device, not divisible by "
        "policies.writer.stack.num_updates_per_batch = 2. Change one of: batch_size, sampling.ar.samples_per_prompt, "
        "policies.writer.stack.num_updates_per_batch.",
    ),
    (
        {f"{DIFFUSION}.samples_per_prompt": 1, "sampling.diffusion.samples_per_prompt": 1},
        "policies.painter.sampling.samples_per_prompt = 1: a group of one has no advantage, so nothing would be "
        "learnt. Set it to 2 or more.",
    ),
    (
        {"policies.writer.engine._target_": "unirl.rollout.engine.replica.text.ReplicaTextEngine"},
        "ReplicaTextEngine has weights of its own and would sample from the untrained policy for ever. Set "
        "policies.writer.sync._target_: ",
    ),
    (
        {"policies.writer.sync": {"_target_": "unirl.distributed.weight_sync.full.FullWeightSync"}},
        "policies.writer.sync does nothing with TrainsideTextEngine, which samples with the model that trains.",
    ),
    (
        {"policies.writer.sampling.top_p": 0.9, "sampling.ar.top_p": 0.9},
        "sampling.top_p = 0.9 draws from a part of the vocabulary",
    ),
    (
        {"eval.policy": "painter/ema"},
        "eval.policy = 'painter/ema' is not kept by this recipe; there are painter/old. Set "
        "policies.painter.backend.ema to keep an average.",
    ),
    (
        {"runtime": "ray", "num_devices": 2, "placement": {"train": 0, "rollout": 1}},
        "placement.rollout = 1, but ComposedEngine is composed of engines beside what trains. Remove "
        "placement.rollout.",
    ),
    ({"reward.is_async": True}, "but engine ComposedEngine makes whole responses only. Set reward.is_async: false."),
    (
        {"policies.painter.stack.track": "picture"},
        "policies.painter.stack.track = picture, but the engine makes the track",
    ),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_a_mistake_has_its_message(recipe, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(recipe, changes))


def test_one_engine_for_all_leaves_no_place_for_a_policy_that_only_samples(recipe):
    one = changed(recipe, {"engine": {"_target_": "unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine"}})
    with pytest.raises(
        ConfigError, match=r"policies.writer.engine: the run's engine samples for all policies, so this"
    ):
        run_of(one)
    for policy in one["policies"].values():
        del policy["engine"], policy["sampling"]
    one["policies"]["painter"]["trains"] = False
    with pytest.raises(ConfigError, match="policies.painter.trains: false needs an engine of the policy's own"):
        run_of(one)


@pytest.mark.parametrize("still", ["writer", "painter"])
def test_a_policy_that_only_samples_needs_neither_backend_nor_algorithm(recipe, still):
    gone = {f"policies.{still}.{key}": ... for key in ("backend", "algorithm", "stack", "advantages")}
    run = changed(recipe, {**gone, f"policies.{still}.trains": False})
    checked = check_recipe(run)
    build_values(checked)
    assert list(checked.frozen) == [still] and list(checked.policies) != [still]
    kept = changed(recipe, {f"policies.{still}.trains": False, f"policies.{still}.backend.nonsense": 1})
    check_recipe(kept)  # what only learning needs is not built


def test_each_policy_is_judged_by_its_own_engine_and_sampling(recipe):
    run = run_of(recipe)
    algorithm = run.policies["painter"].algorithms["image"]
    seen = run.seen_by(algorithm)
    assert (seen.sampled, seen.engine.at, seen.sampling.at) == (
        "painter",
        "policies.painter.engine",
        "policies.painter.sampling",
    )
    assert seen.policy_of(algorithm).name == "painter" and not seen.is_composed
    assert run.seen_by(run.reward) is run and run.samples_per_prompt == 8
