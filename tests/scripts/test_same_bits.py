"""What `scripts/same_bits` calls equal."""

import importlib.machinery
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "same_bits"


@pytest.fixture(scope="module")
def same_bits() -> Any:
    loader = importlib.machinery.SourceFileLoader("same_bits", str(SCRIPT))
    spec = importlib.util.spec_from_loader("same_bits", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def lines(*records: dict[str, Any]) -> str:
    return "\n".join(json.dumps(record) for record in records)


def test_metrics_of_time_are_left_out_and_all_others_kept(same_bits):
    text = lines({"step": 1, "reward/mean": 0.5, "timing_s/train": 3.0, "perf/samples_per_s": 9.0, "train/loss": 0.1})
    assert same_bits.read_metrics(text) == {"1 reward/mean": 0.5, "1 train/loss": 0.1}


def test_the_last_bit_counts(same_bits):
    base = {"1 reward/mean": 0.1 + 0.2, "step-000002.model.weight": "ab"}
    assert same_bits.differences(base, dict(base), {}) == []
    [line] = same_bits.differences(base, {**base, "1 reward/mean": 0.3}, {})
    assert line == "1 reward/mean: 0.30000000000000004 in BASE, 0.3 in HEAD"
    [line] = same_bits.differences(base, {**base, "step-000002.model.weight": "cd"}, {})
    assert "ab in BASE, cd in HEAD" in line


def test_numbers_that_are_no_numbers_are_equal_to_each_other(same_bits):
    value = {"1 x": float("nan")}
    assert same_bits.differences(value, {"1 x": float("nan")}, {}) == []


def test_what_is_missing_or_new_is_named_unless_the_list_says_so(same_bits):
    base, head = {"1 old": 1.0, "1 gone": 2.0, "1 kept": 3.0}, {"1 new": 1.0, "1 kept": 3.0, "1 more": 4.0}
    found = same_bits.differences(base, head, {})
    assert found == [
        "1 old is missing in HEAD",
        "1 gone is missing in HEAD",
        "1 new is new in HEAD",
        "1 more is new in HEAD",
    ]
    assert same_bits.differences(base, head, same_bits.read_renamed("# names\nold new\ngone -\n- more\n")) == []
    # A new name does not hide another value.
    assert same_bits.differences({"1 old": 1.0}, {"1 new": 2.0}, {"old": "new"}) == ["1 new: 1.0 in BASE, 2.0 in HEAD"]


def test_recipes_of_the_worlds_are_known_by_their_names_of_this_release_and_the_last(same_bits):
    listed = ["diffusion/sd3_shapes_ppo", "llm/qwen3_arithmetic", "worlds/shapes/nft", "sd3/nft", "diffusion/sd3_nft"]
    found = [match.group() for name in listed if (match := same_bits.WORLDS.match(f"{name}  what it is"))]
    assert found == listed[:3]
    assert all(map(same_bits.NEEDS_VLLM.search, ("llm/qwen3_arithmetic_vllm", "worlds/arithmetic/vllm")))
    assert not same_bits.NEEDS_VLLM.search("worlds/shapes/vllm_omni")
