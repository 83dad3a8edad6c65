"""What `trainer check` says of a unified model: one policy with a track of thoughts and a track of images."""

import copy

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import build_values, check_recipe
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.types.errors import ConfigError


@pytest.fixture(scope="module")
def recipe():
    register_resolvers()
    return resolve(compose("unified_model/bagel_nft_think", []))


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


def test_each_algorithm_is_judged_by_how_its_track_is_sampled(recipe):
    check_recipe(recipe)
    run = run_of(recipe)
    seen = {track: run.seen_by(part) for track, part in run.policy.algorithms.items()}
    assert {track: each.sampling.at for track, each in seen.items()} == {
        "text": "sampling.ar",
        "image": "sampling.diffusion",
    }
    assert run.seen_by(run.policy.bundle).sampling.at == "sampling.diffusion"
    assert run.seen_by(run.reward) is run and run.samples_per_prompt == recipe["sampling"]["ar"]["samples_per_prompt"]


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
        ({"sampling.ar.top_p": 0.9}, "draws from a part of the vocabulary, and replay scores under"),
        ({"sampling.ar.temperature": 0}, "temperature = 0 is greedy"),
        ({"sampling.diffusion.height": 520}, "sampling.height = 520 is not divisible by 16. The nearest that is: 512"),
        ({"sampling.diffusion.samples_per_prompt": 1}, "sampling.diffusion.samples_per_prompt = 1: a group of one"),
        ({"sampling.ar.samples_per_prompt": 1}, "sampling.ar.samples_per_prompt = 1: a group of one"),
        ({"algorithms.image.num_timesteps": 15}, "num_timesteps = 15 exceeds sampling.num_inference_steps = 14"),
        ({"reward.track": "text"}, "reward.track = text, but the track of the images is image"),
        (
            {"engine": {"_target_": "two_tracks.OneCopy", "forward_batch_size": 4}},
            r"sample from different copies \(text: the policy that trains, image: old\), but OneCopy samples all",
        ),
        ({"stack.losses": {"poem": {}}}, r"names tracks \['poem'\], which no algorithm trains"),
    ],
)
def test_mistakes_have_their_message(recipe, changes, message, tmp_path, monkeypatch):
    (tmp_path / "two_tracks.py").write_text(
        "from unirl.rollout.engine.base import BaseRolloutEngine\n\n\n"
        "class OneCopy(BaseRolloutEngine):\n"
        "    def __init__(self, pipelines, stores, *, forward_batch_size, tracks=('text', 'image')):\n"
        "        pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_recipe(changed(recipe, changes))


def test_the_engine_wants_both_pipelines_and_two_stages(recipe):
    lacking = changed(recipe, {"pipelines": {"image": recipe["pipelines"]["image"]}, "algorithms.text": None})
    with pytest.raises(ConfigError, match="samples the pipelines text and image, there is image. Add pipelines.text"):
        check_recipe(lacking)
    flat = changed(recipe, {"sampling": recipe["sampling"]["diffusion"]})
    with pytest.raises(ConfigError, match="makes texts and images, but sampling._target_ = .*DiffusionSamplingParams"):
        check_recipe(flat)


def test_sizes_that_thoughts_choose_need_one_image_per_forward_on_several_devices():
    register_resolvers()
    recipe = changed(resolve(compose("unified_model/hi3_think_recaption", [])), {"pipelines.text.chooses_size": True})
    check_recipe(recipe)
    for changes, message in (
        ({"engine.forward_batch_size": 2}, "8 devices must run equally many: engine.forward_batch_size = 2 must be 1"),
        ({"stack.micro_batch_size": 2}, "stack.micro_batch_size = 2 must be 1. Set stack.micro_batch_size: 1, or"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_recipe(changed(recipe, changes))
    served = resolve(compose("unified_model/bagel_vllmomni", []))
    with pytest.raises(ConfigError, match=r"draws images of one size. Set pipelines.text.chooses_size: false, or"):
        check_recipe(changed(served, {"pipelines.text": recipe["pipelines"]["text"]}))
