"""What the tests over all families share."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# Ranks are separate processes, which import their job by name.
sys.path[:0] = [str(ROOT), str(Path(__file__).parent), str(ROOT / "packages" / "unirl-train" / "tests")]
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every family's folder is written once."""
    return tmp_path_factory.mktemp("folders")
