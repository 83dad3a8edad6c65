"""A tiny two-block network, its bundle, and training steps on fixed data: what the backend is tested on."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tested_backend import backend_class
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.ulysses import UlyssesExchange
from unirl.train.checkpoint import saved
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.configs import EMAConfig, FSDPConfig, LoraConfig, OptimizerConfig, TrainTopology
from unirl.train.export import Exporter
from unirl.types.errors import CheckpointError, ConfigError
from unirl.types.protocols.models import ExpertExchange, RecomputeContexts, TokenExchange
from unirl.types.training import StepStats

WIDTH = 8
NUM_ROWS = 8


class TinyBlock(nn.Module):
    """Stands for a transformer block: two linear layers with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(width, width)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] to the same shape."""
        return x + self.to_out(torch.tanh(self.to_q(x)))


class TinyModel(nn.Module):
    """Stands for a diffusion transformer: its own layers around two blocks, and a scalar a row."""

    def __init__(self, width: int = WIDTH, num_blocks: int = 2) -> None:
        super().__init__()
        self.proj_in = nn.Linear(width, width)
        self.blocks = nn.ModuleList([TinyBlock(width) for _ in range(num_blocks)])
        self.proj_out = nn.Linear(width, width)
        self.position: Tensor
        self.register_buffer("position", torch.linspace(0.0, 1.0, width))
        self.seen_timestep_dtype: torch.dtype | None = None

    def forward(self, x: Tensor, timestep_B: Tensor | None = None) -> Tensor:
        """[B, width] to the same shape."""
        if timestep_B is not None:
            self.seen_timestep_dtype = timestep_B.dtype
        x = self.proj_in(x + self.position.to(x.dtype))
        for block in self.blocks:
            x = block(x)
        return self.proj_out(x)


class TinyBundle:
    """Stands for a model bundle with one trainable component, or several."""

    def __init__(self, *, seed: int = 0, width: int = WIDTH, num_components: int = 1, num_blocks: int = 2) -> None:
        torch.manual_seed(seed)
        names = ["transformer", "transformer_2"][:num_components]
        self.models = {name: TinyModel(width, num_blocks) for name in names}
        self.block_class_names: tuple[str, ...] = ("TinyBlock",)
        self.lora_target_modules: tuple[str, ...] = ("to_q", "to_out")

    @property
    def model(self) -> TinyModel:
        """The first component."""
        return self.models["transformer"]

    def trainable_modules(self) -> dict[str, nn.Module]:
        """All components."""
        return dict(self.models)

    def export_lora(
        self,
        folder: str,
        lora_state: Mapping[str, Mapping[str, Tensor]],
        *,
        rank: int,
        alpha: float,
        target_modules: Sequence[str],
    ) -> None:
        """One safetensors file a component."""
        metadata = {"rank": str(rank), "alpha": str(alpha), "targets": ",".join(target_modules)}
        self._write(folder, lora_state, metadata)

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """One safetensors file a component."""
        self._write(folder, state, {})

    def _write(self, folder: str, state: Mapping[str, Mapping[str, Tensor]], metadata: dict[str, str]) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for component, tensors in state.items():
            save_file(
                {k: v.contiguous() for k, v in tensors.items()}, Path(folder) / f"{component}.safetensors", metadata
            )


class DictTensor:
    """Stands for a tensor in a file: a part of a tensor in memory."""

    def __init__(self, value: Tensor, problem: Exception | None = None) -> None:
        self._value = value
        self._problem = problem

    def read(self, box: tuple[slice, ...]) -> Tensor:
        """The part, or the problem."""
        if self._problem is not None:
            raise self._problem
        return self._value[box]


class DeferringBundle(TinyBundle):
    """Stands for a bundle that leaves its weights, those of a `TinyBundle` of the same arguments, to the backend.

    problem: what reading `proj_out.weight` raises.
    """

    def __init__(self, *, problem: Exception | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.defers_weights = True
        self._stored = {
            component: {
                name: DictTensor(value, problem if name == "proj_out.weight" else None)
                for name, value in model.state_dict().items()
            }
            for component, model in self.models.items()
        }
        for model in self.models.values():
            model.to("meta")

    def stored_weights(self) -> dict[str, dict[str, DictTensor]]:
        """All tensors."""
        return self._stored


def make_backend(bundle: TinyBundle | None = None, *, lr: float = 1e-2, **options: object) -> FSDPBackend:
    """A backend on a tiny bundle."""
    make = backend_class()
    return make(bundle or TinyBundle(), **{"optimizer": OptimizerConfig(learning_rate=lr), **options})  # ty: ignore


def lora_config() -> LoraConfig:
    """Rank 2 on all targets of the bundle."""
    return LoraConfig(rank=2, alpha=4.0)


def rows(step: int, num_rows: int = NUM_ROWS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step, [num_rows, width] each, the same in every process."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(num_rows, width, generator=generator), torch.randn(num_rows, width, generator=generator)


def run_backward(backend: FSDPBackend, model: nn.Module, step: int, *, num_micros: int = 2) -> None:
    """Backward of the mean squared error over this rank's share of the rows, in micro-batches."""
    backend.zero_grad()
    x, y = rows(step)
    own_x, own_y = x.chunk(backend.dp_size)[backend.dp_rank], y.chunk(backend.dp_size)[backend.dp_rank]
    scale = backend.dp_size / y.numel()
    pairs = list(zip(own_x.chunk(num_micros), own_y.chunk(num_micros), strict=True))
    for index, (micro_x, micro_y) in enumerate(pairs):
        with backend.accumulating(index == len(pairs) - 1):
            ((model(micro_x).float() - micro_y).square().sum() * scale).backward()


def train_step(backend: FSDPBackend, model: nn.Module, step: int, *, num_micros: int = 2) -> StepStats:
    """One optimizer step on `rows(step)`."""
    run_backward(backend, model, step, num_micros=num_micros)
    return backend.optimizer_step(1.0)


def whole(tensor: Tensor) -> Tensor:
    """A copy of the unsharded tensor."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def snapshot(backend: FSDPBackend) -> dict[str, Tensor]:
    """Copies of the whole state, unsharded."""
    return {name: whole(tensor) for name, tensor in backend.state_dict().items()}


# Two processes: scenarios that a spawned rank runs ---------------------------------------------------------------

TOPOLOGIES = {
    "sharded": TrainTopology(),
    "replicated": TrainTopology(dp_replicate=2),
    "one_by_two": TrainTopology(dp_replicate=1, dp_shard=2),
}


def gradients_and_state(**options: Any) -> dict[str, Any]:
    """First gradients, norms and the state after three steps."""
    # Ranks start from rank 0's trainable weights; a frozen base is the same on all.
    rank = dist.get_rank() if dist.is_initialized() else 0
    bundle = options.pop("bundle", TinyBundle)(seed=0 if "lora" in options else rank)
    torch.manual_seed(rank)
    backend = make_backend(bundle, ema=EMAConfig(decay=0.5, warmup=False), **options)
    backend.keep_policy("old")
    run_backward(backend, bundle.model, 0)
    gradients = {name: whole(p.grad) for name, p in backend.parameters.items() if p.grad is not None}
    norms = [train_step(backend, bundle.model, step).grad_norm for step in range(3)]
    return {"gradients": gradients, "norms": norms, "state": snapshot(backend), "is_sharded": backend.is_sharded}


def _steps_of_topologies(folder: Path) -> dict[str, Any]:
    found = {name: gradients_and_state(topology=topology) for name, topology in TOPOLOGIES.items()}
    found["lora"] = gradients_and_state(lora=lora_config())
    found["kept_gathered"] = gradients_and_state(fsdp=FSDPConfig(reshard_after_forward=False))
    with patch("unirl.train.backend.fsdp.check_offload"):  # which a CPU refuses
        found["hosted"] = gradients_and_state(optimizer=OptimizerConfig(learning_rate=1e-2, offload=True))
    return found


def _wrong_topology(folder: Path) -> str:
    try:
        make_backend(topology=TrainTopology(dp_replicate=2, dp_shard=2))
    except ConfigError as error:
        return str(error)
    return "accepted"


def _unspread(folder: Path) -> dict[str, str]:
    found = {}
    compiled = FSDPConfig(compile=True)
    for name, bundle, topology, fsdp in (
        ("bundle", TinyBundle(), TrainTopology(sp=2), FSDPConfig()),
        ("compile", SpreadBundle(), TrainTopology(sp=2), compiled),
        ("experts", TinyBundle(), TrainTopology(ep=2), FSDPConfig()),
        ("compiled experts", SpreadBundle(), TrainTopology(ep=2), compiled),
    ):
        try:
            make_backend(bundle, topology=topology, fsdp=fsdp)
        except ConfigError as error:
            found[name] = str(error)
    return found


class SpreadBundle(TinyBundle):
    """Stands for a model whose tokens are spread; here each rank has them all."""

    def spread_tokens(self, exchange: TokenExchange) -> RecomputeContexts:
        """Changes nothing."""
        return lambda: (nullcontext(), nullcontext())

    def spread_experts(self, exchange: ExpertExchange) -> list[nn.Module]:
        """There are none."""
        return []


def _shared_samples(folder: Path) -> dict[str, Any]:
    """Steps of two ranks with the same samples, and a module with the policy."""
    found = gradients_and_state(topology=TrainTopology(sp=2), bundle=SpreadBundle)
    bundle = SpreadBundle()
    backend = make_backend(bundle, topology=TrainTopology(sp=2))
    torch.manual_seed(dist.get_rank())
    module = nn.Linear(WIDTH, 1)
    backend.add_module("critic", module, OptimizerConfig(learning_rate=1e-2))
    run_backward(backend, bundle.model, 0)
    module(rows(0)[0]).sum().backward()
    gradients = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    backend.optimizer_step(1.0)
    sums = {axis: float(backend.collectives.all_reduce_sum(torch.ones(()), axis)) for axis in ("dp", "sp", "all")}
    place = (backend.dp_rank, backend.dp_size, backend.mesh_place.sp_rank, backend.mesh_place.sp_size)
    after = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return {
        **found,
        "sums": sums,
        "place": place,
        "module": [parameter.detach() for parameter in module.parameters()],
        "keeps_gradients": all(torch.equal(a, b) for a, b in zip(gradients, after, strict=True)),
    }


HEADS, TOKENS, HEAD_WIDTH = 4, 5, 3


def attention_of_all(x_BHTD: Tensor) -> Tensor:
    """Attention of tokens among themselves, instead of a transformer's."""
    return torch.nn.functional.scaled_dot_product_attention(x_BHTD, x_BHTD.tanh(), x_BHTD.cos())


def tokens_and_weights() -> tuple[Tensor, Tensor]:
    """[B, H, T, D] each, float64, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    both = torch.randn((2, 2, HEADS, TOKENS, HEAD_WIDTH), dtype=torch.float64, generator=generator)
    return both[0], both[1]


def _exchange(folder: Path) -> dict[str, Any]:
    whole, weights = tokens_and_weights()
    assert dist.group.WORLD is not None
    exchange = UlyssesExchange(dist.group.WORLD)
    lengths, heads = exchange.lengths(TOKENS), HEADS // exchange.size
    own = exchange.own(whole, -2)
    of_heads = exchange.to_heads(own, lengths)
    found: dict[str, Any] = {
        "lengths": lengths,
        "heads": torch.equal(of_heads, whole[:, exchange.rank * heads : (exchange.rank + 1) * heads]),
        "tokens": torch.equal(exchange.to_tokens(of_heads, lengths), own),
        "whole": torch.equal(exchange.gathered(own, -2, lengths), whole),
    }
    whole.requires_grad_(True)
    sent = [exchange.bytes_sent]
    part = attention_of_all(exchange.to_heads(exchange.own(whole, -2), lengths))
    sent.append(exchange.bytes_sent)
    result = exchange.gathered(exchange.to_tokens(part, lengths), -2, lengths)
    sent.append(exchange.bytes_sent)
    (result * weights).sum().backward()
    sent.append(exchange.bytes_sent)
    assert whole.grad is not None
    dist.all_reduce(whole.grad)
    found["bytes"] = [after - before for before, after in zip(sent, sent[1:], strict=False)]
    return {**found, "result": result.detach(), "gradient": whole.grad / exchange.size}


def _policies(folder: Path) -> dict[str, Any]:
    bundle = TinyBundle()
    backend = make_backend(bundle)
    x, _ = rows(0)
    with torch.no_grad():
        start = bundle.model(x)
        backend.keep_policy("old")
        torch.set_grad_enabled(True)
        train_step(backend, bundle.model, 0)
        torch.set_grad_enabled(False)
        now = bundle.model(x)
        with backend.using_policy("old"):
            old = bundle.model(x)
        again = bundle.model(x)
    exporter = Exporter(backend, bundle)
    exporter.export_merged(str(folder / "merged"))
    exporter.export_merged(str(folder / "whole"), in_float32=True)
    return {
        "old_is_start": torch.equal(old, start),
        "comes_back": torch.equal(again, now),
        "moved": not torch.equal(now, start),
        "sum": float(backend.collectives.all_reduce_sum(torch.tensor(1.0 + backend.dp_rank), "dp")),
        "max": float(backend.collectives.all_reduce_max(torch.tensor(1.0 + backend.dp_rank), "all")),
        "now": now,
    }


def _one_poisoned_rank(folder: Path) -> list[Any]:
    bundle = TinyBundle()
    backend = make_backend(bundle)
    run_backward(backend, bundle.model, 0)
    gradient = next(iter(backend.parameters.values())).grad
    if backend.dp_rank == 1 and isinstance(gradient, DTensor):
        gradient.to_local().fill_(float("inf"))
    return [backend.optimizer_step(1.0).is_skipped, backend.progress.num_skipped_steps]


def _resumed(folder: Path, is_async: bool) -> dict[str, Any]:
    path = str(folder / f"checkpoints-{is_async}")
    bundle = TinyBundle()
    backend = make_backend(bundle, ema=EMAConfig())
    backend.keep_policy("old")
    torch.manual_seed(backend.dp_rank)
    for step in range(2):
        train_step(backend, bundle.model, step)
    checkpointer = Checkpointer(backend, path, is_async=is_async)
    checkpointer.save(2, {"next": 2})
    drawn = torch.rand(3)
    for step in range(2, 4):
        train_step(backend, bundle.model, step)
    checkpointer.wait()
    expected = snapshot(backend)

    bundle = TinyBundle(seed=5)
    resumed = make_backend(bundle, ema=EMAConfig())
    state = Checkpointer(resumed, path).load()
    drawn_again = torch.rand(3)
    for step in range(2, 4):
        train_step(resumed, bundle.model, step)
    found = snapshot(resumed)
    return {
        "driver_state": state,
        "same_draws": torch.equal(drawn, drawn_again),
        "different": [name for name in expected if not torch.equal(expected[name], found[name])],
        "expected": expected,
    }


def _one_full_disk(folder: Path) -> dict[str, Any]:
    backend = make_backend()
    checkpointer = Checkpointer(backend, str(folder / "full"))
    checkpointer.save(1, {"step": 1})

    def no_space(path: Path, state: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    message = "saved"
    with pytest.MonkeyPatch.context() as patched:
        if backend.dp_rank == 1:
            patched.setattr(saved, "write_rng_state", no_space)
        try:
            checkpointer.save(2, {"step": 2})
        except CheckpointError as error:
            message = str(error)
    dist.barrier()
    return {
        "message": message,
        "folders": sorted(path.name for path in (folder / "full").iterdir()),
        "loaded": checkpointer.load(),
    }


def _read_in_shards(folder: Path) -> list[str]:
    different = []
    for name, topology in TOPOLOGIES.items():
        for lora in (None, lora_config()):
            snapshots = []
            for make in (TinyBundle, DeferringBundle):
                torch.manual_seed(dist.get_rank())
                bundle = make(num_blocks=3, width=9, seed=1)  # 9 rows do not divide
                snapshots.append(snapshot(make_backend(bundle, topology=topology, lora=lora)))
                snapshots[-1] |= {key: whole(value) for key, value in bundle.model.state_dict().items()}
            one, other = snapshots
            different += [f"{name} {key}" for key in one if not torch.equal(one[key], other[key])]
    return different


def _one_unreadable_shard(folder: Path) -> dict[str, str]:
    found = {}
    for name, ranks in (("one", (1,)), ("all", (0, 1))):
        problem = CheckpointError("the file is cut off") if dist.get_rank() in ranks else None
        try:
            make_backend(DeferringBundle(problem=problem))
            found[name] = "built"
        except CheckpointError as error:
            found[name] = str(error)
    return found


SCENARIOS: dict[str, Callable[[Path], Any]] = {
    "topologies": _steps_of_topologies,
    "wrong_topology": _wrong_topology,
    "unspread": _unspread,
    "shared_samples": _shared_samples,
    "exchange": _exchange,
    "policies": _policies,
    "poisoned": _one_poisoned_rank,
    "resumed": lambda folder: _resumed(folder, False),
    "resumed_async": lambda folder: _resumed(folder, True),
    "full_disk": _one_full_disk,
    "read_in_shards": _read_in_shards,
    "unreadable": _one_unreadable_shard,
}


def run_scenarios(folder: Path) -> dict[str, Any]:
    """Results of all scenarios on this rank."""
    return {name: scenario(folder) for name, scenario in SCENARIOS.items()}
