"""Two experts sharded over two ranks whose rows lie at different noise levels: every rank runs both, and gradients are
those of one process."""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from family_steps import expert_gradients, kit
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.matrix]

ranks_of_train: Any = importlib.import_module("ranks")
NAME = "wan22_t2v"


@pytest.fixture(scope="module")
def ranks(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    kit.ours(NAME, folders / NAME)
    return ranks_of_train.results_of_ranks(partial(expert_gradients, NAME, folders), tmp_path_factory.mktemp("experts"))


def test_ranks_on_different_experts_differentiate_as_one(folders: Path, ranks: list[dict[str, Tensor]]) -> None:
    one = expert_gradients(NAME, folders)
    assert {name.split(".")[0] for name in one} == {"transformer", "transformer_2"}
    for rank in ranks:
        assert rank.keys() == one.keys()
        for key, gradient in one.items():
            # float32 sums of the same rows in another order.
            scale = float(gradient.abs().max())
            torch.testing.assert_close(rank[key], gradient, rtol=1e-4, atol=1e-5 * scale + 1e-9)
