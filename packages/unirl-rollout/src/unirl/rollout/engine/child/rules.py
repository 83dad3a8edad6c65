"""Rules of engines in separate processes about the recipe and this machine. See `unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from unirl.types.device_kinds import kind_of, lacks
from unirl.types.recipe import Machine, Messages, Part, Run


def environment_exists(own: Part, run: Run, machine: Machine) -> Messages:
    """The separate environment that an engine needs exists."""
    python = own.node.get("python")
    if python is not None and not Path(str(python)).is_file():
        yield (
            f"{own.at}.python = {python}: no such interpreter. Make the engine's environment by `uv sync --project "
            f"{own.ability('environment')}` in a clone, or name the interpreter of the environment that has it."
        )


def gpus_suffice(own: Part, run: Run) -> Messages:
    """The engine has as many GPUs as its instances need. A running engine (`url`) has its own."""
    if own.get("url") is not None:
        return
    gpus, (needed, what) = own.get("gpus"), _needed(own)
    if gpus is not None and run.device == "cpu":
        yield f"{own.at}.gpus = {list(gpus)} does nothing with device: cpu. Set it to null."
    elif gpus is not None and len(gpus) != needed:
        yield (
            f"{what} needs {needed} GPU{'' if needed == 1 else 's'}, {own.at}.gpus = {list(gpus)} names "
            f"{len(gpus)}. Change one of them."
        )
    elif gpus is None and needed > 1 and kind_of(run.device).is_accelerator:
        if run.runtime == "ray":
            yield (
                f"{what}, but a worker of runtime: ray sees one GPU. Name {needed} GPUs of its host in "
                f"{own.at}.gpus, which nothing else uses."
            )
        elif own.get("num_instances", 1) > 1:
            yield f"{what}: name the {needed} GPUs of this host that they are dealt in {own.at}.gpus."


def the_device_has_engines(own: Part, run: Run) -> Messages:
    """Engines in separate processes run on the device. A running engine (`url`) has separate devices."""
    if own.get("url") is None and not kind_of(run.device).has_engines:
        yield lacks(
            run.device,
            f"{own.name}, which {own.at} names",
            "Name an engine that samples where it trains (unirl.rollout.engine.trainside), or set device: cpu.",
        )


def sleep_is_served(own: Part, run: Run) -> Messages:
    """The engine supports the sleep level of the recipe."""
    level, levels = own.get("sleep_level", 0), own.ability("sleep_levels")
    if level and level not in levels:
        yield sleeps_otherwise(own.at, level, levels, own.name)


def sleeps_otherwise(at: str, level: int, levels: Collection[int], name: str) -> str:
    """Why an engine cannot sleep at a level, and what to do."""
    return f"{at}.sleep_level = {level} must be one of {', '.join(map(str, sorted({0, *levels})))} for {name}."


def gpus_are_here(own: Part, run: Run, machine: Machine) -> Messages:
    """This machine has the GPUs that the engine's instances need."""
    needed, what = _needed(own)
    if kind_of(run.device).is_accelerator and own.get("url") is None and needed > max(1, machine.num_gpus):
        here = f"{machine.num_gpus} GPU{'' if machine.num_gpus == 1 else 's'}"
        yield f"{what}, but this machine has {here}. Lower it."


def _needed(own: Part) -> tuple[int, str]:
    """Number of GPUs of all instances, and the part of the recipe that sets it."""
    size, num = own.get("num_devices", 1), own.get("num_instances", 1)
    if num == 1:
        return size, f"{own.at}.num_devices = {size}"
    return num * size, f"{own.at}.num_instances * {own.at}.num_devices = {num} * {size} = {num * size}"


RULES = (the_device_has_engines, gpus_suffice, sleep_is_served)
MACHINE_RULES = (environment_exists, gpus_are_here)
