"""What an engine in a process of its own needs of this machine. See `unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unirl.types.recipe import Machine, Messages, Part, Run


def environment_exists(own: Part, run: Run, machine: Machine) -> Messages:
    """An engine that runs in an environment of its own has it."""
    python = own.node.get("python")
    if python is not None and not Path(str(python)).is_file():
        yield (
            f"{own.at}.python = {python}: no such interpreter. Make the engine's environment by `uv sync --project "
            f"{own.ability('environment')}` in a clone, or name the interpreter of the environment that has it."
        )


def gpus_suffice(keyword: str) -> Callable[[Part, Run], Messages]:
    """The GPUs that the engine is given are as many as its instances need, each as many as `keyword` says; an engine
    that runs already (`url`) has its own."""

    def rule(own: Part, run: Run) -> Messages:
        if own.get("url") is not None:
            return
        gpus, (needed, what) = own.get("gpus"), _needed(own, keyword)
        if gpus is not None and run.device == "cpu":
            yield f"{own.at}.gpus = {list(gpus)} does nothing with device: cpu. Set it to null."
        elif gpus is not None and len(gpus) != needed:
            yield (
                f"{what} needs {needed} GPU{'' if needed == 1 else 's'}, {own.at}.gpus = {list(gpus)} names "
                f"{len(gpus)}. Change one of them."
            )
        elif gpus is None and needed > 1 and run.device == "cuda":
            if run.runtime == "ray":
                yield (
                    f"{what}, but a worker of runtime: ray sees one GPU. Name {needed} GPUs of its host in "
                    f"{own.at}.gpus, which nothing else uses."
                )
            elif own.get("num_instances", 1) > 1:
                yield f"{what}: name the {needed} GPUs of this host that they are dealt in {own.at}.gpus."

    return rule


def gpus_are_here(keyword: str) -> Callable[[Part, Run, Machine], Messages]:
    """This machine has the GPUs that an engine's instances need, each as many as `keyword` says."""

    def rule(own: Part, run: Run, machine: Machine) -> Messages:
        needed, what = _needed(own, keyword)
        if run.device == "cuda" and own.get("url") is None and needed > max(1, machine.num_gpus):
            here = f"{machine.num_gpus} GPU{'' if machine.num_gpus == 1 else 's'}"
            yield f"{what}, but this machine has {here}. Lower it."

    return rule


def _needed(own: Part, keyword: str) -> tuple[int, str]:
    """GPUs of all instances, and what of the recipe says so."""
    size, num = own.get(keyword, 1), own.get("num_instances", 1)
    if num == 1:
        return size, f"{own.at}.{keyword} = {size}"
    return num * size, f"{own.at}.num_instances * {own.at}.{keyword} = {num} * {size} = {num * size}"


RULES = ()
MACHINE_RULES = (environment_exists,)
