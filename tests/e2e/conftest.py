"""Small recipes on the shipped shapes world, one Ray for the session."""

import logging
import os
import sys
from pathlib import Path

import pytest
import torch

from unirl.app.environment import register_resolvers
from unirl.config.recipes import compose, resolve

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_of_two_cores():
    """A local Ray with two cores, shared by the session."""
    ray = pytest.importorskip("ray")
    if ray.is_initialized():
        yield ray
        return
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def recipe():
    """recipe(name, *overrides) -> a small resolved recipe."""
    from small import SMALL  # this folder is on the path by now

    register_resolvers()

    def make(name, *overrides):
        return resolve(compose(f"diffusion/{name}", [*SMALL, *overrides]))

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
