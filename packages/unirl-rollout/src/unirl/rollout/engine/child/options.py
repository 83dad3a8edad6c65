"""Keywords shared by all engines that run in separate processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from unirl.rollout.engine.child.devices import dealt_gpus
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.device_kinds import kind_of
from unirl.types.sampling import Precision


@bounded("engine")
@dataclass(frozen=True, kw_only=True)
class EngineProcesses:
    """How the processes of an engine are started, and on which devices."""

    model: str
    """Folder or hub id of the initial weights, which must be the policy's."""
    device: str = "cpu"
    rank: int = 0
    """Rank of the worker that starts the processes."""
    python: str | None = None
    """Interpreter of the environment that has the engine; None is the running interpreter. Without a GPU, make one with
    `uv sync --project environments/NAME` and name `environments/NAME/.venv/bin/python`."""
    dtype: Precision = "bf16"
    """Dtype of the sampling model; pushed tensors must have it."""
    num_instances: PositiveInt = 1
    """Number of processes, each with the whole model. Calls go to the first free one; a process that dies is
    replaced."""
    num_devices: PositiveInt = 1
    """GPUs per instance, over which its model is split."""
    gpus: Sequence[int] | None = None
    """GPU indices of this host, assigned to the instances in this order. None: a single instance takes what this
    process sees."""
    num_threads: PositiveInt = 1
    """CPU threads of each process on a host without a GPU."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of the processes."""
    engine_args: Mapping[str, Any] | None = None  # Any: values of the engine's own options
    """Additional options of the engine's own constructor."""
    max_lora_rank: PositiveInt | None = None
    """Largest rank of pushed LoRA adapters; None if full weights are pushed."""
    sleep_level: Literal[0, 1, 2] = 0
    """What `sleep` does on a GPU: 0 nothing, 1 moves the weights to host memory, 2 drops them until the next push."""
    transfer_dir: str = "/dev/shm"
    """Folder of the files exchanged with the processes, in memory by default. A push needs as much space there as the
    model."""
    start_timeout_s: Positive = 900.0
    """Time limit for loading the model."""
    timeout_s: Positive = 1800.0
    """Time limit of one call."""

    @property
    def is_cpu(self) -> bool:
        """True if the engine samples without a GPU."""
        return not kind_of(self.device).is_accelerator

    @property
    def options(self) -> dict[str, Any]:  # Any: see engine_args
        """`engine_args`, or an empty dict."""
        return dict(self.engine_args or {})

    def variables(self, common: Mapping[str, str]) -> list[dict[str, str]]:
        """Environment variables of each instance: `common`, those that name its GPUs, and `env`."""
        dealt = dealt_gpus(self.device, self.num_instances, self.num_devices, self.gpus)
        return [{**common, **own, **self.env} for own in dealt]
