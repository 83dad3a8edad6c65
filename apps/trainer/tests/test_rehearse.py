"""`trainer rehearse`: a step at true size on a device that computes nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from unirl.app.command_line import Command
from unirl.app.recipe import composed, settled
from unirl.app.rehearsal.rehearse import Rehearsed
from unirl.app.rehearsal.report import limit_of, verdict
from unirl.app.rehearsal.share import share_of
from unirl.config.check import check_recipe
from unirl.rehearsal.ledger import Peak
from unirl.types.errors import ConfigError


def rehearse(*words: str) -> subprocess.CompletedProcess[str]:
    """A separate process, in which a device is registered for good."""
    command = [str(Path(sys.executable).parent / "trainer"), "rehearse", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def test_a_recipe_is_rehearsed_as_one_rank_of_its_world() -> None:
    done = rehearse(
        "worlds/shapes/flowgrpo",
        "runtime=ray",
        "num_devices=4",
        "device=cuda",
        "sampling.samples_per_prompt=8",
        "batch_size=8",
        "stack.micro_batch_size=2",
        "--fits",
        "0.001GB",
    )
    assert done.returncode == 1, done.stderr
    first, *rest = done.stdout.splitlines()
    assert "rank 0 of 4, " in first
    assert "of 16 samples made" in first
    peaks = {match[1]: match[2] for line in rest if (match := re.match(r"  (\w+) +([\d.]+ [MG]B) per device", line))}
    assert set(peaks) >= {"start", "rollout", "reward", "train"}
    assert any(line.startswith("  does not fit 1 MB: counted") for line in rest)
    assert any(re.match(r"    activations [\d.]+ MB: .*rows_per_forward", line) for line in rest)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("sd3/sglang", "SGLangDiffusion"),
        ("pe/pe_trainside_pickscore", "makes texts"),
        ("vlm/qwen_vl_geo3k", "makes texts"),
        ("sd3/replica_separate", "other devices"),
        ("bagel/grpo", "ByteDance-Seed/BAGEL-7B-MoT: the configurations of this model are not known"),
    ],
)
def test_what_cannot_be_rehearsed_is_said_with_its_reason(recipe: str, said: str, tmp_path: Path) -> None:
    run = check_recipe(settled(composed(Command("rehearse", recipe))))
    with pytest.raises(ConfigError, match=said):
        share_of(run, tmp_path)


def test_ranks_that_share_samples_each_rehearse_those_of_their_group(tmp_path: Path) -> None:
    words = ["runtime=ray", "num_devices=4", "device=cuda"]
    topology = ["+backend.topology._target_=unirl.train.configs.TrainTopology", "+backend.topology.sp=2"]
    found = []
    for number, more in enumerate(([], topology)):
        run = check_recipe(settled(composed(Command("rehearse", "worlds/shapes/flowgrpo", (*words, *more)))))
        found.append(share_of(run, tmp_path / str(number)))
    alone, shared = found
    assert shared.num_ranks == alone.num_ranks == 4
    assert shared.num_samples == 2 * alone.num_samples


def rehearsed(**parts: int) -> Rehearsed:
    """One phase with these parts."""
    return Rehearsed(
        recipe="some",
        num_ranks=1,
        num_samples=1,
        num_made=1,
        num_trained=1,
        peaks={"train": Peak(sum(parts.values()), parts)},
        host_bytes=0,
        flops={},
        collectives={},
        reads={},
        cpu_s=0.0,
        notes=(),
    )


def test_only_what_is_counted_decides_whether_it_fits() -> None:
    found = rehearsed(activations=60 * 10**9, optimizer=18 * 10**9)
    assert verdict(found, 80e9) == (
        True,
        ["  fits 80.00 GB: counted 78.00 GB in train, about 83.40 GB on a real device, which may be too much"],
    )
    assert verdict(found, 90e9)[1][0].endswith("on a real device")
    fits, said = verdict(found, 40e9)
    assert not fits
    assert said[1].startswith("    activations 60.00 GB: ")
    assert said[2] == "    optimizer 18.00 GB: more devices, or parts/train=lora"


@pytest.mark.parametrize("text", ["80", "80MB", "much"])
def test_a_limit_is_a_size_in_gigabytes(text: str) -> None:
    with pytest.raises(ConfigError, match="80GB"):
        limit_of(text)
