"""A tiny two-block network, its bundle, and training steps on fixed data: what the backend is tested on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unirl.train.backend.fsdp import FSDPBackend, StepStats
from unirl.train.configs import LoraConfig, OptimizerConfig

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
    """Stands for a diffusion transformer: layers of its own around two blocks, and a scalar a row."""

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


def make_backend(bundle: TinyBundle | None = None, *, lr: float = 1e-2, **options: object) -> FSDPBackend:
    """A backend on a tiny bundle."""
    return FSDPBackend(bundle or TinyBundle(), optimizer=OptimizerConfig(learning_rate=lr), **options)  # ty: ignore


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
