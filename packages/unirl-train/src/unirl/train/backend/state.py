"""The state of a backend by flat name: everything that training changes, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unirl.train.backend.auxiliary import AuxiliaryModule
from unirl.train.backend.policies import NamedPolicies
from unirl.train.backend.trained_copies import TrainedCopy
from unirl.types.errors import CheckpointError, TrainingError

logger = logging.getLogger(__name__)

COUNTERS = ("num_optimizer_steps", "num_skipped_steps", "num_skipped_in_a_row", "num_ema_averages", "policy_version")


@dataclass
class Progress:
    """How far training is."""

    num_optimizer_steps: int = 0
    """Steps taken, skipped ones not counted. A state that is loaded brings its own."""
    num_skipped_steps: int = 0
    """Steps skipped for a non-finite gradient norm."""
    num_skipped_in_a_row: int = 0
    policy_version: int = 0
    """Grows with every change of the weights: with an optimizer step, and also where an earlier state is loaded."""

    def step(self) -> None:
        """Count a step that was taken."""
        self.num_optimizer_steps += 1
        self.policy_version += 1
        self.num_skipped_in_a_row = 0

    def skip(self, norm: float, max_skipped_steps: int) -> None:
        """Count a step that a non-finite gradient norm let skip. Raises TrainingError at the max_skipped_steps-th in a
        row."""
        self.num_skipped_steps += 1
        self.num_skipped_in_a_row += 1
        logger.warning(
            "gradient norm %s after %d optimizer steps: step skipped (%d in a row)",
            norm,
            self.num_optimizer_steps,
            self.num_skipped_in_a_row,
        )
        if self.num_skipped_in_a_row >= max_skipped_steps:
            raise TrainingError(
                f"{self.num_skipped_in_a_row} optimizer steps in a row had a non-finite gradient norm "
                f"(last: {norm}), after {self.num_optimizer_steps} good ones. Lower optimizer.learning_rate, or "
                "raise max_skipped_steps if single spikes are expected."
            )


class TrainState:
    """Parameters, optimizer, named policies with their optimizers, moving average, modules with the policy, counters.

    parameters: by "component.name". auxiliary, trained_copies: by name; the backend adds to them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        policies: NamedPolicies,
        auxiliary: Mapping[str, AuxiliaryModule],
        trained_copies: Mapping[str, TrainedCopy],
    ) -> None:
        self.progress = Progress()
        self._parameters = parameters
        self._optimizer = optimizer
        self._policies = policies
        self._auxiliary = auxiliary
        self._trained_copies = trained_copies

    @property
    def counters(self) -> dict[str, int]:
        """By the names of COUNTERS."""
        progress, ema = self.progress, self._policies.ema
        averages = 0 if ema is None else ema.num_averages
        steps = (progress.num_optimizer_steps, progress.num_skipped_steps, progress.num_skipped_in_a_row)
        return dict(zip(COUNTERS, (*steps, averages, progress.policy_version), strict=True))

    def tensors(self) -> dict[str, Tensor]:
        """All of it, sharing memory with what trains, so that torch.distributed.checkpoint loads into place.

        DTensors where sharded, so that each rank saves its own part and any number of ranks can load it.
        """
        self._policies.require_current("state_dict")
        state: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            state[f"parameters/{name}"] = parameter.detach()
            for key, value in self._optimizer.state[parameter].items():
                state[f"optimizer/{name}/{key}"] = value
        for policy in self._policies.names:
            for name, tensor in self._policies.values(policy).items():
                state[f"policies/{policy}/{name}"] = tensor
        if self._policies.ema is not None:
            for name, tensor in self._policies.ema.copies.items():
                state[f"ema/{name}"] = tensor
        for module, auxiliary in self._auxiliary.items():
            state.update({f"auxiliary/{module}/{name}": tensor for name, tensor in auxiliary.state_dict().items()})
        for copy, trained in self._trained_copies.items():
            state.update({f"copy_optimizer/{copy}/{name}": tensor for name, tensor in trained.state_dict().items()})
        state["counters"] = torch.tensor(list(self.counters.values()), dtype=torch.int64)
        return state

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state: one that was loaded into place, or a copy. Raises CheckpointError if names differ.

        The policy version never goes back, so that no two policies of a run share one.
        """
        own = self.tensors()
        missing, unexpected = sorted(set(own) - set(state)), sorted(set(state) - set(own))
        if missing or unexpected:
            raise CheckpointError(
                f"the state does not fit the backend: {len(missing)} tensors missing {missing[:3]}, "
                f"{len(unexpected)} unexpected {unexpected[:3]}. Resume with the options that it was saved with."
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        counters = dict(zip(COUNTERS, (int(value) for value in state["counters"]), strict=True))
        self.progress.num_optimizer_steps = counters["num_optimizer_steps"]
        self.progress.num_skipped_steps = counters["num_skipped_steps"]
        self.progress.num_skipped_in_a_row = counters["num_skipped_in_a_row"]
        saved, current = counters["policy_version"], self.progress.policy_version
        self.progress.policy_version = saved if saved >= current else current + 1
        if self._policies.ema is not None:
            self._policies.ema.num_averages = counters["num_ema_averages"]


def architecture(modules: Mapping[str, nn.Module], kept: Mapping[str, Tensor]) -> dict[str, list[object]]:
    """Parameter name -> [shape, dtype, whether it trains], of all parameters, frozen ones included.

    kept: of the same names, those that are kept in another dtype than they compute in.
    """
    return {
        f"{component}.{name}": [
            list(parameter.shape),
            str(kept.get(f"{component}.{name}", parameter).dtype),
            parameter.requires_grad,
        ]
        for component, module in modules.items()
        for name, parameter in module.named_parameters()
    }
