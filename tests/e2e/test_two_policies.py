"""Two policies, each with weights, optimizer and its own stack, learn from one rollout."""

import copy

import pytest
import stopping
import torch
from safetensors.torch import load_file
from stopping import comparable

from unirl.config.check import check_recipe
from unirl.config.runs import run_of
from unirl.train.backend.manifest import read_manifest
from unirl.trainer.build.worker import build_components
from unirl.trainer.commands import export_recipe
from unirl.types.errors import ConfigError

pytestmark = pytest.mark.slow

OF_POLICIES = ("bundle", "pipeline", "backend", "algorithm", "stack")


def run(recipe, run_dir, after=10**9):
    _, records = stopping.run(recipe, run_dir, after)
    return {step: comparable(metrics) for step, metrics in records.items()}


@pytest.fixture
def painters(recipe):
    """A recipe of two policies: small SD3 models that start equal; the second learns with twice the rate."""
    few = ("batch_size=2", "sampling.num_inference_steps=2", "stack.num_updates_per_batch=2", "media_interval=0")
    flat = recipe("worlds/shapes/flowgrpo", *few, "save.best_metric=reward")
    own = {key: flat.pop(key) for key in OF_POLICIES}
    policies = {name: copy.deepcopy(own) for name in ("sketcher", "painter")}
    policies["sketcher"]["stack"]["track"] = "sketch"
    policies["painter"]["stack"]["track"] = "painting"
    policies["painter"]["backend"]["optimizer"]["learning_rate"] *= 2
    sampling, engine = flat.pop("sampling"), flat.pop("engine")
    once = {**sampling, "samples_per_prompt": 1}
    return {
        **flat,
        "eval": None,
        "advantages": {"center": "batch", "scale": "batch"},
        "stages": {
            "sketch": {"policy": "sketcher", "engine": engine, "sampling": sampling},
            "painting": {"policy": "painter", "grows_from": "sketch", "engine": engine, "sampling": once},
        },
        "reward": {**flat["reward"], "track": "painting"},
        "policies": policies,
    }


def test_two_policies_train_resume_bit_for_bit_and_export_by_name(painters, tmp_path):
    check_recipe(painters)
    whole = run(painters, tmp_path / "whole")
    first = run(painters, tmp_path / "parts", after=1)
    second = run({**painters, "resume": "auto"}, tmp_path / "parts")
    assert {**first, **second} == whole and set(whole) == {1, 2}
    assert whole[2]["sketcher/train/lr"] * 2 == whole[2]["painter/train/lr"]
    assert whole[2]["train/grad_norm"] == max(whole[2][f"{name}/train/grad_norm"] for name in painters["policies"])
    facts, problem = read_manifest(tmp_path / "whole" / "checkpoints" / "step-000002")
    assert problem is None and facts["lora_scale"] == {"sketcher": None, "painter": None}

    def exported(run_dir, policy):
        folder = tmp_path / f"{run_dir}-{policy}"
        export_recipe(run_of(painters), tmp_path / run_dir, folder, merged=True, policy=policy)
        (file,) = (folder / "transformer").glob("*.safetensors")
        return load_file(file)

    sketcher, painter, again = exported("whole", "sketcher"), exported("whole", "painter"), exported("parts", "painter")
    assert all(torch.equal(value, again[key]) for key, value in painter.items())
    assert any(not torch.equal(value, sketcher[key]) for key, value in painter.items())
    with pytest.raises(ConfigError, match="policy .ema': this run has the policies sketcher, painter. Name one of th"):
        export_recipe(run_of(painters), tmp_path / "whole", tmp_path / "ema", merged=True, policy="ema")


def test_the_roles_of_several_policies_carry_their_names(painters, tmp_path):
    from unirl.distributed.worker import WorkerContext

    roles = build_components(run_of(painters), str(tmp_path), WorkerContext(rank=0, world_size=1, device="cpu"))
    of_each = ("bundle", "pipeline", "backend", "algorithm", "stack", "exporter")
    assert set(roles) == {"reward", "engine", "stack", "checkpointer"} | {
        f"{policy}/{name}" for policy in ("sketcher", "painter") for name in of_each
    }
