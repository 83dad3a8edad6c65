"""The keywords that all engines in processes of their own share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from unirl.rollout.engine.child.devices import dealt_gpus
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.sampling import Precision


@bounded("engine")
@dataclass(frozen=True, kw_only=True)
class EngineProcesses:
    """What the processes of an engine are started with, and on which devices."""

    model: str
    """Folder or hub id of the weights that they start with, which must be the policy's."""
    device: str = "cpu"
    rank: int = 0
    """Of the worker that starts them."""
    python: str | None = None
    """Interpreter of the environment that has the engine; None is the running one. Without a GPU, make one with
    `uv sync --project environments/NAME` and name `environments/NAME/.venv/bin/python`."""
    dtype: Precision = "bf16"
    """Of the model that samples; pushes must bring it."""
    num_instances: PositiveInt = 1
    """Each has the whole model. Calls go to the one that is free first; one that dies is replaced."""
    num_devices: PositiveInt = 1
    """Of each instance, over which its model is split."""
    gpus: Sequence[int] | None = None
    """Those of this host, dealt to the instances in this order; None: one instance takes what this process sees."""
    num_threads: PositiveInt = 1
    """CPU threads of each process on a host without a GPU."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More environment variables of the processes."""
    engine_args: Mapping[str, Any] | None = None  # Any: values of the engine's own options
    """More options of the engine itself."""
    max_lora_rank: PositiveInt | None = None
    """For policies that are pushed as LoRA adapters; None for full weights."""
    sleep_level: Literal[0, 1, 2] = 0
    """What `sleep` frees on a GPU: 0 nothing, 1 moves the weights to host memory, 2 drops them until the next push."""
    transfer_dir: str = "/dev/shm"
    """Folder of what crosses to the processes; memory-backed by default. A push takes the model's size there."""
    start_timeout_s: Positive = 900.0
    """For loading the model."""
    timeout_s: Positive = 1800.0
    """For any one call."""

    @property
    def is_cpu(self) -> bool:
        """Whether the engine samples without a GPU."""
        return self.device == "cpu"

    @property
    def options(self) -> dict[str, Any]:  # Any: see engine_args
        """`engine_args`, empty where there are none."""
        return dict(self.engine_args or {})

    def variables(self, common: Mapping[str, str]) -> list[dict[str, str]]:
        """Environment variables of each instance: `common`, those that name its GPUs, and `env`."""
        dealt = dealt_gpus(self.is_cpu, self.num_instances, self.num_devices, self.gpus)
        return [{**common, **own, **self.env} for own in dealt]
