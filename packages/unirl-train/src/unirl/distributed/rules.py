"""Rules about the workers of a run: one device for a local run, and enough devices."""

from __future__ import annotations

from unirl.config.runs import ComposedRun
from unirl.types.device_kinds import kind_of, lacks, only_one
from unirl.types.recipe import Machine, Messages, Run


def local_runtime_has_one_device(run: Run) -> Messages:
    """One process drives one device."""
    if run.runtime == "local" and run.num_devices > 1 and kind_of(run.device).has_many:
        yield f"runtime: local uses one device, num_devices = {run.num_devices}. Set runtime: ray."


def devices_exist(run: ComposedRun, machine: Machine) -> Messages:
    """This machine has the devices that the recipe uses, unless it joins a cluster."""
    cluster = run.file.cluster
    if cluster.address not in ("auto", "local"):
        return
    kind = kind_of(run.device)
    if kind.is_accelerator and run.num_devices > machine.num_gpus:
        name = kind.ray_resource or "device"
        yield (
            f"num_devices = {run.num_devices} with device: {run.device}, but this machine has {machine.num_gpus} "
            f"{name}{'' if machine.num_gpus == 1 else 's'}. Lower num_devices, set device: cpu, or join a cluster "
            "(cluster.address)."
        )
    cores = run.num_devices * cluster.cpus_per_device
    if run.device == "cpu" and run.runtime == "ray" and cores > machine.num_cpus:
        yield (
            f"num_devices = {run.num_devices} with device: cpu needs {cores:g} cores, but this machine has "
            f"{machine.num_cpus}. Lower num_devices or cluster.cpus_per_device, or join a cluster (cluster.address)."
        )


def workers_fit_the_device(run: ComposedRun) -> Messages:
    """Workers need a device whose tensors take part in collectives, and which Ray can reserve."""
    if not kind_of(run.device).has_many and run.num_devices > 1:
        yield only_one(run.device, run.num_devices)
    elif not kind_of(run.device).has_many and run.runtime == "ray":
        yield lacks(run.device, "Ray resource", "Set runtime: local, or another device.")


def nodes_need_ray(run: ComposedRun) -> Messages:
    """A local run uses one node."""
    num_nodes = run.file.cluster.num_nodes
    if run.runtime == "local" and num_nodes is not None and num_nodes > 1:
        yield f"cluster.num_nodes = {num_nodes} needs runtime: ray. Set it, or remove cluster.num_nodes."


def transport_needs_workers(run: ComposedRun) -> Messages:
    """A transport of samples needs worker processes, and its options need the transport that reads them."""
    cluster = run.file.cluster
    if run.runtime == "local" and cluster.transport != "ray":
        yield (
            f"cluster.transport = {cluster.transport} does nothing with runtime: local. Set runtime: ray, or remove it."
        )
    if cluster.transfer_queue and cluster.transport != "transfer_queue":
        yield (
            f"cluster.transfer_queue does nothing with cluster.transport = {cluster.transport}. Set transfer_queue, or "
            "remove it."
        )


RULES = (transport_needs_workers, workers_fit_the_device, local_runtime_has_one_device, nodes_need_ray)
MACHINE_RULES = (devices_exist,)
