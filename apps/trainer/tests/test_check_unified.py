"""What `trainer check` says of a unified model: one policy with a track of thoughts and a track of images."""

import copy

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import build_values, check_recipe
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.types.errors import ConfigError

TEXTS, IMAGES = "stages.text.sampling", "stages.image.sampling"
BATCH = "stages.image.engine.forward_batch_size"


@pytest.fixture(scope="module")
def recipe():
    register_resolvers()
    return resolve(compose("bagel/think_nft", []))


def changed(recipe, changes):
    """The recipe with other values at dotted places."""
    made = copy.deepcopy(recipe)
    for place, value in changes.items():
        *path, last = place.split(".")
        node = made
        for key in path:
            node = node[key]
        node[last] = value
    return made


def test_each_part_is_judged_by_its_stage(recipe):
    check_recipe(recipe)
    run = run_of(recipe)
    seen = {track: run.seen_by(part) for track, part in run.policy.algorithms.items()}
    assert {track: each.sampling.at for track, each in seen.items()} == {"text": TEXTS, "image": IMAGES}
    assert run.seen_by(run.policy.bundle).sampling.at == IMAGES
    assert run.seen_by(run.policy.pipelines["text"]).engine.name == "TrainsideTextEngine"
    assert run.seen_by(run.reward) is run
    assert run.samples_per_prompt == recipe["stages"]["text"]["sampling"]["samples_per_prompt"]


@pytest.mark.parametrize("track", ["text", "image"])
def test_a_track_may_rest(recipe, track):
    run = changed(recipe, {f"algorithms.{track}": None, "stack.losses": {}, "stack.measures_balance": False})
    checked = check_recipe(run)
    build_values(checked)
    assert track not in checked.policy.algorithms and checked.policy.resting == (track,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithms": {"image": "gone"}}, "algorithms.image = 'gone' must be a mapping"),
        ({"algorithms": {"text": None, "image": None}}, "algorithm is missing from the recipe. Add it .or algorithms"),
        ({f"{TEXTS}.top_p": 0.9}, "draws from a part of the vocabulary, and replay scores under"),
        ({f"{TEXTS}.temperature": 0}, "temperature = 0 is greedy"),
        ({f"{IMAGES}.height": 520}, "sampling.height = 520 is not divisible by 16. The nearest that is: 512"),
        ({f"{IMAGES}.samples_per_prompt": 1}, f"{IMAGES}.samples_per_prompt = 1: a group of one"),
        ({f"{TEXTS}.samples_per_prompt": 1}, f"{TEXTS}.samples_per_prompt = 1: a group of one"),
        ({"algorithms.image.num_timesteps": 15}, "num_timesteps = 15 exceeds sampling.num_inference_steps = 14"),
        (
            {"reward.track": "text"},
            r"algorithms.image: the track image trains, but rewards are of text \(reward.track = text\) and of what it",
        ),
        (
            {"stages.text.advantages": {"_target_": "unirl.algorithms.inherited.InheritedAdvantages"}},
            "stages.text.advantages: InheritedAdvantages takes the advantages of the track that a stage grows from, "
            "and text grows from none",
        ),
        (
            {f"{IMAGES}.eta": 0.5, f"{IMAGES}.one_step": "prompt"},
            f"{IMAGES}.one_step = prompt: where several stages sample",
        ),
        ({"stack.losses": {"poem": {}}}, r"names tracks \['poem'\], which no algorithm trains"),
        (
            {"stages.image.reads": {}, "stages.image.grows_from": "text", "pipelines.text": None},
            "pipelines.text = None",
        ),
    ],
)
def test_mistakes_have_their_message(recipe, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_recipe(changed(recipe, changes))


def test_sizes_that_thoughts_choose_need_one_image_per_forward_on_several_devices():
    register_resolvers()
    recipe = changed(resolve(compose("hunyuan_image3/think_recaption", [])), {"pipelines.text.chooses_size": True})
    check_recipe(recipe)
    for changes, message in (
        ({BATCH: 2}, f"8 devices must run equally many: {BATCH} = 2 must be 1"),
        ({"stack.micro_batch_size": 2}, "stack.micro_batch_size = 2 must be 1. Set stack.micro_batch_size: 1, or"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_recipe(changed(recipe, changes))
    served = resolve(compose("bagel/think_vllm_omni", []))
    with pytest.raises(ConfigError, match=r"draws images of one size. Set pipelines.text.chooses_size: false, or"):
        check_recipe(changed(served, {"pipelines.text": recipe["pipelines"]["text"]}))
