"""PPO on the field of a few numbers, alone or as one of two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from advantaged import with_advantages
from diffusion_fakes import (
    SHAPE,
    FieldBundle,
    FieldPipeline,
    Setup,
    rollout,
    setup,
    some_advantages,
)
from torch import Tensor
from train_fakes import snapshot

from unirl.algorithms.critic import LatentCritic
from unirl.algorithms.ppo import DiffusionPPO
from unirl.train.configs import OptimizerConfig

NUM_SAMPLES = 12


class SmallPPO(DiffusionPPO):
    """With a critic of a few dozen parameters.

    displaced: start from a critic whose last layer is not zero.
    """

    def __init__(self, *roles: Any, displaced: float = 0.0, critic_lr: float = 1e-2, **options: Any) -> None:
        critic = LatentCritic(SHAPE[0], grid=2, width=8, seed=options.pop("critic_seed", 5))
        with torch.no_grad():
            generator = torch.Generator().manual_seed(17)
            for parameter in (critic.value.weight, critic.value.bias):
                parameter.add_(displaced * torch.randn(parameter.shape, generator=generator))
        super().__init__(*roles, critic=critic, critic_optimizer=OptimizerConfig(learning_rate=critic_lr), **options)


def ppo(**options: Any) -> Setup:
    """Backend, pipeline, algorithm and stack, prepared."""
    options.setdefault("clip_range", 0.2)
    return setup(SmallPPO, **options)


def train(made: Setup, rollouts: range) -> list[dict[str, float]]:
    """Train on this rank's shard of `NUM_SAMPLES` samples of each rollout; metrics of each."""
    shard = NUM_SAMPLES // made.backend.dp_size
    own = slice(shard * made.backend.dp_rank, shard * (made.backend.dp_rank + 1))
    found = []
    for rollout_id in rollouts:
        resp = rollout(FieldPipeline(FieldBundle().model), num_prompts=4, rollout_id=rollout_id)
        rewards = some_advantages(NUM_SAMPLES, seed=rollout_id)
        found.append(
            made.stack.train(
                with_advantages(resp.slice(own.start, own.stop), rewards[own].clone()), progress=0.0
            ).metrics
        )
    return found


def trained_state() -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """State and metrics after three rollouts of two updates each, over ragged micro-batches.

    Ranks make their own critics; they must start from rank 0's.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    made = ppo(displaced=0.5, micro=4, updates=2, rows_per_forward=5, critic_seed=5 + rank, critic_max_grad_norm=0.1)
    metrics = train(made, range(3))
    return snapshot(made.backend), metrics
