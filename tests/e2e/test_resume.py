"""Stopping and resuming is as if the run had never stopped, whatever stopped it."""

import pytest
import torch
from stopping import comparable, run

from unirl.types.storage import load_rollout

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "is_async"),
    [("worlds/shapes/nft", False), ("worlds/shapes/flowgrpo", True), ("worlds/shapes/nft_replay", True)],
)
def test_two_plus_two_rollouts_equal_four(name, is_async, recipe, tmp_path):
    small = recipe(name, "num_rollouts=4", f"save.is_async={str(is_async).lower()}")
    whole_dir, parts_dir = tmp_path / "whole", tmp_path / "parts"
    unstopped = {**small, "save": {**small["save"], "interval": 4}}  # it is not resumed
    whole, whole_records = run(
        {**unstopped, "engine": {**small["engine"], "dump_dir": str(whole_dir / "dump")}}, whole_dir
    )
    parts = {**small, "engine": {**small["engine"], "dump_dir": str(parts_dir / "dump")}}
    first, first_records = run(parts, parts_dir, after=2)
    assert first["num_rollouts"] == 2 and not first["is_complete"]
    second, second_records = run({**parts, "resume": "auto"}, parts_dir)
    assert second["num_rollouts"] == 4 and second["is_complete"]
    joined = {**first_records, **second_records}
    for step in (1, 2, 3, 4):
        assert comparable(joined[step]) == comparable(whole_records[step]), step
    assert second["eval_after"] == whole["eval_after"]
    for rollout in range(4):
        file = f"rollout-{rollout:06d}-rank0.safetensors"
        ours, _ = load_rollout(parts_dir / "dump" / file)
        theirs, _ = load_rollout(whole_dir / "dump" / file)
        assert ours.equals(theirs), rollout
    assert torch.get_default_dtype() is torch.float32
