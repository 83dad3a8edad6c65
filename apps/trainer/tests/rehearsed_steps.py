"""What an unrolled sampler takes in training where all checkpointed steps run, and where alike ones are counted, as
JSON. A separate process, since a rehearsal registers a device for good."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter

from torch import Tensor

import unirl.app.rehearsal.rehearse as rehearsal
from unirl.algorithms.reward_gradient import Denoising
from unirl.app.command_line import Command
from unirl.app.environment import register_resolvers
from unirl.app.recipe import composed, settled
from unirl.config.check import check_recipe
from unirl.rehearsal.repeats import replaced

WORDS = (
    "worlds/shapes/alignprop",
    "runtime=ray",
    "num_devices=4",
    "device=cuda",
    "eval=null",
    "batch_size=16",
    "stack.micro_batch_size=2",
    "algorithm.is_checkpointed=true",
    "+backend.fsdp._target_=unirl.train.configs.FSDPConfig",
    "+backend.fsdp.activation_checkpointing=true",
)


def facts() -> dict[str, object]:
    """One rehearsal of training: bytes, FLOPs, bytes sent, and the velocities that ran."""
    num_run = Counter[int]()
    velocity = Denoising.velocity

    def counted(steps: Denoising, x_R: Tensor, sample_R: Tensor, step_R: Tensor) -> Tensor:
        num_run[0] += 1
        return velocity(steps, x_R, sample_R, step_R)

    run = check_recipe(settled(composed(Command("rehearse", WORDS[0], WORDS[1:]))))
    with replaced(Denoising, "velocity", counted):
        found = rehearsal.rehearse(run, 80e9)
    peak = found.peaks["train"]
    return {
        "bytes": peak.num_bytes,
        "parts": peak.parts,
        "flops": found.flops["train"],
        "collectives": found.collectives["train"],
        "num_run": num_run.total(),
    }


register_resolvers()
alike = facts()
with replaced(rehearsal, "steps_alike", lambda mode, blocks: contextlib.nullcontext()):
    json.dump({"alike": alike, "all": facts()}, sys.stdout)
