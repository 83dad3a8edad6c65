"""From what was typed to a recipe: composed, settled for this machine, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.app.command_line import Command
from unirl.app.environment import (
    cluster_address,
    device_here,
    named_interpreters,
    register_resolvers,
    settle_on_cpu,
    this_machine,
    torch_devices,
)
from unirl.app.run_directory import CONFIG_FILE
from unirl.config.check import build_values, check_recipe, exported
from unirl.config.recipes import compose, resolve
from unirl.config.runs import ComposedRun
from unirl.config.trust import foreign_code
from unirl.models.causal_lm.progress import delay_loading_bars
from unirl.types.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


QUICK_LOAD_S = 3.0
"""A model that loads in less gets no progress bar."""


def composed(command: Command, recipe: str | None = None) -> DictConfig:
    """The composed recipe; of a run's folder, its own with `run_dir` set."""
    register_resolvers()
    name = command.recipe if recipe is None else recipe
    overrides: Sequence[str] = command.overrides
    folder = Path(name).expanduser()
    if folder.is_dir() and (folder / CONFIG_FILE).is_file():
        name = str(folder / CONFIG_FILE)
        overrides = [f"run_dir='{folder}'", *overrides]
    return compose(name, overrides)


def trusts(command: Command) -> bool:
    """True if the recipe's author is who gives the command: not of a run's folder, which may come from anyone."""
    return "trust" in command.options or not (Path(command.recipe).expanduser() / CONFIG_FILE).is_file()


def code_of_others(recipe: Mapping[str, Any]) -> list[str]:  # Any: a recipe's values
    """See `unirl.config.trust.foreign_code`: all that does not come with UniRL or from this environment."""
    return foreign_code(recipe, Path.cwd(), named_interpreters())


def settled(config: DictConfig) -> dict[str, Any]:  # Any: a recipe's values
    """The resolved recipe, with `device: auto` decided for this machine and `cluster.address: auto` by RAY_ADDRESS.

    The address is not kept with a run, which may continue on another cluster.
    """
    if config.get("device") == "auto":
        config.device = device_here()
    recipe = resolve(config)
    cluster, address = recipe.get("cluster"), cluster_address()
    if isinstance(cluster, dict) and cluster.get("address") == "auto" and address is not None:
        recipe["cluster"] = {**cluster, "address": address}
    return recipe


def checked(
    config: DictConfig, *, asks_teachers: bool = True, trusts: bool = True, is_exported: bool = False
) -> ComposedRun:
    """The run of a recipe, checked for itself and for this machine, its values built once. Imports torch.

    asks_teachers, is_exported: see `check_recipe`; of a run that is exported, what `exported` leaves of the recipe.
    trusts: whether code that does not come with UniRL may be imported and run; without, a recipe that names some is
        refused with ConfigError.
    """
    recipe = exported(settled(config)) if is_exported else settled(config)
    if not trusts and (named := code_of_others(recipe)):
        raise ConfigError(
            f"this run's config.yaml names code that does not come with UniRL: {'; '.join(named)}. Nothing of it was "
            "run. If it is yours, or you have read it, add --trust."
        )
    run = check_recipe(recipe, this_machine(), asks_teachers=asks_teachers, is_exported=is_exported)
    settle_on_cpu(run.device)
    if run.file.cluster.address in ("auto", "local"):
        torch_devices().require_device(run.device)
    delay_loading_bars(QUICK_LOAD_S)
    build_values(run)
    return run
