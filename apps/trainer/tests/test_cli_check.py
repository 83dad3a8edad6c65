"""Every packaged recipe passes the check, and every kind of mistake has its message."""

import ast
import copy
import importlib.metadata
import importlib.resources
import inspect
import json
import math
import re
import sys
from pathlib import Path
from typing import cast

import pytest
from omegaconf import OmegaConf

import unirl.config
from unirl.algorithms.transition_rules import rollout_log_probs_are_replayed_ones
from unirl.app.environment import register_resolvers
from unirl.config.annotations import mismatch
from unirl.config.catalog import RECIPES_MODULE, available, packaged_name
from unirl.config.check import TOP_LEVEL, build_values, check_recipe, run_findings
from unirl.config.instantiation import import_target
from unirl.config.placement import groups_that_overlap_take_turns
from unirl.config.recipes import compose, published, render, resolve
from unirl.config.runs import policy_sections, run_of
from unirl.config.schema import SEVERAL, PolicySections, components, keys, plain_sections
from unirl.config.signatures import read_module, read_target
from unirl.rollout.engine.child.options import EngineProcesses
from unirl.types.errors import ConfigError
from unirl.types.recipe import Machine

from .changed_recipes import changed

RECIPES = list(available())
PLENTY = Machine(num_cpus=1024, num_gpus=1024)


def test_the_recipes_that_the_readme_promises_are_there():
    promised = ("flowgrpo", "dancegrpo", "mixgrpo", "nft")
    assert set(RECIPES) >= {f"{folder}/{name}" for folder in ("worlds/shapes", "sd3") for name in promised}
    assert all(available().values()), "every recipe says in a comment what it is"


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_passes_the_check_and_names_itself(recipes, name):
    check_recipe(recipes[name])
    assert recipes[name]["recipe"] == name


@pytest.mark.parametrize("name", RECIPES)
def test_values_of_a_recipe_build(recipes, name):
    build_values(run_of(recipes[name]))


PUBLISHED = {
    "num_inference_steps": ("sampling", "num_inference_steps", 10),
    "guidance": ("sampling", "guidance_scale", 1.0),
    "height": ("sampling", "height", 512),
    "samples": ("sampling", "samples_per_prompt", 16),
    "clip": ("algorithm", "clip_range", 1e-4),
    "anchor": ("algorithm", "old_logp_source", "auto"),
    "updates": ("stack", "num_updates_per_batch", 2),
}


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("sd3/grpo", {"num_devices": 8, "eta": 0.7, "micro": 4, "decay": 0.0, "kernel": "Flow", "same": False}),
        (
            "sd3/dancegrpo",
            {"num_devices": 16, "eta": 0.3, "micro": 8, "decay": 0.0, "kernel": "Dance", "same": True}
            | {"preset": "dance_grpo"},
        ),
        (
            "sd3/mixgrpo",
            {"num_devices": 16, "eta": 0.7, "micro": 8, "decay": 1e-4, "kernel": "Flow", "same": True}
            | {"preset": "dance_grpo"},
        ),
        (
            "sd3/nft",
            {"num_devices": 8, "eta": 0.0, "micro": 8, "decay": 1e-4, "kernel": "Flow", "same": False}
            | {"preset": "flow_grpo_global_std", "convention": "diffusers", "solver": "dpmpp_2m"},
        ),
    ],
)
def test_real_size_recipes_hold_the_published_numbers(recipes, name, own):
    recipe = recipes[name]
    for key, (section, field, value) in PUBLISHED.items():
        if name != "sd3/nft" or key not in ("clip", "anchor", "updates"):
            assert recipe[section][field] == value, key
    assert recipe["batch_size"] == 48 and recipe["num_devices"] == own["num_devices"]
    assert recipe["sampling"]["eta"] == own["eta"] and recipe["stack"]["micro_batch_size"] == own["micro"]
    assert recipe["sampling"].get("init_same_noise", False) == own["same"]
    optimizer = recipe["backend"]["optimizer"]
    assert (optimizer["learning_rate"], optimizer["betas"], optimizer["epsilon"]) == (3e-4, [0.9, 0.999], 1e-8)
    assert optimizer["weight_decay"] == own["decay"]
    assert (recipe["backend"]["lora"]["rank"], recipe["backend"]["lora"]["alpha"]) == (32, 64)
    assert recipe["pipeline"]["strategy"]["_target_"] == f"unirl.sde.kernels.{own['kernel']}SDEStrategy"
    assert recipe["advantages"]["preset"] == own.get("preset", "unirl_global_std")
    assert recipe["sampling"].get("post_solver", "euler") == own.get("solver", "euler")
    assert recipe["pipeline"]["schedule"] == {
        "_target_": "unirl.sde.schedule.SigmaSchedule",
        "convention": own.get("convention", "linear"),
        "shift": 3.0,
    }


@pytest.mark.parametrize("name", ["sd3/grpo", "sd3/guard", "sd3/flowdppo", "sd3/dpok"])
def test_three_stochastic_steps_come_from_the_first_half(recipes, name):
    scheduler = recipes[name]["sampling"]["scheduler"]
    assert scheduler["_target_"] == "unirl.sde.windows.RandomSubset"
    assert (scheduler["num_sde_steps"], scheduler["fraction"], scheduler["num_steps"]) == (3, [0.0, 0.5], 10)


def test_nft_follows_the_published_old_policy(recipes):
    recipe = recipes["sd3/nft"]
    decay = recipe["algorithm"]["decay"]
    assert (decay["flat"], decay["rate"], decay["cap"]) == (0, 0.001, 0.5)
    assert recipe["engine"]["forward_batch_size"] == 32 and recipe["stack"]["num_updates_per_batch"] == 1
    assert (recipe["algorithm"]["beta"], recipe["algorithm"]["advantage_max"]) == (1.0, 5.0)


def test_mixgrpo_has_the_published_window(recipes):
    for name, stay in (("sd3/mixgrpo", 25), ("sd3/mixgrpo_flash", 20)):
        window = recipes[name]["sampling"]["scheduler"]
        assert (window["window_size"], window["iters_per_window"], window["stride"]) == (4, stay, 1)
        assert window["strategy"] == "progressive" and window["roll_back"] is True
        assert window["max_step"] == recipes[name]["sampling"]["num_inference_steps"] - 2


GRPO, NFT = "worlds/shapes/flowgrpo", "worlds/shapes/nft"
WINDOWS = "unirl.sde.windows"
LORA = {"_target_": "unirl.train.configs.LoraConfig", "rank": 2, "alpha": 2}
OF_ONE = {"_target_": "unirl.reward.function.FunctionRewardScorer", "name": "one"}
MISTAKES = [
    ({"num_rollout": 3}, "unknown key 'num_rollout' in the recipe. Did you mean num_rollouts?"),
    ({"seed": ...}, "seed is missing from the recipe"),
    ({"data": ...}, "data is missing from the recipe"),
    ({"num_rollouts": "many"}, "num_rollouts = 'many' must be an integer"),
    ({"num_devices": True}, "num_devices = True must be an integer"),
    ({"runtime": "rya"}, "runtime = 'rya' must be one of 'local', 'ray'"),
    ({"device": "gpu"}, "device = 'gpu' must be one of 'auto', 'cpu', 'cuda', 'npu', 'xpu', 'mps'"),
    ({"stack": 3}, "stack = 3 must be a mapping"),
    ({"save.intervall": 3}, "save.intervall: unknown key. Did you mean interval?"),
    ({"save.interval": -1}, "save.interval = -1 must be at least 0"),
    ({"save.keep_last": 0}, "save.keep_last = 0 must be at least 1"),
    ({"stack.micro_batch_size": 0}, "stack.micro_batch_size = 0 must be at least 1"),
    ({"stack.max_grad_norm": -1.0}, "stack.max_grad_norm = -1.0 must be above 0"),
    ({"engine.forward_batch_size": -4}, "engine.forward_batch_size = -4 must be at least 1"),
    ({"reward.scorers.shapes": None}, "reward.scorers is empty: null takes shapes out. Name at least one scorer."),
    ({"save.interval": "x"}, "save.interval = 'x' must be an integer"),
    ({"algorithm.clip_rang": 1}, "has no argument 'clip_rang'. Did you mean clip_range"),
    ({"algorithm.pipeline": 1}, "algorithm.pipeline is set by the trainer. Remove it here."),
    ({"bundle.device": "cpu"}, "bundle.device is set by the trainer. Remove it here and use the top-level device."),
    ({"algorithm._target_": "unirl.algorithms.diffusion_grp.X"}, "has no module 'diffusion_grp'. Did you mean diff"),
    ({"algorithm._target_": "unirl.algorithms.diffusion_grpo.DifusionGRPO"}, "Did you mean DiffusionGRPO?"),
    ({"algorithm._target_": ...}, "algorithm: has no _target_"),
    ({"stack.micro_batch_size": ...}, "needs micro_batch_size. Set stack.micro_batch_size."),
    ({"stack.micro_batch_size": None}, "stack.micro_batch_size = null must be an integer"),
    ({"backend.optimizer.learning_rate": "high"}, "backend.optimizer.learning_rate = 'high' must be a number"),
    ({"backend.optimizer": 3e-4}, "backend.optimizer = 0.0003 must be a OptimizerConfig (a mapping with _target_)"),
    ({"backend.scheduler": {"total_steps": 8}}, "must be a LrSchedulerConfig (a mapping with _target_) or null"),
    ({"algorithm.old_logp_source": "x"}, "algorithm.old_logp_source = 'x' must be one of 'auto', 'rollout', 'replay'"),
    ({"reward.scorers.shapes.strict_wight": 1}, "Did you mean strict_weight"),
    ({"backend.optimizer.learning_rate": -1}, "backend.optimizer.learning_rate = -1 must be at least 0"),
    ({"backend.optimizer.learning_rate": math.nan}, "learning_rate = nan must be finite and at least 0"),
    ({"backend.optimizer.learning_rate": math.inf}, "learning_rate = inf must be finite and at least 0"),
    ({"backend.optimizer.betas": [0.9, 1.0]}, "backend.optimizer.betas = [0.9, 1.0] must be in [0, 1)"),
    ({"algorithm.clip_range": -1}, "algorithm.clip_range = -1 must be in (0, 1)"),
    ({"algorithm.clip_range_high": 1.5}, "algorithm.clip_range_high = 1.5 must be in (0, 1) or null"),
    ({"algorithm.kl_coef": -0.1}, "algorithm.kl_coef = -0.1 must be at least 0"),
    ({"seed": -1}, "seed = -1 must be in [0, 9.22337e+18]"),
    ({"seed": 2**63}, "seed = 9223372036854775808 must be in [0, 9.22337e+18]"),
    ({"eval.interval": -1}, "eval.interval = -1 must be at least 0"),
    ({"guardrails.reward_drop": 0}, "guardrails.reward_drop = 0 must be above 0"),
    ({"advantages.clip": -1.0}, "advantages.clip = -1.0 must be above 0 or null"),
    ({"reward.scorers.shapes.batch_size": 0}, "reward.scorers.shapes.batch_size = 0 must be at least 1"),
    ({"reward.max_retries": 0}, "reward.max_retries = 0 must be at least 1"),
    ({"pipeline.decode_batch_size": 0}, "pipeline.decode_batch_size = 0 must be at least 1"),
    ({"eval.intervall": 3}, "eval.intervall: unirl.trainer.evaluation.EvaluationConfig has no argument 'intervall'"),
    ({"guardrails.action": "panic"}, "guardrails.action = 'panic' must be one of 'off', 'warn', 'stop', 'rollback'"),
    ({"trackers.console": True}, "trackers.console: must be a mapping with _target_"),
    ({"trackers.jsonl.enabled": "no"}, "trackers.jsonl.enabled = 'no' must be true or false"),
    ({"batch_size": 0}, "batch_size = 0 must be at least 1"),
    ({"reward.scorers.shapes.strict_weight": math.nan}, "reward.scorers.shapes.strict_weight = nan must be a number"),
    ({"resume": "maybe"}, "resume = 'maybe' must be auto or the folder of a run; there is no such folder."),
    (
        {"reward.scorers.shapes": {**OF_ONE, "function": "textwrap.dedent"}},
        "reward.scorers.shapes.function = textwrap.dedent takes 1 arguments by place; it is called with 3.",
    ),
    ({"max_cpu_s": "long"}, "max_cpu_s = 'long' must be a number"),
    ({"max_cpu_s": 0}, "max_cpu_s = 0 must be above 0 or null"),
    (
        {"max_cpu_s": 60, "runtime": "ray"},
        "max_cpu_s = 60 counts CPU seconds of one process. Set runtime: local, or max_cpu_s: null.",
    ),
    ({"eval.interval_cpu_s": 9.5, "runtime": "ray"}, "eval.interval_cpu_s = 9.5 counts CPU seconds of one process"),
    ({"num_devices": 2}, "runtime: local uses one device, num_devices = 2. Set runtime: ray."),
    ({"num_devices": 2, "cluster.num_nodes": 2}, "cluster.num_nodes = 2 needs runtime: ray. Set it, or remove"),
    (
        {"runtime": "ray", "num_devices": 5},
        "batch_size * sampling.samples_per_prompt = 16 * 24 = 384 is not divisible by num_devices = 5. Change one of: "
        "batch_size, sampling.samples_per_prompt, num_devices.",
    ),
    (
        {"stack.num_updates_per_batch": 5},
        "is 384 samples a device, not divisible by stack.num_updates_per_batch = 5. Change one of",
    ),
    ({"sampling.eta": -0.5}, "eta = -0.5 must be finite and at least 0"),
    (
        {"sampling.eta": 1.5, "pipeline.strategy._target_": "unirl.sde.kernels.CPSSDEStrategy"},
        "sampling.eta = 1.5 must lie in [0, 1] for the cps kernel",
    ),
    ({"sampling.eta": 0.0}, "DiffusionGRPO needs stochastic steps, but sampling.eta = 0. Set sampling.eta above 0"),
    ({"sampling.sde_indices": []}, "needs stochastic steps, but sampling.sde_indices is empty"),
    (
        {"sampling.scheduler": {"_target_": f"{WINDOWS}.ExplicitSteps", "indices": []}},
        "needs stochastic steps, but sampling.scheduler.indices = []",
    ),
    (
        {"sampling.scheduler": {"_target_": f"{WINDOWS}.ExplicitSteps", "indices": [2, 9]}},
        "sampling.scheduler.indices [9] lie outside 0..5",
    ),
    (
        {"sampling.scheduler": {"_target_": f"{WINDOWS}.AllSteps", "num_steps": 4}},
        "sampling.scheduler.num_steps = 4 differs from sampling.num_inference_steps = 6",
    ),
    (
        {
            "sampling.scheduler": {"_target_": f"{WINDOWS}.AllSteps", "num_steps": 6},
            "sampling.sde_indices": [1],
        },
        "sampling.sde_indices wins over sampling.scheduler, which then does nothing",
    ),
    ({"sampling.guidance_scale": 4.5}, "sampling.guidance_scale = 4.5 uses guidance, which needs sampling.negative"),
    ({"eval.guidance_scale": 4.5}, "eval.guidance_scale = 4.5 uses guidance"),
    ({"eval.post_solver": "heun"}, "eval.post_solver = 'heun' must be one of"),
    ({"sampling.samples_per_prompt": 1}, "a group of one has no advantage"),
    ({"sampling.height": 30}, "sampling.height = 30 is not divisible by"),
    ({"algorithm.kl_coef": 0.1}, "algorithm.kl_coef = 0.1 needs a reference policy: set backend.keep_reference: true"),
    (
        {
            "backend.lora": LORA,
            "backend.keep_reference": True,
        },
        "keeps a second copy of the weights, but with backend.lora the frozen weights are the reference",
    ),
    (
        {"recipe": "../../x"},
        "recipe = ../../x must be a name such as sd3/mine: runs are written into",
    ),
    ({"recipe": "/etc/x"}, "recipe = /etc/x must be a name"),
    ({"recipe": ".hidden"}, "recipe = .hidden must be a name"),
    ({"default": ["/worlds/shapes/nft"]}, "unknown key 'default' in the recipe. Did you mean defaults"),
    ({"backend.keep_reference": True}, "backend.keep_reference: true does nothing with algorithm.kl_coef = 0"),
    (
        {"backend.fsdp": {"_target_": "unirl.train.configs.FSDPConfig", "cpu_offload": True}},
        "backend.fsdp.cpu_offload does nothing with device: cpu",
    ),
    (
        {"backend.fsdp": {"_target_": "unirl.train.configs.FSDPConfig", "activation_offload": True}},
        "backend.fsdp.activation_offload does nothing with device: cpu",
    ),
    ({"backend.optimizer.offload": True}, "backend.optimizer.offload does nothing with device: cpu. Remove it."),
    (
        {
            "device": "cuda",
            "backend.optimizer.offload": True,
            "backend.fsdp": {"_target_": "unirl.train.configs.FSDPConfig", "cpu_offload": True},
        },
        "backend.optimizer.offload does nothing with backend.fsdp.cpu_offload, which keeps weights, gradients and",
    ),
    (
        {"backend.optimizer.states": "8bit", "backend.optimizer.implementation": "fused"},
        "backend.optimizer.implementation = 'fused' is a form of torch's AdamW",
    ),
    (
        {
            "device": "cuda",
            "backend.fsdp": {
                "_target_": "unirl.train.configs.FSDPConfig",
                "activation_offload": True,
                "compile": True,
            },
        },
        "backend.fsdp.activation_offload moves nothing of compiled blocks",
    ),
    ({"eval.policy": "ema"}, "eval.policy = 'ema' is not kept by this recipe; there are default. Set backend.ema"),
    ({"reward.scorers": {}}, "reward.scorers is empty"),
    ({"reward.weights": {"shape": 1.0}}, "reward.weights names ['shape'], reward.scorers ['shapes']"),
    (
        {
            "reward.scorers": {
                "mine": {"_target_": "unirl.reward.local.images.compressibility.JPEGCompressibilityScorer"}
            }
        },
        "save.best_metric = shapes/strict is a number of the scorer 'shapes', reward.scorers has mine. Set",
    ),
]


def test_async_rewards_need_an_engine_that_hands_samples_over(recipes):
    recipe = changed(recipes["worlds/shapes/nft"], {"reward.is_async": True})
    check_recipe(recipe)
    whole = changed(recipe, {"engine._target_": "unirl.rollout.engine.base.BaseRolloutEngine"})
    (message,) = [line for line in run_findings(run_of(whole)) if "whole responses" in line]
    assert "BaseRolloutEngine makes whole responses only. Set reward.is_async: false" in message
    with pytest.raises(ConfigError, match="has no argument 'async'. Did you mean is_async"):
        check_recipe(changed(recipe, {"reward.async": True}))


def test_a_prompt_has_one_sample_where_the_batch_is_compared(recipes):
    sections = {"sampling.samples_per_prompt": 1, "advantages.preset": "reinforce_pp"}
    check_recipe(changed(recipes["worlds/arithmetic/grpo"], sections))
    with pytest.raises(ConfigError, match="a group of one has no advantage"):
        check_recipe(changed(recipes["worlds/arithmetic/grpo"], {**sections, "advantages.preset": "dr_grpo"}))


def test_a_critic_needs_rewards_that_are_not_centred_on_their_group(recipes):
    recipe = recipes["worlds/shapes/ppo"]
    with pytest.raises(ConfigError, match="DiffusionPPO learns what reward to expect, but advantages are centred on"):
        check_recipe(changed(recipe, {"advantages.center": ...}))
    check_recipe(changed(recipe, {"advantages.center": "group"}))
    check_recipe(changed(recipe, {"sampling.samples_per_prompt": 1, "batch_size": 384}))


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[next(iter(m[0])) for m in MISTAKES])
def test_a_mistake_is_named_with_its_values_and_the_fix(recipes, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(recipes[GRPO], changes))


ON_RAY = {"runtime": "ray", "num_devices": 4}
PLACEMENT_MISTAKES = [
    ({"cluster.num_node": 2}, "cluster.num_node: unknown key. Did you mean num_nodes?"),
    ({"cluster.timeout_s": 0}, "cluster.timeout_s = 0 must be above 0"),
    ({"placement.engine": "0"}, "placement.engine: unknown key."),
    (
        {"placement.train": "0-3", "placement.rollout": "4"},
        "placement.rollout = 4 names device 4, but num_devices has 4",
    ),
    ({"placement.train": "0-2", "placement.rollout": "new:3"}, "there is no node group 'new' in cluster.node_groups"),
    ({"placement.train": "0-3", "placement.rollout": ""}, "placement.rollout = '' names no device"),
    ({"placement.rollout": "3"}, "placement.rollout is given, placement.train is not"),
    ({"cluster.num_nodes": 3}, "num_devices = 4 does not fill 3 nodes of 1 devices"),
    (
        {"placement.train": "0-2", "placement.rollout": "3", "batch_size": 4, "sampling.samples_per_prompt": 4},
        "4 * 4 = 16 is not divisible by the 3 devices of placement.train = 0-2. Change one of: batch_size, "
        "sampling.samples_per_prompt, placement.train.",
    ),
    (
        {"placement.train": "0", "placement.rollout": "1-3", "batch_size": 16, "sampling.samples_per_prompt": 25},
        "batch_size * sampling.samples_per_prompt = 16 * 25 = 400 samples do not divide over the 3 devices of "
        "placement.rollout = 1-3. Change one of them.",
    ),
    (
        {"runtime": "local", "placement.train": "0", "placement.rollout": "1"},
        "placement.train = 0: groups of workers need runtime: ray; runtime is local",
    ),
    (
        {"engine._target_": "unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine", "engine.dtype": ...}
        | {"placement.train": "0", "placement.rollout": "1"},
        "placement.rollout = 1 gives the engine separate workers, but TrainsideRolloutEngine samples with the very "
        "weights that train. Take an engine that is pushed to",
    ),
    (
        {"placement.train": "0", "placement.reward": "1", "reward.is_async": True},
        "reward.is_async hands samples over within a worker, but placement.reward = 1 is not where the engine is",
    ),
]


@pytest.mark.parametrize(("changes", "message"), PLACEMENT_MISTAKES, ids=[str(m[0])[:40] for m in PLACEMENT_MISTAKES])
def test_a_mistake_in_the_placement_is_named_with_its_key_and_the_fix(recipes, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(recipes["worlds/shapes/replica"], {**ON_RAY, **changes}))


PARITY_MISTAKES = [
    ({"guardrails.action": "off"}, "guardrails.parity_interval = 5 does nothing with guardrails.action: off. Remove"),
    ({"eval": None}, "compares samples of held-out prompts, but there is no eval section. Add eval.prompts."),
    ({"engine.drop_text_encoders": True}, "engine.drop_text_encoders: true frees what does. Remove one of them."),
    (
        {"device": "cuda", "residency": {"sleep_engine": True}},
        "residency.sleep_engine: true lets something leave the device meanwhile. Remove one of them.",
    ),
    (
        {"engine._target_": "unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine", "engine.dtype": ...},
        "does nothing with TrainsideRolloutEngine, which samples with the model that trains. Remove",
    ),
]


@pytest.mark.parametrize(("changes", "message"), PARITY_MISTAKES, ids=[str(m[0])[:40] for m in PARITY_MISTAKES])
def test_a_comparison_that_the_trainer_cannot_make_is_refused(recipes, changes, message):
    whole = changed(recipes["worlds/shapes/replica"], {"guardrails": {"parity_interval": 5}})
    check_recipe(whole)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(whole, changes))


def test_only_one_stage_is_compared(recipes):
    with pytest.raises(ConfigError, match="compares one stage of one policy, but this run has several"):
        check_recipe(changed(recipes["worlds/phrases/both"], {"guardrails": {"parity_interval": 5}}))
    with pytest.raises(ConfigError, match="an environment answers what is sampled"):
        check_recipe(changed(recipes["worlds/tools/grpo"], {"guardrails": {"parity_interval": 5}}))


def test_groups_may_share_devices_whose_memory_they_give_back(recipes):
    placed = {**ON_RAY, "device": "cuda", "placement.train": "0-3", "placement.rollout": "2-3"}
    recipe = changed(recipes["worlds/shapes/replica"], placed)
    with pytest.raises(
        ConfigError, match=r"both have devices \[2, 3\], where they .* Set residency.sleep_engine: true"
    ):
        check_recipe(recipe)
    check_recipe(changed(recipe, {"residency": {"sleep_engine": True}}))
    sleepless = changed(recipe, {"engine._target_": "unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine"})
    (message,) = groups_that_overlap_take_turns(run_of(sleepless))
    assert message == (
        "placement.train and placement.rollout both have devices [2, 3], but TrainsideRolloutEngine cannot give their "
        "memory back (can_sleep). Give each group separate devices."
    )


def test_only_what_trains_must_divide_over_the_updates(recipes):
    placed = {**ON_RAY, "placement.train": "0-2", "placement.rollout": "3", "stack.num_updates_per_batch": 128}
    check_recipe(changed(recipes["worlds/shapes/replica"], placed))


_SOURCES = Path(unirl.config.__file__).parents[5]
_KEY = re.compile(r"(?<![\w./{-])([a-z_]+)\.([a-z_]+)(?![\w(/{*])(?!\.[a-z_]*\()")


def test_every_key_that_a_message_names_exists(recipes):
    named = {match for text in _messages() for match in _KEY.findall(text) if match[0] in TOP_LEVEL}
    named -= {("recipe", "yaml"), ("data", "json"), ("stages", "yaml")}  # files
    named -= {("sampling", "ar"), ("sampling", "diffusion")}  # of the last release
    assert ("cluster", "timeout_s") in named and ("sampling", "samples_per_prompt") in named
    known = {(section, key) for section, inner in plain_sections().items() for key in keys(inner)}
    known |= {(section, key) for section, component in components().items() for key in component.own_keys}
    known |= {("stages", track) for recipe in recipes.values() for track in recipe.get("stages") or {}}
    known |= {("pipelines", track) for recipe in recipes.values() for track in recipe.get("pipelines") or {}}
    targets = {target for recipe in recipes.values() for target in _targets(recipe)}
    targets |= {component.default for component in components().values() if component.default is not None}
    parameters = {name for target in targets for name in read_target(target).parameters}
    parameters |= {"_target_", *recipes["worlds/shapes/nft"]["trackers"]}
    unknown = {(section, key) for section, key in named - known if section in plain_sections() or key not in parameters}
    assert unknown == set()


def _messages():
    """Every text of the sources that is no docstring, with {} for what an f-string fills in."""
    for path in [*_SOURCES.glob("packages/*/src/**/*.py"), *_SOURCES.glob("apps/trainer/src/**/*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Raise, ast.Yield)) or (isinstance(node, ast.Assign)):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.JoinedStr):
                        yield "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in inner.values)
                    elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                        yield inner.value


def _targets(node):
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"]
        for item in node.values():
            yield from _targets(item)
    elif isinstance(node, list):
        for item in node:
            yield from _targets(item)


NFT_MISTAKES = [
    ({"algorithm.num_timesteps": 9}, "algorithm.num_timesteps = 9 exceeds sampling.num_inference_steps = 6"),
    ({"sampling.init_same_noise": True}, "makes the 16 samples of a prompt equal, because sampling.eta = 0"),
    (
        {"sampling.scheduler": {"_target_": f"{WINDOWS}.AllSteps", "num_steps": 6}},
        "sampling.scheduler does nothing with sampling.eta = 0",
    ),
]


@pytest.mark.parametrize(("changes", "message"), NFT_MISTAKES)
def test_a_mistake_of_deterministic_rollouts_is_named(recipes, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(recipes[NFT], changes))


def test_nft_may_evaluate_its_old_policy(recipes):
    check_recipe(changed(recipes[NFT], {"eval.policy": "old"}))


ONE_PER_FOLDER = set({name.rpartition("/")[0]: name for name in RECIPES}.values())


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ONE_PER_FOLDER else pytest.mark.nightly) for name in RECIPES]
)
def test_every_recipe_takes_lora_from_the_command_line(recipes, name):
    # Besides one policy in flat sections, `policies` may have a teacher that does not train.
    policies = None if "backend" in recipes[name] else recipes[name]["policies"]
    words = [f"parts/train@policies.{policy}=lora" for policy in policies] if policies else ["parts/train=lora"]
    if recipes[name].get("bundle", {}).get("_target_", "").startswith("unirl.models.action.bundle."):
        pytest.skip("small policies that act have no layers for adapters, which the check says")
    recipe = resolve(compose(name, words))
    for policy in policies or [None]:
        backend, plain = (
            each["policies"][policy]["backend"] if policies else each["backend"] for each in (recipe, recipes[name])
        )
        assert backend["lora"]["_target_"].endswith(".LoraConfig") and not backend["keep_reference"]
        assert backend["optimizer"]["learning_rate"] is not None
        assert backend.get("fsdp") == plain.get("fsdp"), "the precision is the model's"
    check_recipe(recipe)


def test_a_part_of_several_policies_is_asked_for_by_its_place():
    register_resolvers()
    expected = "Say which: parts/train@policies.painter=lora or parts/train@policies.writer=lora."
    with pytest.raises(ConfigError, match=re.escape(expected)):
        compose("worlds/phrases/both", ["parts/train=lora"])


def test_a_file_takes_lora_too_whether_it_has_defaults_or_is_what_show_wrote(tmp_path):
    register_resolvers()
    (tmp_path / "shown.yaml").write_text(render(compose("worlds/shapes/dpo")))
    (tmp_path / "mine.yaml").write_text("defaults: [/worlds/shapes/nft, _self_]\nrecipe: mine\n")
    for file in ("shown.yaml", "mine.yaml"):
        recipe = resolve(compose(str(tmp_path / file), ["parts/train=lora", "backend.lora.rank=4"]))
        assert recipe["backend"]["lora"]["rank"] == 4
        check_recipe(recipe)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "worlds/shapes/nft",
            "parts/train=lor",
            "there is no parts/train/lor, which its defaults or the command line",
        ),
        (
            "worlds/shapes/nft",
            "parts/trane=lora",
            "parts/trane=lora: there is no parts/trane to choose from. Did you",
        ),
        (
            "worlds/arithmetic/grpo",
            "parts/method=nft",
            "this recipe has no parts/method to replace. Write your own recipe whose defaults are "
            "[/worlds/arithmetic/grpo, /parts/method/nft, _self_].",
        ),
    ],
)
def test_a_part_that_cannot_be_chosen_is_named_with_what_can(name, change, message):
    register_resolvers()
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose(name, [change])


JPEG = "{_target_:unirl.reward.local.images.compressibility.JPEGCompressibilityScorer}"


WITHOUT_EVALUATION = (
    "worlds/phrases/both",
    "worlds/phrases/writer",
    "worlds/thoughts/nft",
    "worlds/arithmetic/grpo",
    "worlds/shapes/nft",
)


@pytest.mark.parametrize("name", WITHOUT_EVALUATION)
def test_a_recipe_runs_without_its_held_out_evaluation(name):
    register_resolvers()
    recipe = resolve(compose(name, ["eval=null"]))
    check_recipe(recipe, PLENTY)
    assert run_of(recipe).evaluation is None and recipe["save"]["interval"] == 0


def test_no_recipe_reads_what_null_takes_out():
    """`eval=null` and its like must leave nothing that cannot be resolved."""
    folder = Path(str(importlib.resources.files(RECIPES_MODULE)))
    read = re.compile(r"\$\{(eval|guardrails|selection|trackers)\.")
    assert [str(path.relative_to(folder)) for path in folder.rglob("*.yaml") if read.search(path.read_text())] == []


def test_null_takes_a_component_out_and_stays_null_elsewhere():
    register_resolvers()
    recipe = resolve(
        compose(
            "worlds/shapes/refl",
            [
                f"reward.scorers.smooth={JPEG}",
                "reward.scorers.shapes=null",
                "reward.weights.shapes=null",
                "reward.weights.smooth=0",
                "trackers.tensorboard=null",
                "save.best_metric=reward",
            ],
        )
    )
    assert list(recipe["reward"]["scorers"]) == ["gradient", "smooth"]
    assert recipe["reward"]["weights"] == {"gradient": 1.0, "smooth": 0}
    assert "tensorboard" not in recipe["trackers"] and recipe["sampling"]["scheduler"] is None
    assert recipe["max_cpu_s"] is None
    check_recipe(recipe)


def test_a_weight_that_outlives_its_scorer_is_named_with_the_way_out():
    register_resolvers()
    recipe = resolve(compose("worlds/shapes/refl", ["reward.scorers.shapes=null"]))
    with pytest.raises(ConfigError, match=r"A weight goes with its scorer: reward\.weights\.shapes: null takes it out"):
        check_recipe(recipe)


def targets(recipes):
    """Every import path that a packaged recipe names."""
    nodes, paths = list(recipes.values()), {item.default for item in components().values() if item.default is not None}
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            paths |= {node["_target_"]} if "_target_" in node else set()
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
    return sorted(paths)


def numbers(path):
    """Keywords of a target that take a number, with the parameter."""
    for name, item in read_target(path).parameters.items():
        if item.annotation is not None and mismatch("x", item.annotation, item.module) is not None:
            if mismatch(1, item.annotation, item.module) is None:
                yield name, item


def is_enforced(path, name):
    """True if a constructor among the class and its bases checks the bounds of this keyword."""
    if path.startswith("unirl.sde."):
        return True  # `__post_init__` does, and has its tests
    bases = inspect.getmro(cast("type", import_target(path)))
    constructors = [vars(base)["__init__"] for base in (EngineProcesses, *bases) if "__init__" in vars(base)]
    return any("__wrapped__" in vars(each) and name in inspect.signature(each).parameters for each in constructors)


NO_BOUNDS = {
    "rank",
    "MultimodalRLDataSource.seed",
    "PreferenceDataSource.seed",
    "TargetDataSource.seed",  # the trainer sets them
    "margin",  # of a reward, which may be any number
    "strict_weight",
    "soft_weight",  # of a part of one
    "LinearWeight.start",
    "LinearWeight.end",
    "RolloutCorrection.lower",
    "RolloutCorrection.upper",  # judged together
    "TrainTopology.dp_shard",  # with the other axes; -1 is what is left
    "MixGRPOWindow.decay_knee",
    "RandomSubset.seed",
    "MixGRPOWindow.seed",  # of a hash
    "ConsoleTracker.every",  # 0 or less is every step
    "LoraConfig.dropout",  # 0, which the class explains
}
"""Numbers that may be anything, or that only a rule about several can judge."""


def test_every_number_of_a_packaged_recipe_declares_bounds_that_its_class_enforces(recipes):
    # Sampling parameters are built by the check itself.
    paths = [path for path in targets(recipes) if not path.startswith("unirl.types.sampling.")]
    found = [(path, name, item) for path in paths for name, item in numbers(path)]
    assert len(found) > 150
    loose, idle = set(), set()
    for path, name, item in found:
        known = {name, f"{path.rsplit('.', 1)[-1]}.{name}"} & NO_BOUNDS
        takes_fractions = mismatch(0.5, item.annotation, item.module) is None
        if mismatch(math.nan if takes_fractions else -(10**9), item.annotation, item.module) is None and not known:
            loose.add(f"{path}.{name}")
        elif not known and not is_enforced(path, name):
            idle.add(f"{path}.{name}")
    assert not loose and not idle, (sorted(loose), sorted(idle))


HALF = {"sampling.autocast_precision": "bf16"}
ROLLOUT = {"algorithm.old_logp_source": "rollout"}


def on_rollout_log_probs(recipe):
    """What the rule on the rollout's log-probs says."""
    run = run_of(recipe)
    return list(rollout_log_probs_are_replayed_ones(run.policy.algorithms["image"], run))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            GRPO,
            HALF,
            "algorithm.old_logp_source = rollout with sampling.autocast_precision = bf16: a forward of the rollout has "
            "engine.forward_batch_size = 192 rows, one of the replay 288, and half precision rounds other numbers of "
            "rows otherwise, by as much as DiffusionGRPO clips. Set algorithm.old_logp_source: auto, or sample",
        ),
        ("sd3/grpo", {}, "engine.forward_batch_size = 16 rows, one of the replay 12,"),
        ("sd3/flowgrpo", {}, "sampling.autocast_precision = bf16: a forward of the rollout"),
        (
            GRPO,
            {**HALF, "algorithm.rows_per_forward": 192},
            "engine.forward_batch_size = 192 rows, one of the replay 96 or 192",
        ),
        (GRPO, {**HALF, "algorithm.step_fraction": 0.5}, "one of the replay an unknown number of,"),
        ("worlds/shapes/guard", {}, "GRPOGuard compares transition means, which a rollout does not keep. Set"),
        (
            GRPO,
            {"engine._target_": "unirl.rollout.engine.base.BaseDiffusionEngine"},
            "takes the log-probs of BaseDiffusionEngine, whose weights or precision are not the trainer's",
        ),
    ],
)
def test_a_clip_on_the_rollouts_log_probs_is_refused_where_replay_gives_others(recipes, name, changes, message):
    recipe = changed(recipes[name], {**ROLLOUT, **changes})
    assert message in " ".join(on_rollout_log_probs(recipe))
    assert not on_rollout_log_probs(changed(recipe, {"algorithm.old_logp_source": "auto"}))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (GRPO, {}),  # float32: other numbers of rows differ by rounding, 2e-7 where the clip is 5e-3
        (GRPO, {**HALF, "engine.forward_batch_size": 288}),
        (GRPO, {**HALF, "algorithm.rows_per_forward": 48, "engine.forward_batch_size": 48}),
        ("worlds/shapes/ddpo", {**HALF, "algorithm.estimator": "score_function", "algorithm.clip_range": None}),
    ],
)
def test_the_rollouts_log_probs_are_taken_where_they_are_those_of_replay_or_not_clipped(recipes, name, changes):
    assert not on_rollout_log_probs(changed(recipes[name], {**ROLLOUT, **changes}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm.clip_range: 1", "unknown key 'algorithm.clip_range' in the recipe. In a file write it nested, "),
        ("algorithm: {a.b: 1}", "has no argument 'a.b'. In a file write it nested, a: {b: ...}; dots are for"),
        ("save: {a.b.c: 1}", "save.a.b.c: unknown key. In a file write it nested, a: {b: {c: ...}}; dots are for"),
    ],
)
def test_keys_with_dots_are_for_the_command_line(tmp_path, text, message):
    (tmp_path / "own.yaml").write_text(f"defaults: [/{GRPO}, _self_]\n{text}")
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(resolve(compose(str(tmp_path / "own.yaml"))))


def test_several_mistakes_are_reported_together(recipes):
    with pytest.raises(ConfigError) as raised:
        check_recipe(changed(recipes[GRPO], {"algorithm.clip_rang": 1, "stack.micro_batch": 2}))
    assert "clip_rang" in str(raised.value) and "micro_batch" in str(raised.value)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (
            "sampling.scheduler",
            {"_target_": f"{WINDOWS}.RandomSubset", "num_steps": 6, "num_sde_steps": 9},
            r"sampling\.scheduler: unirl\.sde\.windows\.RandomSubset refuses its arguments: num_sde_steps = 9",
        ),
        ("eval.num_samples", 0, r"eval\.num_samples = 0 must be at least 1"),
        ("backend.optimizer.learning_rate", -1.0, r"optimizer\.learning_rate = -1\.0 must be at least 0"),
        ("advantages.preset", "flow", r"advantages\.preset = 'flow' must be one of"),
    ],
)
def test_values_that_a_constructor_refuses_are_found_before_a_model_loads(recipes, section, values, message):
    with pytest.raises(ConfigError, match=message):
        build_values(run_of(changed(recipes[GRPO], {section: values})))


def on_machine(recipe, changes, machine=PLENTY):
    check_recipe(changed(recipe, changes), machine)


@pytest.fixture
def runnable(recipes, tmp_path):
    """A recipe whose model and prompts lie in a folder of this test."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusion3Pipeline"}))
    (tmp_path / "p.txt").write_text("a red circle\n")
    own = {
        "bundle.pretrained_model": str(tmp_path / "model"),
        "data.path": str(tmp_path / "p.txt"),
        "eval.prompts": str(tmp_path / "p.txt"),
        "run_dir": str(tmp_path / "run"),
    }
    recipe = changed(recipes[GRPO], own)
    check_recipe(recipe, PLENTY)
    return recipe


def test_more_devices_than_this_machine_has_is_an_error(runnable):
    with pytest.raises(ConfigError, match="num_devices = 8 with device: cuda, but this machine has 1 GPU. Lower"):
        on_machine(runnable, {"runtime": "ray", "num_devices": 8, "device": "cuda"}, Machine(2, 1))
    with pytest.raises(ConfigError, match="num_devices = 8 with device: cpu needs 8 cores, but this machine has 2"):
        on_machine(runnable, {"runtime": "ray", "num_devices": 8}, Machine(2, 1))


def test_a_backend_on_an_untested_version_of_a_library_is_an_error_and_fsdps_rules_hold(
    runnable, tmp_path, monkeypatch
):
    metadata = tmp_path / "veomni-0.1.11.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: veomni\nVersion: 0.1.11\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    veomni = {"backend._target_": "unirl.train.backend.veomni.VeOmniBackend"}
    with pytest.raises(ConfigError, match=r"backend: VeOmni 0.1.11 is installed, .* tested with 0.1.12 alone. Install"):
        on_machine(runnable, veomni)
    with pytest.raises(ConfigError, match="backend.fsdp.cpu_offload does nothing with device: cpu"):
        on_machine(
            runnable, {**veomni, "backend.fsdp": {"_target_": "unirl.train.configs.FSDPConfig", "cpu_offload": True}}
        )


def test_model_that_is_missing_or_of_the_wrong_format_is_an_error(runnable, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "weights.bin").write_text("")
    for folder, file, name in (
        ("refiner", "model_index.json", "StableDiffusionXLImg2ImgPipeline"),
        ("newer", "model_index.json", "MiniMaxMusic3Pipeline"),
        ("blocks", "modular_model_index.json", "MiniMaxMusic3ModularPipeline"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(json.dumps({"_class_name": name}))
    diffusers = importlib.metadata.version("diffusers")
    for value, message in (
        (str(tmp_path / "nowhere"), "no such folder, and not a hub id"),
        (str(tmp_path / "p.txt"), "is a file. Give a model's folder"),
        (str(tmp_path / "empty"), "it has no model_index.json (it holds weights.bin)"),
        (str(tmp_path / "refiner"), "refiner holds a StableDiffusionXLImg2ImgPipeline; this model needs a StableDiff"),
        (
            str(tmp_path / "newer"),
            f"newer holds a MiniMaxMusic3Pipeline, which the installed diffusers {diffusers} does not",
        ),
        (
            str(tmp_path / "blocks"),
            f"MiniMaxMusic3Pipeline is a class which the installed diffusers {diffusers} does not",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            on_machine(runnable, {"bundle.pretrained_model": value})
    on_machine(runnable, {"bundle.pretrained_model": "owner/name"})


def test_image_size_is_judged_by_the_checkpoint_where_it_lies_here(runnable, tmp_path):
    for part, config in (("vae", {"block_out_channels": [1, 2, 3]}), ("transformer", {"patch_size": 2})):
        (tmp_path / "model" / part).mkdir()
        (tmp_path / "model" / part / "config.json").write_text(json.dumps(config))
    on_machine(runnable, {"sampling.height": 24})
    with pytest.raises(ConfigError, match="sampling.height = 28 is not divisible by 8. The nearest that is: "):
        on_machine(runnable, {"sampling.height": 28})


def test_prompts_that_are_missing_or_empty_are_an_error(runnable, tmp_path):
    (tmp_path / "none.txt").write_text("")
    with pytest.raises(ConfigError, match=r"data\.path = .*nowhere\.txt: no such prompt file or dataset folder"):
        on_machine(runnable, {"data.path": str(tmp_path / "nowhere.txt")})
    with pytest.raises(ConfigError, match=r"eval\.prompts = .*none\.txt is empty"):
        on_machine(runnable, {"eval.prompts": str(tmp_path / "none.txt")})


def test_a_malformed_prompt_row_is_named_with_file_and_line_before_a_model_loads(runnable, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a red circle"}\n{"promt": "a red square"}\n')
    with pytest.raises(ConfigError, match=r"data\.path: .*rows\.jsonl:2: the row has neither `prompt` nor `caption`"):
        on_machine(runnable, {"data.path": str(tmp_path / "rows.jsonl")})
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a red circle"}\n{broken\n')
    with pytest.raises(ConfigError, match=r"eval\.prompts: .*rows\.jsonl:2: not JSON"):
        on_machine(runnable, {"eval.prompts": str(tmp_path / "rows.jsonl")})


def test_rows_without_the_answer_that_a_scorer_compares_with_are_named_before_a_model_loads(recipes, tmp_path):
    recipe = changed(recipes["worlds/arithmetic/grpo"], {"run_dir": str(tmp_path / "run")})
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "prompt_id": "p7", "total": "3"}\n')
    with pytest.raises(ConfigError, match=r"data\.path = .*: 1 rows \(p7\) have no 'answer', which scorer exact_match"):
        on_machine(recipe, {"data.path": str(rows)})
    with pytest.raises(ConfigError, match=r"eval\.prompts = .* have no 'total'"):
        on_machine(recipe, {"reward.scorers.exact_match.answer_key": "total", "eval.prompts": str(rows)})
    rows.write_text('{"prompt": "1+1=", "answer": 2}\n')
    on_machine(recipe, {"data.path": str(rows)})


def test_prompts_that_a_scorer_cannot_judge_are_named_with_file_and_line_before_a_model_loads(runnable, tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text('prompt\na red circle\n"a blue square, left of a green triangle"\n')
    for key in ("data.path", "eval.prompts"):
        with pytest.raises(ConfigError) as caught:
            on_machine(runnable, {key: str(rows)})
        (message,) = (line for line in str(caught.value).splitlines() if line.startswith(key))
        assert f"scorer shapes cannot judge 1 of 2 prompts ({rows}:3)" in message
        assert "not a sentence of the shapes world" in message and "reward.scorers" in message
    rows.write_text("prompt\na red circle\na blue square left of a green triangle\n")
    on_machine(runnable, {"data.path": str(rows), "eval.prompts": str(rows)})
    rows.write_text("prompt,means\na round one,a red circle\na square one,\n")
    reads_meaning = {"reward.scorers.shapes.meaning": "means", "data.path": str(rows), "eval.prompts": str(rows)}
    with pytest.raises(
        ConfigError, match=r"cannot judge 1 of 2 .*rows\.csv:3\): metadata\.means, which it reads, is None"
    ):
        on_machine(runnable, reads_meaning)
    rows.write_text("prompt,means\na round one,a red circle\n")
    on_machine(runnable, reads_meaning)


def test_run_directory_that_cannot_be_written_is_an_error(runnable, tmp_path):
    with pytest.raises(ConfigError, match="is a file. Set run_dir to a folder"):
        on_machine(runnable, {"run_dir": str(tmp_path / "p.txt")})
    with pytest.raises(ConfigError, match="is not a writable folder. Set run_dir elsewhere"):
        on_machine(runnable, {"run_dir": str(tmp_path / "p.txt" / "below")})


def test_unknown_recipe_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown recipe 'shapes/nf'. Did you mean worlds/shapes/nft or"):
        packaged_name("shapes/nf")
    assert packaged_name("shapes/nft") == "worlds/shapes/nft"


def test_a_run_that_is_not_there_is_called_so():
    expected = (
        "unknown recipe 'elsewhere'. There is no folder of a run of this name either. Recipes: uv run trainer list"
    )
    with pytest.raises(ConfigError) as caught:
        packaged_name("elsewhere")
    assert str(caught.value) == expected


def test_environment_variables_enter_through_the_recipe_only(monkeypatch):
    register_resolvers()
    monkeypatch.setenv("PRETRAINED_MODEL", "owner/model")
    monkeypatch.setenv("DATA_PATH", "prompts.txt")
    recipe = resolve(compose("sd3/nft"))
    assert recipe["bundle"]["pretrained_model"] == "owner/model" and recipe["data"]["path"] == "prompts.txt"


def test_a_published_recipe_shows_what_the_environment_gave_as_it_is_written(monkeypatch):
    register_resolvers()
    monkeypatch.setenv("SECRET", "hunter2")
    monkeypatch.setenv("SEVERAL", "{key: hunter2, keys: [hunter2]}")
    config = OmegaConf.create(
        {
            "seed": 3,
            "key": "${oc.env:SECRET}",
            "also": {"seed": "${..seed}", "url": "http://${key}:${seed}@host/${seed}", "of": ["${key}", 1]},
            "reference": "${also}",
            "whole": "${oc.decode:${oc.env:SEVERAL}}",
            "file": "${shapes:checkpoint}",
            "none": "${oc.env:NOT_SET,null}",
        }
    )
    also = {"seed": 3, "url": "http://host/3", "of": ["${oc.env:SECRET}", 1]}
    assert published(config) == {
        "seed": 3,
        "key": "${oc.env:SECRET}",
        "also": also,
        "reference": also,
        "whole": {"key": (whole := "${oc.decode:${oc.env:SEVERAL}}"), "keys": [whole]},
        "file": "${shapes:checkpoint}",
        "none": "${oc.env:NOT_SET,null}",
    }


MODEL_VARIABLES = {"default": "PRETRAINED_MODEL", "painter": "PRETRAINED_MODEL"} | {
    "writer": "WRITER_MODEL",
    "teacher": "TEACHER_MODEL",
}
"""Policy -> the variable that names its model."""


def test_every_recipe_takes_its_models_from_the_documented_variables(composed_recipes, monkeypatch):
    for variable in set(MODEL_VARIABLES.values()):
        monkeypatch.setenv(variable, f"own/{variable}")
    for name, config in composed_recipes.items():
        sections = policy_sections(resolve(config))
        bundles = {policy: own["bundle"] for policy, (_, own) in sections.items()}
        found = {policy: own["pretrained_model"] for policy, own in bundles.items() if "config" not in own}
        assert found == {policy: f"own/{MODEL_VARIABLES[policy]}" for policy in found}, name
    guide = (_SOURCES / "docs" / "guides" / "own_model.md").read_text(encoding="utf-8")
    assert all(f"`{variable}" in guide for variable in MODEL_VARIABLES.values())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batch_size"], "Write key=value"),
        (["batch_size=1,2"], "runs one recipe, not a sweep"),
        (["data.path=[1"], "with quotes around values that hold"),
        (["data.path=${nowhere}"], "data.path: "),
        (["recipe=???"], "recipe: "),
    ],
)
def test_overrides_that_hydra_cannot_take_are_one_message(overrides, message):
    register_resolvers()
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(compose("worlds/shapes/nft", overrides))


def test_cpu_seconds_of_another_process_are_no_budget(recipes):
    with pytest.raises(ConfigError, match="max_cpu_s = 60 counts .* VLLMRolloutEngine samples in another"):
        check_recipe(changed(recipes["worlds/arithmetic/vllm"], {"max_cpu_s": 60}))


def test_every_base_that_gives_defaults_exists():
    of_schema = [*components().values(), *components(PolicySections).values()]
    kinds = {kind for item in of_schema for kind in (item.kind, *item.inner_kinds.values()) if kind is not None}
    assert len(kinds) > 8
    for kind in kinds:
        assert read_target(kind).lineage[0] == kind


OWN_CLASSES = """
from unirl.algorithms.base import StageAlgorithm
from unirl.data.data_source import MultimodalRLDataSource
from unirl.rollout.engine.base import BaseRolloutEngine
from unirl.types.sampling import DiffusionSamplingParams


class Forgetful(BaseRolloutEngine):
    def __init__(self, pipeline, policies=None):
        pass


class Pushed(Forgetful):
    has_own_weights = True


class Given(Forgetful):
    needs_images = True


class WithoutBase:
    def __init__(self, pipeline, policies=None):
        pass


def made(pipeline, policies=None) -> Pushed:
    return Pushed(pipeline, policies)


class Plain(MultimodalRLDataSource):
    pass


class ByLine:
    def __init__(self, path, seed=0, shuffle=True):
        pass


class ForByLine(ByLine):
    reads_prompt_rows = False


class Simple(StageAlgorithm):
    def __init__(self, pipeline, policies, beta=1.0):
        pass


class Compared(Simple):
    requires_reference = True


class Sized(DiffusionSamplingParams):
    pass


class Ruled(Simple):
    recipe_rules = "own_rules"


class Unruled(Simple):
    recipe_rules = "nowhere.rules"
"""
OWN_RULES = """
def beta_is_small(own, run):
    if own.get("beta") > 0.5:
        yield f"{own.at}.beta = {own.get('beta')} of {own.name} must be small on {run.device}"


RULES = (beta_is_small,)
"""
PUSH = {"_target_": "unirl.distributed.weight_sync.full.FullWeightSync", "dtype": "fp32"}


@pytest.fixture
def own_classes(tmp_path, monkeypatch):
    """Classes outside the packages, next to a module of rules."""
    (tmp_path / "own_classes.py").write_text(OWN_CLASSES)
    (tmp_path / "own_rules.py").write_text(OWN_RULES)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    read_target.cache_clear()
    read_module.cache_clear()
    sys.modules.pop("own_rules", None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "Forgetful", "sync": PUSH}, "sync does nothing with Forgetful, which samples with the model"),
        ({"engine": "WithoutBase", "sync": PUSH}, "sync does nothing with WithoutBase, which samples with the model"),
        ({"engine": "Pushed"}, "Pushed has weights of its own and would sample from the untrained policy"),
        ({"engine": "made"}, "made has weights of its own and would sample from the untrained policy"),
        ({"engine": "Given", "data": "Plain"}, "takes the images of the data, but Plain brings"),
        ({"engine": "Given", "data": "ByLine"}, "takes the images of the data, but ByLine brings"),
        ({"engine": "Forgetful", "reward.is_async": True}, "engine Forgetful makes whole responses only"),
        (
            {"algorithm": "Simple", "backend.keep_reference": True},
            "keep_reference: true does nothing with algorithm.kl",
        ),
        ({"algorithm": "Compared"}, "Compared needs a reference policy: set backend.keep_reference: true"),
        ({"sampling": "Sized", "sampling.eta": -1.0}, "sampling: eta = -1.0 must be finite and at least 0"),
        ({"algorithm": "Ruled"}, "algorithm.beta = 1.0 of Ruled must be small on cpu"),
    ],
)
def test_a_class_of_your_own_that_forgets_an_ability_gets_the_default_and_its_rule(
    recipes, own_classes, changes, message
):
    own = {key: value for key, value in changes.items() if key in ("engine", "data", "algorithm", "sampling")}
    recipe = changed(recipes["worlds/shapes/nft"], {key: value for key, value in changes.items() if key not in own})
    for section, name in own.items():
        kept = {"engine": {}, "algorithm": {}}.get(section, recipe[section])
        recipe[section] = {**kept, "_target_": f"own_classes.{name}"}
    assert any(message in line for line in run_findings(run_of(recipe)))


def test_a_class_of_your_own_is_no_token_algorithm_by_default(recipes, own_classes):
    recipe = changed(recipes["worlds/arithmetic/grpo"], {"algorithm": {"_target_": "own_classes.Simple"}})
    with pytest.raises(ConfigError, match="Simple trains on images, but sampling._target_ = unirl.types.sampling.ARSa"):
        check_recipe(recipe)


def test_rules_of_your_own_that_are_not_there_are_named(recipes, own_classes):
    recipe = changed(recipes["worlds/shapes/nft"], {"algorithm": {"_target_": "own_classes.Unruled"}})
    with pytest.raises(ConfigError, match=r"recipe_rules = 'nowhere\.rules' of a class of this recipe: there is no"):
        check_recipe(recipe)


def test_a_data_source_of_your_own_format_says_so(runnable, own_classes):
    (own_classes / "p.csv.txt").write_text('{"promt": "a red circle"}\n')
    (own_classes / "p.jsonl").write_text('{"promt": "a red circle"}\n')
    own = {"data._target_": "own_classes.ByLine", "data.path": str(own_classes / "p.jsonl")}
    with pytest.raises(ConfigError, match="the row has neither `prompt` nor `caption`"):
        on_machine(runnable, own)
    on_machine(runnable, {**own, "data._target_": "own_classes.ForByLine"})


def with_two_policies(recipe):
    """The recipe with its policy twice, as "draft" and as "final"; the engine samples from the latter."""
    recipe = copy.deepcopy(recipe)
    own = {key: recipe.pop(key) for key in ("bundle", "pipeline", "backend", "algorithm", "stack")}
    recipe["policies"] = {"draft": own, "final": copy.deepcopy(own)}
    recipe["policies"]["draft"]["stack"]["track"] = "sketch"
    recipe["engine"] = {**recipe["engine"], "_target_": "own_engines.Twin", "policy": "final"}
    return recipe


POLICY_MISTAKES = [
    ({"engine.policy": "last"}, "engine.policy = 'last' is no policy of this recipe; there are draft, final."),
    ({"engine.policy": ...}, "samples from one policy, the recipe has draft, final. Set engine.policy to one of them"),
    (
        {"bundle": {}},
        "bundle: a recipe with policies must not have this section at the top level. Move it to policies.draft.bundle",
    ),
    ({"policies.final.stak": {}}, "policies.final.stak: unknown key. Did you mean stack?"),
    ({"policies.final.stack": ...}, "policies.final.stack is missing from the recipe"),
    ({"policies.final": 3}, "policies.final = 3 must be a mapping of bundle, pipeline"),
    ({"policies": {"a/b": {}}}, "policies: 'a/b' must be a word of letters, digits, _ and -"),
    ({"policies.final.algorithm": ...}, "policies.final.algorithm is missing from the recipe. Add it (or policies.fi"),
    ({"policies.final.algorithm.clip_rang": 1}, "policies.final.algorithm.clip_rang: unirl.algorithms.diffusion_grpo"),
    ({"policies.draft.stack.micro_batch_size": 0}, "policies.draft.stack.micro_batch_size = 0 must be at least 1"),
    ({"policies.draft.backend.keep_reference": True}, "policies.draft.backend.keep_reference: true does nothing with"),
    ({"policies.draft.stack.track": ...}, "policies.final.algorithm: the track image is trained by policies.draft.alg"),
    (
        {"policies.draft.stack.track": "line"},
        "policies.draft.stack.track = line, but the engine makes the track image,",
    ),
    ({"policies.final.sync": PUSH}, "policies.final.sync does nothing with Twin, which samples with the model that"),
]


@pytest.mark.parametrize(("changes", "message"), POLICY_MISTAKES)
def test_a_mistake_in_one_of_several_policies_is_named_with_its_place(recipes, own_engines, changes, message):
    recipe = with_two_policies(recipes[GRPO])
    check_recipe(recipe)
    build_values(run_of(recipe))
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(recipe, changes))


def test_two_policies_of_one_name_are_refused(tmp_path):
    (tmp_path / "twice.yaml").write_text("policies:\n  writer: {}\n  writer: {}\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml is not YAML: .*found duplicate key writer"):
        compose(str(tmp_path / "twice.yaml"))


@pytest.fixture
def own_engines(tmp_path, monkeypatch):
    """A module with an engine of two tracks, outside the packages."""
    (tmp_path / "own_engines.py").write_text(
        "from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine\n\n\n"
        "class Twin(TrainsideRolloutEngine):\n"
        "    def __init__(self, pipeline, policies, tracks=('image', 'sketch'), **options):\n"
        "        super().__init__(pipeline, policies, **options)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    read_target.cache_clear()
    read_module.cache_clear()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "worlds/arithmetic/grpo",
            {"stack.track": "answers"},
            "stack.track = answers, but the engine makes the track text. Set stack.track: text.",
        ),
        (
            GRPO,
            {"algorithm": None, "algorithms": {"image": ..., "line": ...}},
            "algorithms.line: no engine makes the track line, there is image. Rename or remove it.",
        ),
        (
            GRPO,
            {"engine._target_": "own_engines.Twin", "stack.num_updates_per_batch": 1},
            "the engine makes the track sketch, which no algorithm trains. Add algorithms.sketch.",
        ),
        (
            GRPO,
            {"reward.track": "mask"},
            "reward.track = mask, but the engine makes the track image. Set reward.track to",
        ),
        (
            GRPO,
            {"pipeline": None, "pipelines": {"image": ..., "text": ...}},
            "the engine takes one pipeline, pipelines has image, text. Give stages an engine for each.",
        ),
        (
            GRPO,
            {"pipeline": None, "pipelines": {"a": ..., "b": ...}},
            "pipelines has a, b, and none of the track 'image'. Name one of them image.",
        ),
        (GRPO, {"algorithm": None}, "algorithm is missing from the recipe. Add it (or algorithms by track), or"),
        (GRPO, {"algorithms": {"image": ...}}, "algorithm and algorithms are both set. Keep one of them."),
        (
            GRPO,
            {"stack.losses": {"sketch": {"weight": 2.0}}},
            "stack.losses names tracks ['sketch'], which no algorithm",
        ),
        (GRPO, {"stack.losses": {"image": {"wight": 2.0}}}, "stack.losses.image has no wight; there are weight, every"),
        (GRPO, {"stack.losses": {"image": {"every": 2}}}, "update 1 of every 2 would train no track"),
    ],
)
def test_tracks_and_algorithms_that_do_not_meet_are_named(recipes, own_engines, name, changes, message):
    recipe = recipes[name]
    for one, several in SEVERAL.items():
        if several in changes:
            changes = {**changes, several: dict.fromkeys(changes[several], recipe[one])}
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(recipe, changes))


def test_an_engine_without_its_environment_names_the_command_that_makes_it(recipes, tmp_path):
    recipe = recipes["worlds/arithmetic/vllm"]
    nowhere = {"engine.python": str(tmp_path / "python"), "run_dir": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match=r"no such interpreter\. Make .* `uv sync --project environments/vllm-cpu`"):
        on_machine(recipe, nowhere)
    (tmp_path / "python").touch()
    on_machine(recipe, nowhere)


def test_a_file_that_is_not_yaml_says_where(tmp_path):
    (tmp_path / "broken.yaml").write_text("seed: [")
    with pytest.raises(ConfigError, match=r"broken\.yaml is not YAML: .*line 1, column 8"):
        compose(str(tmp_path / "broken.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            b"defaults: [/shapes/nf, _self_]",
            "there is no shapes/nf, which its defaults or the",
        ),
        (b"defaults: [/world/shapes/nft, _self_]", "Did you mean worlds/shapes/nft"),
        (b"defaults: [/worlds/shapes/nft, self]", "Did you mean _self_ or"),
        (b"defaults: [/worlds/shapes/nft]\nseed: 3", "do not say where its own values come. Add _self_ as the last"),
        (b"defaults: /worlds/shapes/nft", "defaults must be a list (got str). Write defaults as a list of names"),
        (b"defaults: [wrong, _self_]", "its defaults include one another without an end. Name each file once"),
        (b"defaults: [3]", "Unsupported type in defaults : int. Write defaults as a list of names"),
        (b"- a\n- b", "must be a DictConfig, got ListConfig"),
        (
            "seed: 3\nrecipe: caf\u00e9".encode("latin-1"),
            "wrong.yaml:2 is not UTF-8 text: byte 0xe9. Save the file",
        ),
        ("seed: 3".encode("utf-16"), "wrong.yaml:1 is not UTF-8 text: byte 0xff"),
    ],
)
def test_a_file_that_hydra_cannot_compose_is_one_message(tmp_path, text, message):
    path = tmp_path / "wrong.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose(str(path))


def test_a_byte_order_mark_before_a_recipe_is_no_part_of_it(tmp_path):
    register_resolvers()
    (tmp_path / "marked.yaml").write_bytes(b"\xef\xbb\xbfdefaults: [/worlds/shapes/nft, _self_]\nrecipe: marked\n")
    assert resolve(compose(str(tmp_path / "marked.yaml")))["recipe"] == "marked"


def test_a_file_of_your_own_composes_from_packaged_recipes(tmp_path):
    register_resolvers()
    path = tmp_path / "mine.yaml"
    path.write_text("defaults:\n  - /worlds/shapes/nft\n  - _self_\n\nrecipe: mine\nseed: 7\n")
    recipe = resolve(compose(str(path), ["algorithm.kl_coef=0.5"]))
    assert (recipe["recipe"], recipe["seed"], recipe["algorithm"]["kl_coef"]) == ("mine", 7, 0.5)
    with pytest.raises(ConfigError, match="no such recipe file"):
        compose(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "reward.scorers.shape=null",
            "reward.scorers.shape=null removes nothing: there is shapes. Did you mean shapes?",
        ),
        ("trackers.wandbb=null", "trackers.wandbb=null removes nothing: there is console, jsonl, "),
    ],
)
def test_null_for_an_entry_that_is_not_there_is_refused(override: str, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose("worlds/shapes/nft", [override])


@pytest.mark.parametrize(
    "override", ["eval=null", "trackers.wandb=null", "eval.interval_cpu_s=null", "backend.lora=null"]
)
def test_null_for_a_key_that_may_be_absent_is_taken(override: str):
    check_recipe(compose("worlds/shapes/nft", [override]))
