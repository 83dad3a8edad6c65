"""Small recipes on the shipped shapes world."""

import logging
import sys
from pathlib import Path

import pytest
import torch

from unirl.app.environment import register_resolvers
from unirl.config.recipes import compose, resolve

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT), str(ROOT / "packages" / "unirl-train" / "tests")]
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def recipe():
    """recipe(name, *overrides) -> a small resolved recipe."""
    from small import SMALL  # this folder is on the path by now

    register_resolvers()

    def make(name, *overrides):
        return resolve(compose(name, [*SMALL, *overrides]))

    return make


@pytest.fixture
def own_process(monkeypatch):
    """The command sets up logging and threads for its process."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TQDM_DISABLE"):
        monkeypatch.setenv(name, "1")
    root, ours = logging.getLogger(), logging.getLogger("unirl")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
