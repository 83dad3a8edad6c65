"""Checkpointed steps of a sampler that is unrolled run a few times: those between count what one of them did.

The first step has no gradient at its input, and the last one, whose backward pass is the first, makes the gradients:
both run. Of those between, the first and the last run, and the backward pass of the latter is the record of the others.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unirl.algorithms.reward_gradient import Denoising
from unirl.rehearsal.blocks import Block, Blocks
from unirl.rehearsal.mode import Rehearsal
from unirl.rehearsal.repeats import replaced


@contextmanager
def steps_alike(mode: Rehearsal, blocks: Blocks) -> Generator[None]:
    """Within it, the steps between of each trajectory are counted without being run again."""
    velocity = Denoising.velocity
    numbers: weakref.WeakKeyDictionary[Denoising, int] = weakref.WeakKeyDictionary()
    count = itertools.count()

    def run(steps: Denoising, x_R: Tensor, sample_R: Tensor, step_R: Tensor) -> Tensor:
        known = mode.known_values(step_R)
        is_chained = steps.is_checkpointed and torch.is_grad_enabled() and x_R.requires_grad
        if not is_chained or known is None or known.min() != known.max() or known.max() == steps.num_steps - 1:
            return velocity(steps, x_R, sample_R, step_R)
        number = numbers.setdefault(steps, next(count))
        step = Block(
            nn.Module(),  # the steps that run give the weights their gradients
            lambda x_R, step_R: velocity(steps, x_R, sample_R, step_R),  # which keeps what it is given
            ("step", number),
            is_end=False,
            is_last=int(known.max()) == steps.num_steps - 2,
            is_checkpointed=True,
        )
        result: Tensor = blocks.running(step)(x_R, step_R)
        return result

    with replaced(Denoising, "velocity", run):
        yield
