"""A rollout, its replay and one update of a tiny family, as one process and the ranks of a topology do them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from family_steps import ADVANTAGES, SAMPLES_PER_PROMPT, kit, request_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.models.token_plan import SpreadTokens
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.ulysses import UlyssesExchange
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.configs import FSDPConfig, OptimizerConfig, TrainTopology
from unirl.train.stack import TrainStack
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutResp
from unirl.types.segments import LatentSegment
from unirl.types.training import StepStats

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1.0)
"""A step is nearly the gradient times the rate. At a small epsilon Adam's first step is its sign, which rounding turns
where a gradient is zero but for rounding (biases of keys)."""


class NotingBackend(FSDPBackend):
    """Notes the gradients and the tokens of each step that it takes."""

    def optimizer_step(self, max_grad_norm: float) -> StepStats:
        """Every rank gathers the whole gradients."""
        self.gradients = {name: _whole(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        return super().optimizer_step(max_grad_norm)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def backend_of(name: str, folder: Path, topology: TrainTopology, **fsdp: Any) -> tuple[Any, NotingBackend]:
    """A family's pipeline and the backend that trains it."""
    pipeline = kit.ours(name, folder / name)
    backend = NotingBackend(
        pipeline.bundle, optimizer=OPTIMIZER, device="cpu", topology=topology, fsdp=FSDPConfig(**fsdp)
    )
    return pipeline, backend


def step_of(name: str, folder: Path, topology: TrainTopology, checkpoints: Path, **fsdp: Any) -> dict[str, Any]:
    """What this rank finds of a Flow-GRPO step: two prompts with two samples each, over the shards of the batch."""
    family, (pipeline, backend) = kit.families()[name], backend_of(name, folder, topology, **fsdp)
    engine = TrainsideRolloutEngine(pipeline, backend, forward_batch_size=4)
    params = family.sampling(num_inference_steps=3, samples_per_prompt=SAMPLES_PER_PROMPT)
    # All ranks sample all, with the model that is spread over them.
    track = engine.generate(request_of(family, engine, params, 0)).root_track().replace(advantages=ADVANTAGES)
    segment = track.segment
    assert isinstance(segment, LatentSegment) and segment.sde_logp is not None
    share = len(ADVANTAGES) // backend.dp_size
    own = track.slice(backend.dp_rank * share, (backend.dp_rank + 1) * share)
    stack = TrainStack(
        backend,
        {"image": DiffusionGRPO(pipeline, backend, clip_range=1e-2, old_logp_source="rollout")},
        micro_batch_size=share,
        max_grad_norm=1.0,
    )
    stack.prepare()
    result = stack.train(RolloutResp(tracks={"image": own}), progress=0.0)
    weights = {key: value.clone() for key, value in backend.weight_source.weights()}
    Checkpointer(backend, str(checkpoints)).save(1, {})
    return {
        "latents": segment.clean_latents,
        "logp": segment.sde_logp,
        "metrics": {key: value for key, value in result.metrics.items() if not key.startswith("timing_s/")},
        "gradients": backend.gradients,
        "state": {key: _whole(value) for key, value in backend.state_dict().items()},
        "weights": weights,
        "bytes": 0 if backend.token_exchange is None else backend.token_exchange.bytes_sent,
    }


def resumed(name: str, folder: Path, checkpoints: Path) -> dict[str, Tensor]:
    """The state of one process that has loaded what ranks saved."""
    _, backend = backend_of(name, folder, TrainTopology())
    Checkpointer(backend, str(checkpoints)).load()
    return {key: _whole(value) for key, value in backend.state_dict().items()}


# In float64, the transformers alone ------------------------------------------------------------------------------


class NotingExchange(UlyssesExchange):
    """Notes the tokens of each attention, and the bytes that it should send."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.attentions: list[list[int]] = []
        """Tokens of each rank."""
        self.expected_bytes = 0

    def to_heads(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        """Forwards and backwards, a rank sends what others keep of its tokens' heads, and back its heads of theirs."""
        if own.ndim == 5:  # queries, keys and values
            self.attentions.append(list(lengths))
            token = own[0].nbytes // own.shape[-2]
            num_own, others = lengths[self.rank], sum(lengths) - lengths[self.rank]
            # Three and one forwards, one and three backwards.
            self.expected_bytes += 4 * token * (num_own * (self.size - 1) + others) // self.size
        return super().to_heads(own, lengths)

    def gathered(self, part: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """To each other rank its own part, padded to the longest; nothing backwards."""
        token = part.nbytes // part.shape[dim]
        self.expected_bytes += token * max(lengths) * (self.size - 1)
        return super().gathered(part, dim, lengths)


def calls_of(name: str, folder: Path, exchange: UlyssesExchange | None) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Transformers in float64 with the arguments of one call each, as the family's velocity makes it."""
    family, pipeline = kit.families()[name], kit.ours(name, folder / name)
    engine = TrainsideRolloutEngine(pipeline, forward_batch_size=4)
    params = family.sampling(num_inference_steps=3, samples_per_prompt=SAMPLES_PER_PROMPT)
    calls: dict[nn.Module, dict[str, Any]] = {}

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        assert not args
        calls[module] = kwargs

    modules = pipeline.bundle.trainable_modules().values()
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    engine.generate(request_of(family, engine, params, 0))
    for hook in hooks:
        hook.remove()
    plan = pipeline.bundle.token_plan
    assert plan is not None
    if exchange is not None:
        SpreadTokens(pipeline.bundle.trainable_modules(), plan, exchange)
    return [(module.double(), _doubled(kwargs)) for module, kwargs in calls.items()]


def _doubled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _doubled(each) for key, each in value.items()}
    return [_doubled(each) for each in value] if isinstance(value, list) else value


class Doubles(TorchFunctionMode):
    """Inside, what a model computes in float32 for precision (norms, rotations) is computed in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.to:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        return func(*args, **kwargs or {})


def doubles_of(name: str, folder: Path, exchange: UlyssesExchange | None = None) -> dict[str, Tensor]:
    """Outputs of the transformers and gradients of a loss of them, the mean over ranks."""
    found: dict[str, Tensor] = {}
    for number, (module, kwargs) in enumerate(calls_of(name, folder, exchange)):
        with Doubles():
            output = module(**kwargs | {"return_dict": False})[0]
        weights = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        (output * weights).sum().backward()
        found[f"{number}.output"] = output.detach()
        for key, parameter in module.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if exchange is not None:
                dist.all_reduce(gradient)
                gradient = gradient / exchange.size
            found[f"{number}.{key}"] = gradient
    return found


# What a rank runs --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A topology of a number of ranks."""

    world_size: int
    topology: TrainTopology
    fsdp: tuple[tuple[str, Any], ...] = ()


CASES = {
    "sp2": Case(2, TrainTopology(sp=2)),
    "sp2-recomputed": Case(2, TrainTopology(sp=2), (("activation_checkpointing", True),)),
    "dp2-sp2": Case(4, TrainTopology(dp_shard=2, sp=2)),
    "hsdp2-sp2": Case(4, TrainTopology(dp_replicate=2, sp=2)),
    "sp4": Case(4, TrainTopology(sp=4)),
}


def refusals(name: str, folder: Path) -> dict[str, str]:
    """What ranks are told whose samples differ, and that do not divide the heads of a model."""
    found = {"differ": "", "heads": "", "plan": ""}
    family, (pipeline, backend) = kit.families()[name], backend_of(name, folder, TrainTopology(sp=2))
    engine = TrainsideRolloutEngine(pipeline, backend, forward_batch_size=4)
    params = family.sampling(num_inference_steps=3, samples_per_prompt=SAMPLES_PER_PROMPT)
    track = engine.generate(request_of(family, engine, params, 0)).root_track().replace(advantages=ADVANTAGES)
    segment = track.segment
    assert isinstance(segment, LatentSegment)
    if dist.get_rank() == 1:
        segment.latents[0, 0].add_(1e-3)
    algorithm = DiffusionGRPO(pipeline, backend, clip_range=1e-2, old_logp_source="rollout")
    stack = TrainStack(backend, {"image": algorithm}, micro_batch_size=4, max_grad_norm=1.0)
    try:
        stack.train(RolloutResp(tracks={"image": track}), progress=0.0)
    except ContractError as error:
        found["differ"] = str(error)
    three = UlyssesExchange(backend.collectives.group("sp"))
    three.size = 3
    bundle = kit.ours(name, folder / name).bundle
    try:
        bundle.spread_tokens(three)
    except ConfigError as error:
        found["heads"] = str(error)
    bundle.token_plan = None
    try:
        bundle.spread_tokens(backend.token_exchange)
    except ConfigError as error:
        found["plan"] = str(error)
    return found


def steps_of_rank(names: Sequence[str], case: str, folder: Path, out: Path) -> dict[str, Any]:
    """By family the step in float32; and where all ranks share samples, the calls of its transformers in float64."""
    topology, options = CASES[case].topology, dict(CASES[case].fsdp)
    found: dict[str, Any] = {
        "float32": {name: step_of(name, folder, topology, out / name, **options) for name in names}
    }
    if case == "sp2":
        found |= {"float64": {}, "attentions": {}, "bytes": {}}
        for name in names:
            exchange = NotingExchange(dist.group.WORLD)  # ty: ignore[invalid-argument-type]: there is one
            found["float64"][name] = doubles_of(name, folder, exchange)
            found["attentions"][name] = exchange.attentions
            found["bytes"][name] = (exchange.bytes_sent, exchange.expected_bytes)
        found |= refusals("sd3", folder)
    return found
