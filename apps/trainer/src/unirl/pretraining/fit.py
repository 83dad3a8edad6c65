"""Fit a small transformer on a CPU: Muon for its matrices, AdamW for all else, a trapezoid of learning rates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor, nn

from unirl.pretraining.muon import Muon

logger = logging.getLogger(__name__)


def fit(
    model: nn.Module,
    batch_loss: Callable[[], Tensor],
    *,
    num_steps: int,
    muon_rate: float,
    adam_rate: float,
    is_hidden: Callable[[str], bool],
    warm_up: int = 50,
    decay: float = 0.4,
    after_step: Callable[[int], None] | None = None,
) -> list[float]:
    """Take `num_steps` optimiser steps on the losses of `batch_loss`, which draws its own batches; the loss of each.

    Parameters that need no gradient stay as they are.
    is_hidden: whether a parameter of this name is inside the blocks; matrices and convolutions there are Muon's.
    warm_up: steps until the full rate. decay: last share of the steps, in which it falls to zero.
    after_step: called with the number of each step, from 1.
    """
    hidden, rest = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        (hidden if parameter.ndim >= 2 and is_hidden(name) else rest).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [Muon(hidden, lr=muon_rate)] if hidden else []
    optimizers.append(torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0))

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / warm_up, max(num_steps - step, 0) / (decay * num_steps))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    losses: list[float] = []
    logged = 0
    started = time.process_time()
    for step in range(1, num_steps + 1):
        loss = batch_loss()
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(rest, 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        losses.append(loss.item())
        if step % 100 == 0 or step == num_steps:
            seconds = time.process_time() - started
            logger.info("step %d loss %.4f, %.0f CPU s", step, fmean(losses[logged:]), seconds)
            logged = step
        if after_step is not None:
            after_step(step)
    return losses
