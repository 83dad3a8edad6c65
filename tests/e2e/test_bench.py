"""`trainer bench` measures whole steps of a recipe, of images and of texts."""

import pytest
from small import SMALL

from unirl.app.bench import bench_recipe
from unirl.app.environment import register_resolvers
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of

TEXT = ["batch_size=4", "sampling.samples_per_prompt=4", "stack.micro_batch_size=8", "guardrails.action=off"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "sampling", "variants"),
    [
        ("worlds/shapes/flowgrpo", SMALL, {"num_inference_steps", "height", "width"}, ("batched", "per_step")),
        ("worlds/arithmetic/grpo", TEXT, {"max_new_tokens", "temperature"}, ("packed", "padded")),
    ],
)
def test_a_report_has_seconds_and_operations_of_every_phase(name, words, sampling, variants):
    register_resolvers()
    recipe = resolve(compose(name, words))
    report = bench_recipe(run_of(recipe), warmup=0, repeats=1)
    assert report["recipe"] == name and report["geometry"]["samples"] == 16 and report["samples_per_s"] > 0
    assert sampling <= report["geometry"]["sampling"].keys()
    for phase in ("rollout", "train"):
        found = report["phases"][phase]
        # The device is the CPU, and its clock is read inside of the phase's.
        assert 0.5 * found["cpu_s"] < found["device_s"] <= found["cpu_s"] and found["peak_device_bytes"] is None
        assert found["device_s"] > 0 and found["flops"] > 1e6 and 0 < found["gemm_fraction"] < 1
    ours, plain = (report["variants"][f"replay_{each}_device_s"] for each in variants)
    assert ours > 0 and plain > 0 and report["variants"]["replay_speedup"] > 0
    assert report["variants"]["replay_samples"] >= 4
