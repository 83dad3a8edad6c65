"""AdamW in the fastest form that the parameters allow, the learning rate of a step, and the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from unirl.train.configs import LrSchedulerConfig
from unirl.train.hosted_states import HostedOptimizer, hosted
from unirl.train.shards import local_part
from unirl.train.small_states import SmallStateAdamW
from unirl.types.devices import widened
from unirl.types.errors import ConfigError
from unirl.types.training import AdamWImplementation, OptimizerConfig


def learning_rate_at(step: int, base: float, schedule: LrSchedulerConfig | None) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    The ramp is base * (step + 1) / warmup_steps, so that the first step already moves and step warmup_steps - 1 has
    the whole rate. Then, with x the fraction of the remaining steps done: 1 - x ("linear") or (1 + cos(pi x)) / 2
    ("cosine"); zero from total_steps on.
    """
    if schedule is None:
        return base
    if step < schedule.warmup_steps:
        return base * (step + 1) / schedule.warmup_steps
    if schedule.total_steps is None:
        return base
    done = (step - schedule.warmup_steps) / (schedule.total_steps - schedule.warmup_steps)
    if done >= 1.0:
        return 0.0
    return base * (1.0 - done if schedule.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))


def adamw_implementation(parameters: Sequence[nn.Parameter], asked: AdamWImplementation) -> AdamWImplementation:
    """The form of AdamW to use. Raises ConfigError if "fused" is asked for and the parameters do not allow it.

    One fused kernel needs one device type and floating-point parameters. On a CPU it reads each
    value once: 9 ms per step instead of 31 to 34 for 2.3 million parameters on one core.
    """
    devices = {parameter.device.type for parameter in parameters}
    is_fusible = len(devices) == 1 and devices != {"meta"} and all(p.is_floating_point() for p in parameters)
    if asked == "fused" and not is_fusible:
        raise ConfigError(
            f"optimizer.implementation = 'fused' needs parameters on one device, a CPU or a GPU; they are on "
            f"{sorted(devices)}. Set it to auto."
        )
    if asked != "auto":
        return asked
    return "fused" if is_fusible else "foreach"


def make_adamw(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW with its state already in place (zeros), so that a checkpoint has the same tensors at every step.

    One group of parameters for each mesh that they are sharded over, since a kernel takes those of one.
    """
    keep = hosted if config.offload else _here
    if config.states != "full":
        small = SmallStateAdamW(
            parameters,
            states=config.states,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            keep=keep,
        )
        return HostedOptimizer(small) if config.offload else small
    implementation = adamw_implementation(parameters, config.implementation)
    of_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        of_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in of_mesh.values()],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=implementation == "fused",
        foreach=implementation == "foreach",
    )
    for parameter in parameters:
        # As AdamW makes it at the first step: a fused kernel wants the step count on the parameter's device.
        on = parameter.device if implementation == "fused" else torch.device("cpu")
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=on),
            "exp_avg": keep(torch.zeros_like(parameter, requires_grad=False)),
            "exp_avg_sq": keep(torch.zeros_like(parameter, requires_grad=False)),
        }
    return HostedOptimizer(optimizer) if config.offload else optimizer


def _here(state: Tensor) -> Tensor:
    return state


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state of an optimizer of `make_adamw`; a step count that lives on the host stays there, and so do states
    that are offloaded."""
    if isinstance(optimizer, HostedOptimizer):
        return
    is_fused = bool(optimizer.param_groups[0]["fused"])
    for parameter, state in optimizer.state.items():
        moved = {key: value.to(device) for key, value in state.items() if key != "step" or is_fused}
        optimizer.state[parameter] = {**state, **moved}


@torch.no_grad()
def global_grad_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm of all gradients together, float32 scalar, the same on every rank.

    Shards are summed over the ranks that share a parameter and counted once for each replica. Squares are summed in
    float64, where float32 gradients cannot overflow, on devices that have it.
    """
    norms = torch._foreach_norm([local_part(gradient) for gradient in gradients], 2, dtype=torch.float32)
    squares = widened(torch.stack(list(norms))).square()
    return summed_over_shards(lambda places: squares[places].sum(), gradients).sqrt().float()


@torch.no_grad()
def summed_over_shards(local: Callable[[list[int]], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """`local(places)`, computed of this rank's shards of the tensors at some places, summed over the ranks that share
    these, and over all tensors."""
    sums = []
    for (mesh, dims), places in _by_sharding(tensors).items():
        part = local(places)
        if mesh is not None:
            part = part.to(tensors[places[0]].device)
            for dim in dims:
                dist.all_reduce(part, group=mesh.get_group(dim))
        sums.append(part)
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


@torch.no_grad()
def clip_gradients(gradients: Sequence[Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients in place so that their global norm, `norm`, becomes at most `max_norm`."""
    if norm > max_norm:
        torch._foreach_mul_([local_part(gradient) for gradient in gradients], max_norm / norm)


def clipped_step(
    optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], norm: float, *, max_norm: float, lr: float
) -> None:
    """Clip the optimizer's gradients of global norm `norm`, then take its step at `lr`."""
    clip_gradients(gradients, norm, max_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def _by_sharding(tensors: Sequence[Tensor]) -> dict[tuple[DeviceMesh | None, tuple[int, ...]], list[int]]:
    """Places of the tensors by their mesh and its dimensions that cut them; None and none of those that lie whole."""
    found: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[int]] = {}
    for place, tensor in enumerate(tensors):
        mesh, dims = None, ()
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            dims = tuple(dim for dim, each in enumerate(tensor.placements) if not isinstance(each, Replicate))
        found.setdefault((mesh, dims), []).append(place)
    return found
