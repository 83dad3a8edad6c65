"""Recipes on two Ray workers learn by VeOmniBackend what they learn by FSDPBackend, bit for bit."""

import functools
import importlib.util
import threading

import pytest
import torch
from probe import RecipeOf, build_all
from small import SMALL

from unirl.app.environment import register_resolvers
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.trainer.build.assembly import make_trainer

pytestmark = [
    pytest.mark.veomni,
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("veomni") is None, reason="needs uv sync --extra veomni"),
]

SMALL_TEXTS = ["batch_size=4", "num_rollouts=2", "stack.micro_batch_size=4", "guardrails.action=off"]
RECIPES = {"worlds/shapes/nft": SMALL, "worlds/arithmetic/grpo": SMALL_TEXTS}
BACKENDS = {"fsdp": "unirl.train.backend.fsdp.FSDPBackend", "veomni": "unirl.train.backend.veomni.VeOmniBackend"}


@pytest.fixture(scope="module")
def both_steps(ray_of_two_cores, tmp_path_factory):
    """both_steps(recipe) -> by backend, metrics of two rollouts and the gradients of every step."""
    from unirl.distributed.group.ray_runtime import RayRuntime

    register_resolvers()
    folder = tmp_path_factory.mktemp("workers")
    recipes = {
        f"{recipe}-{backend}": resolve(compose(recipe, [*words, f"backend._target_={path}"]))
        for recipe, words in RECIPES.items()
        for backend, path in BACKENDS.items()
    }

    def steps(workers, name):
        runtime = RecipeOf(workers, name)
        run = run_of({**recipes[name], "eval": None})
        trainer = make_trainer(run, runtime, folder / name, [], threading.Event())
        runtime.role("stack").prepare()
        found = [trainer.step(number) for number in range(2)]
        metrics = [
            {key: value for key, value in each.items() if not key.startswith(("timing", "perf"))} for each in found
        ]
        return metrics, runtime.role("probe").gradients()

    builder = functools.partial(build_all, recipes, str(folder))
    with RayRuntime(builder, num_devices=2, start_timeout_s=600) as workers:
        yield lambda recipe: {backend: steps(workers, f"{recipe}-{backend}") for backend in BACKENDS}


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_two_rollouts_have_the_same_metrics_and_gradients(recipe, both_steps):
    found = both_steps(recipe)
    (metrics, gradients), (expected, expected_gradients) = found["veomni"], found["fsdp"]
    assert metrics == expected
    assert len(gradients) == len(expected_gradients) > 1
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert ours.keys() == theirs.keys() != set()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
