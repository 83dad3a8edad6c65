"""Seconds of compiling are those between torch's own notices of it."""

import time
from typing import Any

import torch
from advantaged import with_advantages
from diffusion_fakes import FieldBundle, FieldPipeline, rollout, setup, some_advantages

from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.train.compile_time import CompileClock


def slow(module: Any, inputs: Any) -> Any:  # Any: what Dynamo hands over and takes back
    del inputs
    time.sleep(0.05)
    return module.forward


def test_compiling_is_timed_once_per_shape():
    clock = CompileClock()
    function = torch.compile(lambda x: x.sin() + 1, backend=slow, dynamic=False)
    function(torch.ones(3))
    assert 0.05 < clock.lap() < 60
    function(torch.zeros(3))
    assert clock.lap() == 0.0
    function(torch.ones(4))
    assert clock.lap() > 0.05


def test_a_rollout_says_what_compiling_took():
    made = setup(DiffusionGRPO)
    made.stack._compiling = CompileClock()
    response = with_advantages(rollout(FieldPipeline(FieldBundle().model)), some_advantages(6))
    torch.compile(lambda x: x.cos() - 1, backend=slow)(torch.ones(3))
    found = [made.stack.train(response, progress=0.0).metrics["timing_s/compile"] for _ in range(2)]
    assert found[0] > 0.05 and found[1] == 0.0
