"""From what was typed to a recipe: composed, settled for this machine, checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.app.command_line import Command
from unirl.app.environment import cluster_address, register_resolvers, settle_on_cpu, this_machine
from unirl.app.run_directory import CONFIG_FILE
from unirl.config.check import build_values, check_recipe
from unirl.config.recipes import compose, resolve
from unirl.models.causal_lm.progress import delay_loading_bars

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


def settled(config: DictConfig) -> dict[str, Any]:  # Any: a recipe's values
    """The resolved recipe, with `device: auto` decided for this machine and `cluster.address: auto` by RAY_ADDRESS.

    The address is not kept with a run, which may continue on another cluster.
    """
    if config.get("device") == "auto":
        config.device = "cuda" if this_machine().num_gpus > 0 else "cpu"
    recipe = resolve(config)
    cluster, address = recipe.get("cluster"), cluster_address()
    if isinstance(cluster, dict) and cluster.get("address") == "auto" and address is not None:
        recipe["cluster"] = {**cluster, "address": address}
    return recipe


def checked(config: DictConfig, *, asks_teachers: bool = True) -> dict[str, Any]:  # Any: a recipe's values
    """The resolved recipe, checked for itself and for this machine, its values built once. Imports torch.

    asks_teachers: see `check_recipe`.
    """
    recipe = settled(config)
    check_recipe(recipe, this_machine(), asks_teachers=asks_teachers)
    settle_on_cpu(recipe["device"])
    delay_loading_bars(QUICK_LOAD_S)
    build_values(recipe)
    return recipe
