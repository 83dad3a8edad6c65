"""What the tests of recipes share."""

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from unirl.app.environment import register_resolvers
from unirl.config.catalog import available
from unirl.config.recipes import compose, resolve


@pytest.fixture(scope="session")
def composed_recipes(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> dict[str, Any]:
    """Every packaged recipe as it is composed; to be read alone.

    Composing them takes half a minute: the first process of a test session does so for all of them.
    """
    register_resolvers()
    own = tmp_path_factory.getbasetemp()
    folder: Path = own if worker_id == "master" else own.parent
    file = folder / "composed-recipes.json"
    with (folder / "composed-recipes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.is_file():
            made = {name: OmegaConf.to_container(compose(name), resolve=False) for name in available()}
            file.write_text(json.dumps(made))
    return {name: OmegaConf.create(recipe) for name, recipe in json.loads(file.read_text()).items()}


@pytest.fixture(scope="session")
def recipes(composed_recipes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every packaged recipe, resolved; to be read alone."""
    return {name: resolve(config) for name, config in composed_recipes.items()}
