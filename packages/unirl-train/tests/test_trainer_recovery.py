"""What a run may be continued by."""

import pytest

from unirl.trainer.base import check_same_algorithm
from unirl.types.errors import CheckpointError


def test_another_algorithm_does_not_continue_a_run():
    saved = {"algorithm": {"_target_": "a.First", "beta": 1.0}}
    check_same_algorithm(saved, {"algorithm": {"_target_": "a.First", "beta": 2.0}})
    check_same_algorithm({}, {})
    with pytest.raises(CheckpointError, match=r"saved by algorithm a\.First, this recipe has a\.Second"):
        check_same_algorithm(saved, {"algorithm": {"_target_": "a.Second"}})
