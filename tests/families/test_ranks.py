"""Every family sharded over two ranks: the gradients of an update are those of one process."""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from family_steps import all_gradients, gradients, kit
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.matrix]

ranks_of_train: Any = importlib.import_module("ranks")
"""Processes of a gloo group, as the tests of unirl-train start them."""
NAMES = sorted(kit.families())


@pytest.fixture(scope="module")
def ranks(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    """Both ranks run once, for all families."""
    for name in NAMES:
        kit.ours(name, folders / name)  # written before the ranks read it
    return ranks_of_train.results_of_ranks(partial(all_gradients, NAMES, folders), tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_differentiate_as_one(name: str, folders: Path, ranks: list[dict[str, dict[str, Tensor]]]) -> None:
    one = gradients(name, folders)
    assert one
    for rank in ranks:
        assert rank[name].keys() == one.keys()
        for key, gradient in one.items():
            # float32 sums of the same rows in another order.
            scale = float(gradient.abs().max())
            torch.testing.assert_close(rank[name][key], gradient, rtol=1e-4, atol=1e-5 * scale + 1e-9)
