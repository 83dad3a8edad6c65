"""What `trainer check` says of schedules that cannot do what they say."""

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.types.errors import ConfigError
from unirl.types.recipe import Machine

MACHINE = Machine(num_cpus=8, num_gpus=0)
IMAGES = "worlds/shapes/replica"
TEXTS = "worlds/arithmetic/grpo"
TURNS = "worlds/tools/grpo"
ASYNC = ("parts/schedule=async", "parts/correction=truncated_steps")
TEXT_ASYNC = ("parts/schedule=async", "parts/correction=truncated", "parts/engine=text_replica_cpu")
IN_PLACE = (*TEXT_ASYNC, "schedule.on_push=in_place")
PIPELINED = ("parts/schedule=pipelined", "schedule.groups_per_request=4", "stack.num_updates_per_batch=1")
RAY = ("runtime=ray", "num_devices=3")
POOLS = "+pools={train:{devices:0},rollout:{devices:1,served:true},reward:{devices:2}}"


def found(recipe, *words):
    """The messages on a changed recipe."""
    register_resolvers()
    try:
        check_recipe(resolve(compose(recipe, list(words))), MACHINE)
    except ConfigError as error:
        return str(error)
    return ""


def test_schedules_that_fit_are_taken():
    for recipe, words in (
        (IMAGES, ()),
        (IMAGES, ASYNC),
        (IMAGES, (*ASYNC, "schedule.on_push=retract")),
        (IMAGES, PIPELINED),
        (IMAGES, ("parts/schedule=one_step_off", "parts/correction=truncated_steps")),
        (TEXTS, IN_PLACE),
        (IMAGES, (*ASYNC, *RAY, POOLS)),
    ):
        assert found(recipe, *words) == "", (recipe, words)


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        (IMAGES, ["schedule.max_staleness=1"], "schedule.max_staleness does nothing with schedule.kind: sync"),
        (IMAGES, ["schedule.window=.3"], "schedule.window does nothing with schedule.kind: sync"),
        (IMAGES, [*PIPELINED, "schedule.max_staleness=1"], "max_staleness = 1, but pipelined is 0"),
        (IMAGES, ["parts/schedule=pipelined"], "and there is one of batch_size"),
        (IMAGES, ["parts/schedule=one_step_off", "schedule.max_staleness=2"], "= 2, but one_step_off is 1"),
        (IMAGES, ["parts/schedule=one_step_off", "schedule.groups_per_request=4"], "which one_step_off takes whole"),
        (
            IMAGES,
            [*ASYNC, "trainer._target_=unirl.trainer.loops.asynchronous.AsyncTrainer", "+trainer.max_staleness=1"],
            "both name the loop",
        ),
        (IMAGES, [*ASYNC, "schedule.replay=nowhere.jsonl"], "schedule.replay = nowhere.jsonl cannot be read"),
        (IMAGES, [*ASYNC, "schedule.groups_per_request=5"], "groups_per_request = 5 does not divide batch_size"),
    ],
)
def test_a_schedule_says_what_it_does(recipe, words, message):
    assert message in found(recipe, *words)


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("worlds/shapes/nft", ["parts/schedule=async"], "samples with the very weights that train"),
        (IMAGES, [*ASYNC, *RAY], "is in the workers that train, which do one thing at a time"),
        (IMAGES, [*ASYNC, *RAY], "the reward is in the workers that train"),
        (IMAGES, [*ASYNC, "residency.offload_optimizer=true"], "residency.offload_optimizer: true moves things off"),
        (IMAGES, [*ASYNC, *RAY, "parts/schedule=hybrid"], "is in none. Name its devices in pools.<name>"),
        (IMAGES, [*ASYNC, *RAY, POOLS, "parts/schedule=hybrid"], "no served pool has any of pools.train"),
        (
            IMAGES,
            [*ASYNC, *RAY, POOLS.replace("train:{devices:0", "train:{devices:0-1"), "parts/schedule=hybrid"],
            "is on a device that trains, so that nothing generates meanwhile",
        ),
        (IMAGES, [*ASYNC, "schedule.requests_at_once=2"], "takes one request at a time. Put it in a served pool"),
    ],
)
def test_what_overlaps_stands_apart(recipe, words, message):
    assert message in found(recipe, *words)


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        (IMAGES, ["schedule.on_push=retract"], "does nothing where the engine waits for training"),
        (IMAGES, [*ASYNC, "schedule.on_push=in_place"], "denoising goes on from a latent with retract too"),
        (TURNS, IN_PLACE, "of single texts, and turns takes turns with an environment"),
        (
            "worlds/shapes/sglang",
            [*ASYNC, "schedule.on_push=retract"],
            "SGLangDiffusionEngine does not continue what was ended early",
        ),
        (
            "hunyuan_image3/mixgrpo",
            ["parts/engine=replica", *ASYNC, "schedule.on_push=retract", "+pipeline.replays_experts=true"],
            "pipeline.replays_experts notes the experts of one",
        ),
        (IMAGES, [*ASYNC, "selection.dynamic_sampling=true", "schedule.replay=x"], "so that no order can be repeated"),
    ],
)
def test_what_a_push_cuts_short_can_go_on(recipe, words, message):
    assert message in found(recipe, *words)


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        (IMAGES, [*ASYNC, "schedule.too_old=drop"], "too_old = drop does nothing without schedule.window"),
        (IMAGES, [*ASYNC, *RAY, POOLS, "schedule.window=.3"], "is less than 2, so that none is overtaken"),
        (
            IMAGES,
            [*ASYNC, *RAY, POOLS, "schedule.window=.3", "schedule.max_staleness=0"],
            "does nothing with max_staleness: 0",
        ),
    ],
)
def test_a_window_overtakes_something(recipe, words, message):
    assert message in found(recipe, *words)


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        (
            IMAGES,
            [*PIPELINED, "stack.num_updates_per_batch=2"],
            "of requests in one update, stack.num_updates_per_batch",
        ),
        (IMAGES, [*PIPELINED, "advantages.scale=batch"], "advantages.scale = batch needs all of a rollout"),
        (TEXTS, ["parts/engine=text_replica_cpu", *PIPELINED, "parts/correction=m2po"], "judges an update as a whole"),
        ("worlds/arithmetic/ppo", ["parts/engine=text_replica_cpu", *PIPELINED], "which the critic of ARPPO does not"),
    ],
)
def test_parts_of_a_rollout_add_up_to_one_update(recipe, words, message):
    assert message in found(recipe, *words)


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("worlds/shapes/refl", ["parts/schedule=async"], "samples while it trains, to differentiate through both"),
        (IMAGES, ["parts/schedule=async"], "so nothing corrects for those that sampled"),
        (IMAGES, [*ASYNC, "guardrails.action=rollback"], "guardrails.action: rollback returns to older weights"),
        (
            IMAGES,
            ["parts/correction=truncated_steps", "algorithm.rollout_correction.max_staleness=1"],
            "drops what is old",
        ),
    ],
)
def test_what_is_old_is_corrected(recipe, words, message):
    assert message in found(recipe, *words)
