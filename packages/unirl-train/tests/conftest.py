"""One Ray for the whole test session, and the fakes that worker processes import."""

import os
import sys
from pathlib import Path

import pytest
import torch

# Before anything imports ray: under `uv run`, Ray would otherwise build an environment for its workers.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_of_two_cores():
    """A local Ray with two cores, shared by the session: starting one takes longer than the tests."""
    ray = pytest.importorskip("ray")
    if ray.is_initialized():
        yield ray
        return
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    yield ray
    ray.shutdown()
