"""What the workers of a run need: one device per process of a local run, and devices that exist."""

from __future__ import annotations

from unirl.types.recipe import Machine, Messages, Run


def local_runtime_has_one_device(run: Run) -> Messages:
    """One process drives one device."""
    if run.runtime == "local" and run.num_devices > 1:
        yield f"runtime: local uses one device, num_devices = {run.num_devices}. Set runtime: ray."


def devices_exist(run: Run, machine: Machine) -> Messages:
    """As many devices as the recipe uses (on this machine; a cluster may have more)."""
    if run.device == "cuda" and run.num_devices > machine.num_gpus:
        yield (
            f"num_devices = {run.num_devices} with device: cuda, but this machine has {machine.num_gpus} "
            f"GPU{'' if machine.num_gpus == 1 else 's'}. Lower num_devices, or set device: cpu."
        )
    if run.device == "cpu" and run.runtime == "ray" and run.num_devices > machine.num_cpus:
        yield (
            f"num_devices = {run.num_devices} with device: cpu, but this machine has {machine.num_cpus} cores. "
            "Lower num_devices."
        )


RULES = (local_runtime_has_one_device,)
MACHINE_RULES = (devices_exist,)
