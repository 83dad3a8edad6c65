"""Models that are built without weights and filled shard by shard equal those that are loaded whole, bit by bit: after
building, in a forward, and after optimizer steps."""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from build_steps import NAMES, differences, written

pytestmark = [pytest.mark.slow]

ranks_of_train: Any = importlib.import_module("ranks")
"""Processes of a gloo group, as the tests of unirl-train start them."""


@pytest.mark.parametrize(
    ("num_ranks", "is_whole"),
    [
        (2, False),
        *(pytest.param(ranks, True, marks=pytest.mark.matrix) for ranks in (1, 2)),
        pytest.param(4, True, marks=[pytest.mark.matrix, pytest.mark.nightly]),
    ],
)
def test_shards_that_ranks_read_are_those_of_a_whole_model(
    num_ranks: int, is_whole: bool, folders: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    written(folders)
    job = partial(differences, NAMES, folders, is_whole=is_whole)
    found = ranks_of_train.results_of_ranks(job, tmp_path_factory.mktemp("ranks"), num_ranks)
    assert len(found) == num_ranks
    for rank in found:
        assert len(rank) == (4 if is_whole else 2) * len(NAMES)
        assert not any(rank.values()), rank
