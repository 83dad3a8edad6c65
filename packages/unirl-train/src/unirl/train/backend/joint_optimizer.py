"""The optimizers of a backend: of the policy, of modules that step with it, and of copies that step apart."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from unirl.train.backend.auxiliary import AuxiliaryModule
from unirl.train.backend.collectives import RankCollectives
from unirl.train.backend.policies import NamedPolicies
from unirl.train.backend.state import TrainState
from unirl.train.backend.trained_copies import TrainedCopy
from unirl.train.configs import LrSchedulerConfig
from unirl.train.optim import clipped_step, global_grad_norm, learning_rate_at, make_adamw, move_optimizer
from unirl.types.errors import ContractError
from unirl.types.training import OptimizerConfig, StepStats


class JointOptimizer:
    """AdamW of the policy's parameters, of auxiliary modules and of trained copies, under one schedule.

    The policy and the modules take a step together or skip it together; `progress` counts both.
    max_skipped_steps: steps in a row with a non-finite gradient norm after which TrainingError is raised.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        policies: NamedPolicies,
        config: OptimizerConfig,
        schedule: LrSchedulerConfig | None,
        *,
        max_skipped_steps: int,
    ) -> None:
        self._parameters = parameters
        self._policies = policies
        self._base_lr = config.learning_rate
        self._schedule = schedule
        self._max_skipped_steps = max_skipped_steps
        self.policy = make_adamw(list(parameters.values()), config)
        """AdamW of the policy's parameters."""
        self.auxiliary: dict[str, AuxiliaryModule] = {}
        """Modules that step with the policy, by name."""
        self.trained_copies: dict[str, TrainedCopy] = {}
        """Copies that step on their own losses, by name."""
        self.state = TrainState(parameters, self.policy, policies, self.auxiliary, self.trained_copies)
        """All that steps change."""
        self.progress = self.state.progress

    def add_module(
        self, name: str, module: nn.Module, config: OptimizerConfig, *, max_grad_norm: float, ranks: RankCollectives
    ) -> None:
        """Step `module` with the policy. Raises ContractError for a name that is taken or not plain."""
        if name in self.auxiliary or "/" in name or not name:
            raise ContractError(f"module name {name!r} is taken or not a plain name")
        self.auxiliary[name] = AuxiliaryModule(module, config, max_grad_norm=max_grad_norm, ranks=ranks)

    def train_copy(self, name: str, config: OptimizerConfig, *, max_grad_norm: float) -> None:
        """Keep a copy of the current parameters under `name` with an AdamW of the copy.

        Raises ContractError for a name that is kept already.
        """
        if name in self._policies.names:
            raise ContractError(f"there is a copy {name!r} already")
        self._policies.keep(name)
        self.trained_copies[name] = TrainedCopy(
            self._policies.values(name),
            config,
            max_grad_norm=max_grad_norm,
            max_skipped_steps=self._max_skipped_steps,
        )

    def zero_grad(self) -> None:
        """Drop the gradients of the policy and the modules."""
        self.policy.zero_grad(set_to_none=True)
        for module in self.auxiliary.values():
            module.zero_grad()

    def step(self, max_grad_norm: float) -> StepStats:
        """Clip gradients to a global norm, then AdamW. Every rank calls it; collectives inside.

        A non-finite norm, of the policy or of a module, drops the gradients and changes nothing else. Raises
        TrainingError at the max_skipped_steps-th such step in a row, and ContractError if there are no gradients.
        """
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        if not gradients:
            raise ContractError("there are no gradients: call backward before optimizer_step")
        norm = float(global_grad_norm(gradients))
        norms = {name: module.reduced_grad_norm() for name, module in self.auxiliary.items()}
        lr = self._scheduled(self._base_lr)
        if bad := [value for value in (norm, *norms.values()) if not math.isfinite(value)]:
            self.zero_grad()
            self.progress.skip(bad[0], self._max_skipped_steps)
            return StepStats(norm, lr, is_skipped=True, module_grad_norms=norms)
        clipped_step(self.policy, gradients, norm, max_norm=max_grad_norm, lr=lr)
        for name, module in self.auxiliary.items():
            module.step(norms[name], self._scheduled(module.learning_rate))
        self.progress.step()
        return StepStats(norm, lr, is_skipped=False, module_grad_norms=norms)

    def step_copy(self, name: str) -> StepStats:
        """Step a trained copy with the gradients that the parameters have, and drop these."""
        gradients = {key: each.grad for key, each in self._parameters.items() if each.grad is not None}
        copy = self.trained_copies[name]
        stats = copy.step(gradients, self._scheduled(copy.learning_rate))
        self.zero_grad()
        return stats

    def _scheduled(self, base_lr: float) -> float:
        return learning_rate_at(self.progress.num_optimizer_steps, base_lr, self._schedule)

    def move_modules(self, device: torch.device) -> None:
        """Move the modules that step with the policy, with their optimizers' state."""
        for module in self.auxiliary.values():
            module.move(device)

    def move_state(self, device: torch.device) -> None:
        """Move the optimizer state of the policy and of the copies, whose values have been moved."""
        move_optimizer(self.policy, device)
        for name, copy in self.trained_copies.items():
            copy.move(self._policies.values(name), device)
