"""The pretend device counts what a real one holds, and gives back zeros where its values are read.

Each script is a separate process, since a rehearsal registers a device with torch for good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from unirl.rehearsal import blocks, ledger
from unirl.rehearsal.mode import own_place
from unirl.train.backend.ring import RingExchange
from unirl.train.backend.ulysses import UlyssesExchange

HERE = Path(__file__).parent

NUM_PARAMETERS = 18
"""Parameters of the model in equal_bytes.py."""


def printed(script: str) -> Any:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, HERE / script], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def facts() -> Any:
    return printed("facts.py")


def test_bytes_of_a_step_are_those_of_real_tensors() -> None:
    """Phase by phase to the byte, but for AdamW's step counts, which are numbers of the host."""
    steps = 4 * NUM_PARAMETERS
    counted = {0, steps}
    pairs = printed("equal_bytes.py")
    assert set(pairs) >= {"forward 0", "backward 0", "optimizer 0", "forward 1", "backward 1", "optimizer 1"}
    for phase, (real, rehearsed) in pairs.items():
        assert real - rehearsed in counted, phase
    before = [pairs[name] for name in ("build", "forward 0", "backward 0")]
    assert all(real == rehearsed > 0 for real, rehearsed in before)


@pytest.fixture(scope="module")
def knobs() -> Any:
    return printed("knobs.py")


@pytest.mark.parametrize(
    ("knob", "of"),
    [(name, "step") for name in ("full", "selective", "offload False", "offload full", "offload selective")]
    + [("8bit", "state"), ("bf16", "state"), ("nf4", "update")]
    + [("hosted", "state"), ("hosted", "step"), ("hosted", "update"), ("hosted 8bit", "state")],
)
def test_what_an_option_saves_is_rehearsed(knobs: Any, knob: str, of: str) -> None:
    without = knobs["lora" if knob == "nf4" else "none"]
    real, rehearsed = (without[kind][of] - knobs[knob][kind][of] for kind in ("real", "rehearsed"))
    assert real > 0.1 * without["real"][of]
    assert rehearsed == pytest.approx(real, rel=0.1)


@dataclass(frozen=True)
class Packed:
    """Stands for the packing of texts, an argument of blocks."""

    lengths: tuple[int, ...]
    exchange: UlyssesExchange


def test_blocks_whose_tokens_are_exchanged_between_as_many_ranks_are_alike() -> None:
    def described(size: int, length: int = 3, ring: int = 1) -> Any:
        exchange = UlyssesExchange.__new__(UlyssesExchange)  # without a process group
        exchange.rank, exchange.size, exchange.ring = 0, size, None
        if ring > 1:
            around = exchange.ring = RingExchange.__new__(RingExchange)
            around.rank, around.size = 0, ring
        return blocks._described(Packed((length,), exchange))

    assert described(2) == described(2)
    several = {described(2), described(4), described(2, length=5), described(4, ring=2), described(4, ring=4)}
    assert len(several) == 5


def test_values_that_are_read_are_zeros_and_every_read_is_noted(facts: Any) -> None:
    reads = facts["reads"]
    assert reads["is_pretend"]
    assert reads["copied"] == [[0.0] * 4] * 3
    assert (reads["number"], reads["boolean"]) == (0.0, True)
    assert reads["strides of a large one"] == [0, 0]
    # What the host gave keeps its values.
    assert reads["levels"] == pytest.approx([1.8, 0.4, 0.0])
    assert (reads["low levels"], reads["largest"]) == ([2], pytest.approx(0.9))
    assert reads["written over"] == [0.0] * 3
    assert reads["masked"] == [12]
    assert reads["places"] == [12, 2]
    assert reads["listed"] == 1
    assert reads["runs"] == [2, 5]
    assert reads["picked"] == pytest.approx([0.2, 0.0])  # by a mask whose values are known
    assert reads["of a list"] == pytest.approx([0.9, 0.2])
    assert (reads["many truths"], reads["many weights"]) == (1 << 18, 0.0)  # of large ones those of masks alone
    assert reads["repeated"] == [4]
    assert reads["counts"] == [3, 3, 2, 2]
    kinds = {read.split(" at ")[0] for read in reads["at"]}
    assert kinds == {"a number", "a tensor", "a mask", "the places of a mask"}
    assert all("facts.py:" in read for read in reads["at"])


def test_tensors_of_two_devices_do_not_mix(facts: Any) -> None:
    assert "pretend" in facts["mixed"]
    assert "cpu" in facts["mixed"]


def test_a_module_that_leaves_the_device_counts_as_the_hosts(facts: Any) -> None:
    size = 4 * 100 * 100
    assert facts["memory"] == {
        "counter of batches": True,
        "there": size,
        "away": 0,
        "host": size,
        "back": size,
        "built for the host": 4 * 10 * 10,
        "state that came back": 0,
        "gone": 0,
    }


def test_attention_keeps_no_scores(facts: Any) -> None:
    heads, tokens, width = 8, 512, 64
    out, scores = 2 * heads * tokens * width, 2 * heads * tokens * tokens
    for name in ("plain", "masked"):
        assert out <= facts["attention"][name] < 2 * out < scores


def test_attention_of_a_cpu_is_the_cpus_kernel_with_its_layout(facts: Any) -> None:
    found = dict(facts["attention of a CPU"])
    assert found.pop("gradient") == [2, 4, 5, 8]
    for name, (real, pretended) in found.items():
        assert pretended == real, name
        assert real[2] == ["aten._scaled_dot_product_flash_attention_for_cpu.default"], name


def test_autocast_casts_as_on_a_gpu(facts: Any) -> None:
    assert facts["autocast"] == ["torch.bfloat16", "torch.float32", "torch.float32"]


def test_one_rank_holds_its_shards_and_its_collectives_are_counted(facts: Any) -> None:
    whole, found = 2 * 4 * 64 * 64, facts["sharded"]
    assert found["whole"] == whole
    assert found["shards"] == found["after"] == whole // 4  # the gradients' shards remain
    # Gathered for the forward and again for the backward; gradients go in whole.
    assert found["sent"] == {"allgather": 2 * whole, "reduce_scatter": whole}
    assert found["exchanged"] == [2] * 4


def test_forwards_that_are_alike_run_once_and_count_each_time(facts: Any) -> None:
    run, repeated = facts["repeated"]["run"], facts["repeated"]["repeated"]
    assert repeated["num_run"] < run["num_run"]
    assert {name: repeated[name] for name in ("flops", "launches", "peak", "shapes")} == {
        name: run[name] for name in ("flops", "launches", "peak", "shapes")
    }


@pytest.mark.parametrize("kind", ["kept", "checkpointed", "divided", "paired"])
def test_blocks_that_are_repeated_count_as_those_that_run(facts: Any, kind: str) -> None:
    run, repeated = (facts["blocks"][f"{kind} {way}"] for way in ("run", "repeated"))
    assert repeated["num_run"] < 0.85 * run["num_run"]
    assert repeated["peak"] == pytest.approx(run["peak"], rel=0.01)
    assert repeated["touched"] == pytest.approx(run["touched"], rel=0.05)  # a gradient that is expanded is read whole
    for name in ("flops", "launches", "sent", "gradients"):
        assert repeated[name] == run[name]


def test_blocks_that_may_change_their_arguments_all_run(facts: Any) -> None:
    assert facts["left in a list"] == 6


def test_calls_count_what_they_compute_read_and_write(facts: Any) -> None:
    found, number = facts["calls"], 4  # bytes of float32
    assert found["aten.mm.default"] == [2 * 4 * 8 * 2, number * (32 + 16 + 8), 2]
    assert found["aten.add_.Tensor"] == [0, number * 2 * 32, 2]  # read and written; its other argument is a number
    assert found["aten.add.Tensor"] == [0, number * (32 + 8 + 32), 1]  # of an expanded tensor what is in memory
    assert found["aten.embedding.default"] == [0, 2 * number * 3 * 16, 1]  # not the whole table
    assert found["aten.t.default"][:2] == [0, 0]
    assert "aten.mm.default" in found["on the host"]
    assert found["flops"] == 2 * 2 * 4 * 8 * 2  # of the device alone


def test_only_lines_of_the_packages_are_the_projects() -> None:
    assert own_place(ledger.__file__.replace("rehearsal/ledger.py", "train/optim.py"), 3) == "train/optim.py:3"
    assert own_place(ledger.__file__, 3) is None  # the rehearsal itself
    # Who clones the repository has a folder of this name around the libraries and the tests.
    for file in (".venv/lib/python3.11/site-packages/torch/nn/functional.py", "apps/trainer/tests/narrow_device.py"):
        assert own_place(f"/somewhere/unirl/{file}", 3) is None
