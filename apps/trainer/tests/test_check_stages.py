"""Mistakes of recipes with a writer and a painter, each with its message."""

import re

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import build_values, check_recipe
from unirl.config.former import modernised
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.types.errors import ConfigError

from .changed_recipes import changed


@pytest.fixture(scope="module")
def recipe():
    register_resolvers()
    return resolve(compose("worlds/phrases/both"))


PAINTING = "policies.painter.sampling"
WRITTEN = "unirl.rollout.stages.reading.WrittenPrompt"
REPLICA = {"_target_": "unirl.rollout.engine.replica.engine.ReplicaRolloutEngine", "forward_batch_size": 4}
MISTAKES = [
    ({"stages.text.policy": "poet"}, "stages.text.policy = poet: there is no such policy; there are writer, painter."),
    ({"stages.text.policy": ...}, "stages.text.policy is missing; name the policy that it samples from: writer, paint"),
    (
        {"stages.image.grows_from": "sketch"},
        "stages.image.grows_from = sketch: no stage makes that track; there are text, image. Name one of them, or null "
        "for the request.",
    ),
    (
        {"stages.text.grows_from": "image"},
        "stages grow from each other: text <- image, image <- text. Let one of them grow from the request",
    ),
    ({"stages.image.grows_from": ...}, "stages: text, image all grow from the request; one does, and the others from"),
    (
        {"stages.image.policy": "writer"},
        "policies.painter: no stage samples from it; the stages sample from writer. Give it a stage, or remove it.",
    ),
    ({"stages.image.draws": 1}, "stages.image.draws: unknown key."),
    ({"stages.image": "painter"}, "stages.image = 'painter' must be a mapping of policy, grows_from,"),
    (
        {"stages.text.reads": {"_target_": WRITTEN}},
        "stages.text.reads: WrittenPrompt reads the text of a stage above, but stages.text grows from the request.",
    ),
    (
        {"sampling": {"_target_": "unirl.types.sampling.ARSamplingParams", "temperature": 1.0}},
        "sampling: each stage has its own, or its policy's. Move it to stages.text.sampling.",
    ),
    (
        {"engine": {"_target_": "unirl.rollout.engine.composed.engine.ComposedEngine"}},
        "`stages` replaces these, and both are given. Remove engine.",
    ),
    (
        {"selection": {"best_of_children": 6}},
        "selection.best_of_children = 6 exceeds policies.painter.sampling.samples_per_prompt = 4. Lower it, or make mo",
    ),
    (
        {"reward.track": ...},
        "policies.painter.algorithm: the track image trains, but rewards are of text (reward.track = null, the first "
        "track) and of what it grew from. Set reward.track: image, or policies.painter.algorithms.image: null.",
    ),
    (
        {"policies.painter.engine.drop_text_encoders": True},
        "policies.painter.engine.drop_text_encoders encodes every prompt before the run, but WrittenPrompt reads "
        "prompts that are written in it. Set it to false.",
    ),
    (
        {"policies.painter.engine": ...},
        "stages.image.engine is missing, and so is policies.painter.engine, which it would take. Add one of them.",
    ),
    ({"policies.painter.engine.track": "image"}, "policies.painter.engine.track is set by the trainer. Remove it"),
    (
        {"policies.painter.trains": False, "policies.writer.trains": False},
        "policies: writer, painter all have trains: false. Let one of them train.",
    ),
    ({"policies.painter.trains": "no"}, "policies.painter.trains = 'no' must be true or false."),
    ({"policies.painter.frozen": True}, "policies.painter.frozen: unknown key."),
    (
        {"batch_size": 3, "policies.writer.sampling.samples_per_prompt": 3},
        "batch_size * policies.writer.sampling.samples_per_prompt = 3 * 3 = 9 is 9 samples a device, not divisible by "
        "policies.writer.stack.num_updates_per_batch = 2. Change one of: batch_size, "
        "policies.writer.sampling.samples_per_prompt, policies.writer.stack.num_updates_per_batch.",
    ),
    (
        {f"{PAINTING}.samples_per_prompt": 1},
        "policies.painter.sampling.samples_per_prompt = 1: a group of one has no advantage, so nothing would be "
        "learnt. Set it to 2 or more.",
    ),
    (
        {"policies.writer.engine._target_": "unirl.rollout.engine.replica.text.ReplicaTextEngine"},
        "ReplicaTextEngine has weights of its own and would sample from the untrained policy to the end. Set "
        "policies.writer.sync._target_: ",
    ),
    (
        {"policies.writer.sync": {"_target_": "unirl.distributed.weight_sync.full.FullWeightSync"}},
        "policies.writer.sync does nothing with TrainsideTextEngine, which samples with the model that trains.",
    ),
    ({"policies.writer.sampling.top_p": 0.9}, "sampling.top_p = 0.9 draws from a part of the vocabulary"),
    (
        {"eval.policy": {"painter": "ema"}},
        "eval.policy = {painter: ema} is not kept by this recipe; there are writer: default, painter: default, "
        "painter: old. Set policies.painter.backend.ema to keep an average.",
    ),
    (
        {"eval.policy": "old"},
        "eval.policy = 'old': this recipe trains several policies. Say of which: {writer: old, painter: old}.",
    ),
    (
        {"runtime": "ray", "num_devices": 2, "placement": {"train": 0, "rollout": 1}},
        "placement.rollout = 1 gives the engine of stages.text separate workers, but TrainsideTextEngine samples with "
        "the very weights that train.",
    ),
    (
        {"runtime": "ray", "num_devices": 2, "pools": {"train": {"devices": 0}}, "stages.image.pool": "painter"},
        "stages.image.pool = painter: there is no such pool; there are train. Add it to pools.",
    ),
    ({"pools": {"train": {"devices": 0}, "idle": {"devices": None}}}, "pools.idle has no devices. Name some in"),
    ({"pools": {"train": {"gpus": 0}}}, "pools.train.gpus: unknown key"),
    (
        {"runtime": "ray", "pools": {"train": {"devices": 0}}, "placement.train": 0},
        "placement.train = 0: placement is the short form of pools, and both are there. Move it to pools.train.devices",
    ),
    (
        {"runtime": "ray", "num_devices": 2, "pools": {"train": {"devices": 0}, "idle": {"devices": 1}}},
        "pools.idle.devices = 1: nothing stands in the pool idle. Name it in stages.<track>.pool, engine.pool or",
    ),
    (
        {"runtime": "ray", "pools": {"train": {"devices": 0, "served": True}}},
        "pools.train.served is for engines, but what trains stands there. Give it another pool, or remove served.",
    ),
    (
        {
            "runtime": "ray",
            "num_devices": 2,
            "pools": {"train": {"devices": 0}, "judge": {"devices": 1, "served": True}},
        }
        | {"reward.pool": "judge"},
        "pools.judge.served is for engines, but the reward stands there.",
    ),
    (
        {"runtime": "ray", "num_devices": 2, "pools": {"train": {"devices": 0, "samples_per_call": 4}}},
        "pools.train.samples_per_call does nothing without pools.train.served: true. Set it, or remove",
    ),
    ({"reward.pools": {"clip": "judge"}}, "reward.pools.clip = judge: there is no such pool; there are none."),
    (
        {"runtime": "ray", "num_devices": 2, "pools": {"train": {"devices": 0}, "judge": {"devices": 1}}}
        | {"reward.pools": {"clip": "judge"}},
        "reward.pools names ['clip'], which are no scorers; reward.scorers names [",
    ),
    (
        {"runtime": "ray", "num_devices": 2, "pools": {"train": {"devices": 0}, "judge": {"devices": 1}}}
        | {"reward.pools": {"shapes": "judge"}},
        "reward.pools names every scorer, and one must stay to compose the reward. Leave one out; its pool is",
    ),
    ({"pools": {"train": {"devices": 0, "samples_per_call": 0}}}, "pools.train.samples_per_call = 0 must be"),
    (
        {"runtime": "ray", "num_devices": 4, "pools": {"train": {"devices": 0}, "judge": {"devices": "1-3"}}}
        | {"reward.pool": "judge"},
        "samples do not divide over the 3 devices of pools.judge.devices = 1-3. Change one of them.",
    ),
    ({"reward.is_async": True}, "the engines of stages make whole responses only. Set reward.is_async: false."),
    (
        {"policies.painter.stack.track": "picture"},
        "policies.painter.stack.track = picture, but the engine makes the track",
    ),
    (
        {
            "stages.again": {"policy": "painter", "grows_from": "text", "engine": REPLICA},
            "policies.painter.engine": REPLICA,
            "policies.painter.sync": {"_target_": "unirl.distributed.weight_sync.full.FullWeightSync"},
        },
        "policy painter: stages.image (ReplicaRolloutEngine) and stages.again (ReplicaRolloutEngine) each have weights",
    ),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_a_mistake_has_its_message(recipe, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(modernised(changed(recipe, changes)))


def test_what_only_stages_have_does_nothing_without_them(recipe):
    flat = changed(recipe, {"stages": ...})
    with pytest.raises(ConfigError, match="policies.writer.engine: no stage samples from writer. Add stages, or"):
        check_recipe(flat)


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
    assert seen.policy_of(algorithm).name == "painter" and not seen.is_staged
    assert run.seen_by(run.reward) is run and run.samples_per_prompt == 8
