"""Tests of a real accelerator, of any kind: `uv run pytest -m gpu`. Left out by default, and skipped without one."""

import pytest
import torch

from unirl.types import devices


@pytest.fixture(autouse=True)
def device() -> str:
    """The accelerator of this machine, as recipes name it."""
    kind = devices.accelerator()
    if kind is None:
        pytest.skip(f"needs an accelerator; torch {torch.__version__} finds none on this machine")
    return kind.name
