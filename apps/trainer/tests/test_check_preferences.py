"""Mistakes of preference recipes, each with its message before work starts."""

import json
import re

import pytest
from PIL import Image

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.types.errors import ConfigError
from unirl.types.recipe import Machine

from .changed_recipes import changed

ONLINE, OFFLINE, AWM, RAFT = (f"worlds/shapes/{name}" for name in ("online_dpo", "dpo", "awm", "raft"))
TARGETS = "sft/shapes"
PLENTY = Machine(num_cpus=1024, num_gpus=1024)


@pytest.fixture(scope="module")
def recipes():
    """The recipes of these tests, resolved once."""
    register_resolvers()
    return {name: resolve(compose(name)) for name in (ONLINE, OFFLINE, AWM, RAFT, TARGETS)}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            ONLINE,
            {"backend.keep_reference": False},
            "DiffusionDPO needs a reference policy: set backend.keep_reference",
        ),
        (
            ONLINE,
            {"selection": None},
            "DiffusionDPO trains on 2 samples of a prompt, but sampling.samples_per_prompt = 8",
        ),
        (ONLINE, {"selection.best_of": 4}, "and selection.best_of = 4. Set selection.best_of: 2"),
        (ONLINE, {"selection.drop_zero_variance": True}, "drop_zero_variance may part the units of DiffusionDPO"),
        (ONLINE, {"stack.micro_batch_size": 7}, "stack.micro_batch_size = 7 must be a multiple of 2"),
        (ONLINE, {"algorithm.rows_per_forward": 5}, "algorithm.rows_per_forward = 5 must be a multiple of 2"),
        (
            OFFLINE,
            {"stack.num_updates_per_batch": 64, "batch_size": 32},
            "batch_size = 32 units do not divide over num_devices * stack.num_updates_per_batch = 64",
        ),
        (
            OFFLINE,
            {"sampling.eta": 0.5},
            "sampling.eta = 0.5: given images have no stochastic steps. Set sampling.eta: 0",
        ),
        (
            OFFLINE,
            {"data._target_": "unirl.data.data_source.MultimodalRLDataSource"},
            "the engine takes the images of the data, but MultimodalRLDataSource brings none",
        ),
        (
            TARGETS,
            {"sampling.samples_per_prompt": 4},
            "sampling.samples_per_prompt = 4, but a row of TargetDataSource has one target",
        ),
        (
            TARGETS,
            {"data._target_": "unirl.data.data_source.MultimodalRLDataSource"},
            "the engine takes the images of the data, but MultimodalRLDataSource brings none",
        ),
        (
            TARGETS,
            {"engine.prompt_dropout": 0.1},
            "engine.prompt_dropout = 0.1 replaces prompts by sampling.negative_prompt, which is null. Set it",
        ),
        (
            TARGETS,
            {"engine.prompt_dropout": 0.1, "sampling.negative_prompt": "", "sampling.distilled_guidance_scale": 3.5},
            "takes its guidance as an input (sampling.distilled_guidance_scale = 3.5). Set it to 0",
        ),
        (
            TARGETS,
            {
                "engine.prompt_dropout": 0.1,
                "sampling.negative_prompt": "",
                "bundle": {
                    "_target_": "unirl.models.z_image.bundle.ZImageBundle",
                    "pretrained_model": "Tongyi-MAI/Z-Image-Turbo",
                    "is_distilled": True,
                },
            },
            "engine.prompt_dropout = 0.1: Tongyi-MAI/Z-Image-Turbo is distilled to sample without guidance",
        ),
        (TARGETS, {"engine.prompt_dropout": 1.0}, "engine.prompt_dropout = 1.0 must be in [0, 1)"),
        (AWM, {"backend.ema": None}, "algorithm.ema_kl_coef = 2.0 needs a moving average of the weights"),
        (
            RAFT,
            {"advantages": {"preset": "flow_grpo"}},
            "WeightedMatching fine-tunes on its samples by weights of at least 0, which AdvantageConfig does not make",
        ),
        (
            AWM,
            {"advantages": {"_target_": "unirl.algorithms.sample_weights.SampleWeights", "kind": "best_of_n"}},
            "SampleWeights makes weights of at least 0, under which AWM would raise the likelihood of every sample",
        ),
        (RAFT, {"advantages.num_best": 0}, "advantages.num_best = 0"),
        (AWM, {"algorithm.weighting": "snr"}, "algorithm.weighting = 'snr' must be one of 'uniform', 't'"),
    ],
)
def test_a_mistake_is_named_with_its_values_and_the_fix(recipes, name, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(recipes[name], changes))


def test_what_gives_a_reference_is_enough(recipes):
    check_recipe(changed(recipes[ONLINE], {"selection": None, "sampling.samples_per_prompt": 2}))
    lora = {"_target_": "unirl.train.configs.LoraConfig", "rank": 4, "alpha": 8}
    check_recipe(changed(recipes[ONLINE], {"backend.keep_reference": False, "backend.lora": lora}))

    check_recipe(changed(recipes[AWM], {"algorithm.ema_kl_coef": 0.0, "backend.ema": None}))


def test_units_divide_over_the_ranks_that_have_samples_of_their_own():
    words = ["runtime=ray", "num_devices=2", "batch_size=3", "stack.micro_batch_size=16"]
    words.append("+backend.topology={_target_: unirl.train.configs.TrainTopology, tp: 2}")
    shared = resolve(compose("worlds/arithmetic/otb", [*words, "stack.num_updates_per_batch=1"]))
    check_recipe(shared, PLENTY)
    told = "batch_size = 3 units do not divide over num_devices / (topology.tp = 2) * stack.num_updates_per_batch = 2"
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_recipe(changed(shared, {"stack.num_updates_per_batch": 2}), PLENTY)


def test_prompts_are_dropped_with_any_negative_prompt(recipes):
    for negative in ("", "blurry"):
        check_recipe(changed(recipes[TARGETS], {"engine.prompt_dropout": 0.1, "sampling.negative_prompt": negative}))


def test_pairs_are_read_by_the_check(recipes, tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "good.png")
    Image.new("RGB", (16, 16)).save(tmp_path / "small.png")
    good = {"prompt": "a red circle", "images": ["good.png", "good.png"], "scores": [1, 0]}
    path = tmp_path / "pairs.jsonl"

    def check(*rows, **changes):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        check_recipe(changed(recipes[OFFLINE], {"data.path": str(path), **changes}), PLENTY)

    check(good)
    for change, message in (
        ({"images": ["good.png", "absent.png"]}, "image absent.png does not exist"),
        ({"images": ["good.png", "small.png"]}, "image small.png has 16 x 16 pixels"),
        ({"images": ["good.png"], "scores": [1]}, "1 images, but 2 samples per prompt"),
        ({"scores": [1, 1]}, "the scores [1, 1] are equal"),
    ):
        with pytest.raises(ConfigError, match=rf"data\.path: .*pairs\.jsonl:2: {re.escape(message)}"):
            check(good, {**good, **change})
    with pytest.raises(ConfigError, match=r"eval\.prompts = .* brings images, which would be judged"):
        check(good, **{"eval.prompts": str(path)})
