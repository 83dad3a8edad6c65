"""Environment variables of engine processes: number of threads on a CPU, otherwise which GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.types.device_kinds import kind_of, lacks
from unirl.types.errors import ConfigError

KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""For processes on a CPU: glibc keeps the memory that one push frees for the next. Mapping new memory takes several
times as long as the copy into it."""


def process_variables(is_cpu: bool, num_threads: int) -> dict[str, str]:
    """Variables of every process of an engine. num_threads: used on hosts without a GPU."""
    common = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
    return common | threads | KEEPS_MEMORY if is_cpu else common


def dealt_gpus(device: str, num_instances: int, num_devices: int, gpus: Sequence[int] | None) -> list[dict[str, str]]:
    """Variables that name the GPUs of each instance; none if a single instance takes all GPUs that this process sees.

    Raises ConfigError if the number of GPUs is not what the instances need, or if GPUs are named on a CPU.
    """
    kind = kind_of(device)
    if not kind.is_accelerator and gpus is not None:
        raise ConfigError(f"engine.gpus = {list(gpus)} does nothing on a CPU. Set it to null.")
    if not kind.is_accelerator or (gpus is None and num_instances == 1):
        return [{}] * num_instances
    if kind.visible is None:
        raise ConfigError(lacks(device, "variable that deals devices to engines", "Set engine.num_instances: 1."))
    needed = num_instances * num_devices
    if gpus is None or len(gpus) != needed:
        raise ConfigError(
            f"engine.num_instances * engine.num_devices = {num_instances} * {num_devices} = {needed} GPUs are needed, "
            f"engine.gpus = {None if gpus is None else list(gpus)}. Name as many GPUs of this host in engine.gpus, or "
            "change one of the others."
        )
    dealt = [gpus[first : first + num_devices] for first in range(0, needed, num_devices)]
    return [{kind.visible: ",".join(map(str, each))} for each in dealt]
