"""The policy-gradient recipes hold the numbers of their papers, and mistakes that only they can make have messages."""

import importlib.resources
import re
from functools import lru_cache

import pytest
import yaml

from unirl.app.environment import register_resolvers
from unirl.config.catalog import RECIPES_MODULE, available
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.types.errors import ConfigError

from .changed_recipes import changed

KERNELS = "unirl.sde.kernels"
WINDOWS = "unirl.sde.windows"


@lru_cache
def resolved(name):
    """A packaged recipe."""
    register_resolvers()
    return resolve(compose(name))


def test_every_policy_gradient_has_a_small_and_a_real_recipe():
    names = ["flowgrpo", "flowgrpo_fast", "flowgrpo_cps", "dancegrpo", "mixgrpo", "mixgrpo_flash", "guard", "flowdppo"]
    names += ["cppo", "ddpo", "dpok", "branchgrpo"]
    assert set(available()) >= {f"{folder}/{name}" for name in names for folder in ("sd3", "worlds/shapes")}


SHARED = (
    "alignprop awm branchgrpo crd dancegrpo ddpo dgpo dpo dpok draft draft_lv drtune flowdppo guard nft online_dpo ppo"
)


@pytest.mark.parametrize("name", [*SHARED.split(), "refl", "srpo"])
def test_a_small_and_a_real_recipe_share_the_part_of_their_method(name):
    folder = importlib.resources.files(RECIPES_MODULE)
    files = [yaml.safe_load((folder / f"{kind}/{name}.yaml").read_text()) for kind in ("worlds/shapes", "sd3")]
    small, real = ({entry for entry in file["defaults"] if isinstance(entry, str)} for file in files)
    assert any("/parts/method/" in entry for entry in small & real)


def test_dancegrpo_trains_sixty_percent_of_all_steps_but_the_last():
    for name, num_steps, trained in (("sd3/dancegrpo", 10, 5), ("worlds/shapes/dancegrpo", 6, 3)):
        recipe = resolved(name)
        scheduler = recipe["sampling"]["scheduler"]
        assert scheduler["_target_"] == "unirl.sde.windows.AllSteps" and scheduler["exclude_last"] is True
        assert scheduler["num_steps"] == num_steps
        assert int(recipe["algorithm"]["step_fraction"] * (num_steps - 1) + 1e-9) == trained


def test_flow_grpo_has_the_published_numbers():
    recipe = resolved("sd3/flowgrpo")
    sampling, algorithm = recipe["sampling"], recipe["algorithm"]
    assert (sampling["num_inference_steps"], sampling["guidance_scale"], sampling["eta"]) == (10, 4.5, 0.7)
    assert sampling["negative_prompt"] == "" and sampling["scheduler"]["exclude_last"] is True
    assert (recipe["batch_size"], sampling["samples_per_prompt"], recipe["num_devices"]) == (48, 24, 32)
    assert (algorithm["kl_coef"], algorithm["kl_estimator"], algorithm["clip_range"]) == (0.01, "flow_grpo", 1e-4)
    assert recipe["pipeline"]["schedule"]["convention"] == "diffusers"
    assert recipe["eval"]["policy"] == "ema" and recipe["eval"]["num_inference_steps"] == 40
    assert (recipe["backend"]["ema"]["decay"], recipe["backend"]["ema"]["every"]) == (0.9, 8)
    assert recipe["advantages"]["preset"] == "flow_grpo_global_std"
    for name, eta, steps in (("fast", 0.8, 2), ("cps", 0.8, 3)):
        variant = resolved(f"sd3/flowgrpo_{name}")
        assert (variant["sampling"]["eta"], variant["sampling"]["scheduler"]["window_size"]) == (eta, steps)
        assert variant["algorithm"]["clip_range"] == 1e-5 and not variant["algorithm"].get("kl_coef")
    assert resolved("sd3/flowgrpo_fast")["sampling"]["init_same_noise"] is True
    assert resolved("sd3/flowgrpo_cps")["sampling"]["guidance_scale"] == 1.0


def test_flow_dppo_has_the_published_numbers():
    recipe = resolved("sd3/flowdppo")
    assert (recipe["batch_size"], recipe["sampling"]["samples_per_prompt"], recipe["sampling"]["eta"]) == (64, 16, 0.8)
    assert recipe["algorithm"]["threshold"] == 1e-7 and recipe["algorithm"].get("advantage_clip") is None


MISTAKES = [
    (
        "guard",
        {"pipeline.strategy._target_": f"{KERNELS}.CPSSDEStrategy"},
        "GRPOGuard needs the density of a Flow or Dance kernel, the cps kernel has none",
    ),
    (
        "guard",
        {"pipeline.strategy.reduction": "sum", "algorithm.clip_range": 0.2},
        "GRPOGuard needs log-probs that are means over the elements. Set pipeline.strategy.reduction: mean.",
    ),
    (
        "flowgrpo",
        {"pipeline.strategy.reduction": "sum"},
        "algorithm.clip_range = 0.005 with pipeline.strategy.reduction = sum: clips this small are meant for means",
    ),
    (
        "flowgrpo",
        {"algorithm.clip_range_high": 0.28},
        "algorithm.clip_range_high = 0.28 with pipeline.strategy.reduction = mean clips nothing",
    ),
    ("flowdppo", {"algorithm.threshold": 0.5}, "algorithm.threshold = 0.5 is in nats per latent element"),
    ("cppo", {"algorithm.prefix_threshold": 0.1}, "algorithm.prefix_threshold = 0.1 is in nats per latent element"),
    (
        "flowgrpo_cps",
        {"algorithm.kl_coef": 0.1, "algorithm.kl_estimator": "flow_grpo", "backend.keep_reference": True},
        "algorithm.kl_estimator = flow_grpo needs a Flow or Dance kernel, not cps. Set kl_estimator: exact.",
    ),
    (
        "ddpo",
        {"stack.num_updates_per_batch": 4},
        "algorithm.estimator = score_function serves one update per rollout, stack.num_updates_per_batch = 4",
    ),
    ("ddpo", {"algorithm.clip_range": 1e-3}, "clip_range = 0.001 does nothing with estimator = score_function"),
    ("dpok", {"backend.keep_reference": False}, "algorithm.kl_coef = 0.01 needs a reference policy"),
    ("cppo", {"algorithm.rows_per_forward": "all"}, "algorithm.rows_per_forward = 'all' must be an integer"),
    (
        "flowgrpo",
        {"sampling.post_step_ratio": 0.4},
        "sampling.post_step_ratio = 0.4 is for the steps after the last stochastic one, but the last step is",
    ),
    (
        "flowgrpo",
        {"sampling.post_solver": "unipc"},
        "sampling.post_solver = unipc is for the steps after the last stochastic one, but the last step is stochastic",
    ),
    (
        "mixgrpo_flash",
        {"sampling.scheduler.max_step": None},
        "but MixGRPOWindow makes the last step stochastic in some rollouts. End its choice earlier",
    ),
    (
        "mixgrpo_flash",
        {"sampling.scheduler": {"_target_": f"{WINDOWS}.RandomSubset", "num_steps": 6, "num_sde_steps": 2}},
        "but RandomSubset makes the last step stochastic in some rollouts",
    ),
    (
        "mixgrpo_flash",
        {"sampling.scheduler": {"_target_": f"{WINDOWS}.FirstFraction", "num_steps": 6, "fraction": 1.0}},
        "but FirstFraction makes the last step stochastic in some rollouts",
    ),
    (
        "mixgrpo_flash",
        {"sampling.scheduler": {"_target_": "unirl.sde.windows.AllSteps", "num_steps": 6}},
        "sampling.post_solver = dpmpp_2m is for the steps",
    ),
    (
        "flowgrpo",
        {"pipeline.strategy._target_": f"{KERNELS}.DDIMStrategy"},
        "the ddim kernel adds no noise on the last step, which then has no log-probability. Set sampling.scheduler",
    ),
    (
        "branchgrpo",
        {"sampling.samples_per_prompt": 12},
        "samples_per_prompt = 12 must be 24, the product of branch_factors = [4, 3, 2]",
    ),
    (
        "branchgrpo",
        {"sampling.branch_steps": None, "sampling.branch_factors": None},
        "BranchGRPO trains on trees, but sampling.branch_steps = null",
    ),
    (
        "branchgrpo",
        {
            "algorithm.rollout_correction": {
                "_target_": "unirl.algorithms.rollout_correction.RolloutCorrection",
                "level": "sequence",
                "upper": 1.01,
            }
        },
        "algorithm.rollout_correction.level: samples share steps",
    ),
    ("branchgrpo", {"sampling.sde_indices": [0, 2]}, "branch_steps [4] are not stochastic"),
    ("branchgrpo", {"sampling.branch_steps": [1, 2, 4]}, "stochastic steps [0] lie before the first of"),
    (
        "branchgrpo",
        {"sampling.scheduler": {"_target_": f"{WINDOWS}.AllSteps", "num_steps": 6}, "sampling.branch_steps": [1, 2, 4]},
        "stochastic steps [0] lie before the first of sampling.branch_steps = [1, 2, 4]",
    ),
    (
        "branchgrpo",
        {"sampling.scheduler": {"_target_": f"{WINDOWS}.ExplicitSteps", "indices": [0, 2]}},
        "sampling.branch_steps [4] are not stochastic",
    ),
    (
        "branchgrpo",
        {"sampling.scheduler": {"_target_": f"{WINDOWS}.MixGRPOWindow", "num_steps": 6, "window_size": 3}},
        "must be stochastic in every rollout, and MixGRPOWindow chooses other steps",
    ),
    ("branchgrpo", {"sampling.init_same_noise": False}, "branch_steps share the start of a prompt's samples"),
    ("branchgrpo", {"engine.forward_batch_size": 36}, "forward_batch_size = 36 would cut trees of 24 samples"),
    ("branchgrpo", {"stack.micro_batch_size": 36}, "stack.micro_batch_size = 36 must be a multiple of 24"),
    ("branchgrpo", {"algorithm.samples_per_tree": 12}, "BranchGRPO trains on 12 samples of a prompt"),
    ("branchgrpo", {"selection": {"best_of": 12}}, "BranchGRPO trains on 24 samples of a prompt"),
    ("branchgrpo", {"algorithm.step_fraction": 0.5}, "algorithm.step_fraction = 0.5: samples that share a step"),
    (
        "branchgrpo",
        {"algorithm": {"_target_": "unirl.algorithms.diffusion_grpo.DiffusionGRPO", "clip_range": 5e-3}},
        "samples share steps, which DiffusionGRPO would train once for each",
    ),
    (
        "vllm_omni",
        {"sampling.branch_steps": [0], "sampling.branch_factors": [24], "sampling.init_same_noise": True},
        "samples every trajectory alone. Remove branch_steps and branch_factors",
    ),
    (
        "flashgrpo",
        {"algorithm.step_fraction": 0.5},
        "algorithm.step_fraction = 0.5 leaves steps out of training, and sampling.one_step gives each sample one",
    ),
    ("flashgrpo", {"sampling.eta": 0.0, "sampling.scheduler": None}, "one_step = prompt needs stochastic steps"),
    (
        "ppo",
        {"sampling.one_step": "prompt"},
        "samples have one stochastic step each, and DiffusionPPO trains on several",
    ),
    (
        "tempflow_branching",
        {"sampling.samples_per_prompt": 18},
        "one_step: branch spreads sampling.samples_per_prompt = 18 evenly over 4 stochastic steps",
    ),
    (
        "vllm_omni",
        {"sampling.one_step": "prompt"},
        "VLLMOmniEngine makes the same steps stochastic for all samples of a call",
    ),
    ("dancegrpo", {"selection": {"best_of_children": 2}}, "best_of_children = 2, but no trained stage grows from anot"),
    ("dancegrpo", {"selection": {"best_of": 26}}, "best_of = 26 exceeds sampling.samples_per_prompt = 24"),
]


@pytest.mark.parametrize(("name", "changes", "message"), MISTAKES)
def test_a_mistake_is_named_before_work_starts(name, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_recipe(changed(resolved(f"worlds/shapes/{name}"), changes))


RIGHT = [
    ("flowgrpo", {"pipeline.strategy.reduction": "sum", "algorithm.clip_range": 0.2}),
    ("flowdppo", {"algorithm.threshold": float("inf")}),
    ("ddpo", {"sampling.samples_per_prompt": 1, "batch_size": 48}),
    ("ddpo", {"algorithm.estimator": "importance_sampling", "stack.num_updates_per_batch": 4}),
    ("dancegrpo", {"selection": {"best_of": 12}}),
    ("branchgrpo", {"algorithm.edge_scale": "leaves", "algorithm.rows_per_forward": 7}),
    ("branchgrpo", {"sampling.sde_indices": [0, 2, 4], "engine.forward_batch_size": 24}),
    ("dancegrpo", {"pipeline.strategy._target_": f"{KERNELS}.DDIMStrategy"}),
]


@pytest.mark.parametrize(("name", "changes"), RIGHT)
def test_what_is_right_passes(name, changes):
    check_recipe(changed(resolved(f"worlds/shapes/{name}"), changes))


@pytest.mark.parametrize("name", ["branchgrpo", "flashgrpo", "tempflow_branching"])
def test_a_replica_samples_what_the_model_that_trains_does(name):
    register_resolvers()
    check_recipe(resolve(compose(f"worlds/shapes/{name}", ["parts/engine=replica", "parts/layout=together"])))


@pytest.mark.parametrize("name", [name for name in available() if name.startswith("sd3/")])
def test_the_activations_of_a_real_sd3_fit_a_gpu(name):
    """At most twelve rows in one forward, guidance counted: 32 of 80 GB, see docs/guides/sd35.md; or recomputation."""
    recipe = resolved(name)
    if recipe["backend"]["fsdp"].get("activation_checkpointing"):
        return
    algorithm, sampling = recipe["algorithm"], recipe["sampling"]
    levels = algorithm.get("num_timesteps") or sampling["num_inference_steps"]
    rows = algorithm.get("rows_per_forward") or recipe["stack"]["micro_batch_size"] * levels
    assert rows * (2 if sampling["guidance_scale"] > 1 else 1) <= 12


def test_branchgrpo_has_the_published_tree():
    recipe = resolved("sd3/branchgrpo")
    sampling = recipe["sampling"]
    assert (sampling["branch_steps"], sampling["branch_factors"]) == ([0, 3, 6, 9], [2, 2, 2, 2])
    assert (sampling["num_inference_steps"], sampling["samples_per_prompt"], sampling["eta"]) == (20, 16, 0.3)
    assert recipe["algorithm"]["samples_per_tree"] == 16 and recipe["algorithm"]["clip_range"] == 1e-3
