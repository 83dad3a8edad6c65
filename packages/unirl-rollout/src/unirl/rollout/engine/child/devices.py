"""Environment variables of engine processes: threads on a CPU, which GPUs elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.types.errors import ConfigError

KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Of a process on a CPU: glibc keeps what a push has freed for the next one; memory that is new takes several times as
long as the copy into it."""


def process_variables(is_cpu: bool, num_threads: int) -> dict[str, str]:
    """What every process of an engine gets. num_threads: on a host without a GPU."""
    common = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
    return common | threads | KEEPS_MEMORY if is_cpu else common


def dealt_gpus(is_cpu: bool, num_instances: int, num_devices: int, gpus: Sequence[int] | None) -> list[dict[str, str]]:
    """Variables that name the GPUs of each instance; none where one takes all that this process sees.

    Raises ConfigError for another number of GPUs than the instances need, and for GPUs on a CPU.
    """
    if is_cpu and gpus is not None:
        raise ConfigError(f"engine.gpus = {list(gpus)} does nothing on a CPU. Set it to null.")
    if is_cpu or (gpus is None and num_instances == 1):
        return [{}] * num_instances
    needed = num_instances * num_devices
    if gpus is None or len(gpus) != needed:
        raise ConfigError(
            f"engine.num_instances * engine.num_devices = {num_instances} * {num_devices} = {needed} GPUs are needed, "
            f"engine.gpus = {None if gpus is None else list(gpus)}. Name as many GPUs of this host in engine.gpus, or "
            "change one of the others."
        )
    dealt = [gpus[first : first + num_devices] for first in range(0, needed, num_devices)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(map(str, each))} for each in dealt]
