"""`trainer plan --gpus N --memory 80GB`: a layout that fits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import unirl.app.plan.command
from unirl.app.command_line import Command, parse
from unirl.app.plan.layouts import Layout, Machine, Search, checked, in_own_process, merged
from unirl.app.rehearsal.knobs import FORWARD_BATCH, MICRO_BATCH, OFFLOAD, RECOMPUTE, RESHARD, REST_ENCODERS, ROWS, Knob
from unirl.app.rehearsal.report import expected_bytes
from unirl.app.verbs import plan
from unirl.rehearsal.ledger import Peak
from unirl.types.errors import ConfigError

SMALL = ("batch_size=2", "stack.num_updates_per_batch=1", "eval=null")
"""One update of 48 samples, whose six steps are one forward."""


def trainer(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "trainer"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.mark.matrix
@pytest.mark.nightly
def test_a_layout_that_fits_is_found_and_fits_when_it_is_rehearsed(tmp_path: Path) -> None:
    file = tmp_path / "layouts.json"
    # As it is training counts 0.42 GB, which is 1.94 GB on a real device.
    done = trainer("plan", "worlds/shapes/flowgrpo", *SMALL, "--gpus", "1", "--memory", "1.9GB", "--output", str(file))
    assert done.returncode == 0, done.stderr
    first, header, *rows, last = done.stdout.splitlines()
    assert first == "worlds/shapes/flowgrpo on 1 device of 1.90 GB, H100 SXM: GB by phase, each rehearsed"
    assert header.split()[-3:] == ["step", "fits", "changes"]
    assert rows[0].split()[-2:] == ["no", "none"]
    found = json.loads(file.read_text(encoding="utf-8"))
    assert len(found["layouts"]) == len(rows)
    words = re.fullmatch(r"fits: trainer (.*)", last)
    assert words is not None and "algorithm.rows_per_forward=" in words[1]
    before, after = (sum(found["layouts"][index]["peaks"]["train"].values()) for index in (0, -1))
    assert expected_bytes(before) > 1.9e9 > expected_bytes(after)
    again = trainer("rehearse", *words[1].split(), "--fits", "0.381GB")  # (1.9 GB - 1.5 GB) / 1.05
    assert again.returncode == 0, again.stdout


BASE = "worlds/shapes/flowgrpo"


def layout(changes: tuple[str, ...], train_gb: float, parts: Mapping[str, float], step_s: float = 10.0) -> Layout:
    peak = Peak(round(train_gb * 1e9), {name: round(size * 1e9) for name, size in parts.items()})
    return Layout(changes, {"train": peak}, {"train": step_s})


def test_a_search_ends_where_no_knob_is_left() -> None:
    tried: list[tuple[str, ...]] = []

    def rehearse(changes: tuple[str, ...]) -> Layout:
        tried.append(changes)
        return layout(changes, 30.0, {"samples": 20.0, "activations": 10.0})  # nothing helps

    search = Search(Machine(BASE, "h100", 24e9), rehearse)
    found = list(search.layouts(("device=cuda",)))
    assert tried[0] == ("device=cuda",)
    assert [each[-1] for each in tried[1:]] == [
        "algorithm.rows_per_forward=36",  # of 288, what leaves 1.4 of 10 GB
        "backend.fsdp.activation_checkpointing=full",
        "backend.fsdp.activation_offload=true",
    ]
    assert search.found == found[0] and not search.fits(found[0])


def test_a_recipe_that_cannot_fit_names_what_holds_most(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rehearse(machine: Machine, changes: tuple[str, ...]) -> Layout:
        assert "num_devices=2" in changes and machine.memory_bytes == 24e9
        freed = 5.0 * sum("rest_text_encoders" in change for change in changes)
        return layout(changes, 40.0 - freed, {"samples": 32.0, "text encoders": 8.0 - freed})

    monkeypatch.setattr(unirl.app.plan.command, "in_own_process", rehearse)
    assert plan(parse(["plan", "sd3/grpo", "--gpus", "2", "--memory", "24GB"])) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[2].split() == ["40", "10", "s", "no", "none"]
    assert shown[3].split() == ["35", "10", "s", "no", "bundle.rest_text_encoders=true"]
    assert shown[4:] == [
        "no layout fits 24.00 GB. The smallest of 2 takes 35.00 GB in train, 38.25 GB on a real device; what holds "
        "most of it:",
        "  samples 32.00 GB: left to you: batch_size lower, or engine.media_bits=8",
        "  text encoders 3.00 GB",
    ]


def test_a_layout_that_cannot_be_rehearsed_is_left_and_the_next_knob_tried() -> None:
    def rehearse(changes: tuple[str, ...]) -> Layout:
        if any("rows_per_forward" in change for change in changes):
            return Layout(changes, {}, {}, "cannot be rehearsed: some/place.py:3: ValueError: no")
        size = 5.0 if len(changes) else 30.0
        return layout(changes, size, {"activations": size})

    search = Search(Machine(BASE, "h100", 24e9), rehearse)
    found = list(search.layouts(()))
    assert found[1].error is not None
    assert found[2].changes[-1] == "backend.fsdp.activation_checkpointing=selective"
    assert search.found == found[2]


def test_a_recipe_that_fits_gets_what_is_faster() -> None:
    def rehearse(changes: tuple[str, ...]) -> Layout:
        recomputes = "backend.fsdp.activation_checkpointing=false" not in changes
        size, step_s = (4.0, 10.0) if recomputes else (20.0, 7.5)
        return layout(changes, size, {"activations": size}, step_s)

    search = Search(Machine("sd3/grpo", "h100", 80e9), rehearse)
    list(search.layouts(("backend.fsdp.activation_checkpointing=full",)))
    assert search.found is not None
    assert search.found.changes == ("backend.fsdp.activation_checkpointing=false",)


def test_what_fails_as_it_is_says_why() -> None:
    search = Search(Machine(BASE, "h100", 24e9), lambda changes: Layout(changes, {}, {}, "cannot be rehearsed: here"))
    with pytest.raises(ConfigError, match="cannot be rehearsed: here"):
        list(search.layouts(()))


@pytest.mark.parametrize(
    ("recipe", "knob", "fraction", "first"),
    [
        ("sd3/grpo", ROWS, 0.5, "algorithm.rows_per_forward=6"),
        ("sd3/grpo", ROWS, 0.01, "algorithm.rows_per_forward=1"),
        ("sd3/grpo", ROWS, 3.0, None),  # all rows of a micro-batch already
        ("sd3/grpo", FORWARD_BATCH, 0.3, "engine.forward_batch_size=4"),
        ("sd3/grpo", FORWARD_BATCH, 2.5, "engine.forward_batch_size=32"),
        ("sd3/grpo", RECOMPUTE, 0.8, "backend.fsdp.activation_checkpointing=selective"),
        ("sd3/grpo", RECOMPUTE, 0.3, "backend.fsdp.activation_checkpointing=full"),
        ("sd3/grpo", OFFLOAD, 0.3, "backend.fsdp.activation_offload=true"),
        ("sd3/grpo", RESHARD, 1.5, "backend.fsdp.reshard_after_forward=false"),
        ("sd3/grpo", REST_ENCODERS, 0.5, "bundle.rest_text_encoders=true"),
        ("llm/qwen3_4b_dapo_grpo", ROWS, 0.5, None),  # a loss of texts has no rows
        ("worlds/arithmetic/grpo", MICRO_BATCH, 0.5, "stack.micro_batch_size=64"),
        ("worlds/arithmetic/grpo", MICRO_BATCH, 2.0, None),
    ],
)
def test_a_knob_proposes_what_leaves_a_fraction(recipe: str, knob: Knob, fraction: float, first: str | None) -> None:
    assert knob.proposes is not None
    proposed = next(knob.proposes(checked(Machine(recipe, "h100", 80e9), ()), fraction), None)
    assert proposed == (None if first is None else (first,))


def test_a_later_value_replaces_one_before_it() -> None:
    assert merged(("a=1", "+b.c=2"), ("b.c=3", "d=4")) == ("a=1", "b.c=3", "d=4")


def test_what_a_process_says_of_a_mistake_comes_back() -> None:
    found = in_own_process(Machine(BASE, "h100", 24e9), ("batch_size=0",))
    assert found.error is not None and "batch_size = 0 must be at least 1" in found.error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "0"), "--gpus takes the number of devices, at least 1, not 0"),
        (("--memory", "abc"), "--memory takes the memory of a device in GB, such as 80GB, not 'abc'"),
        (("--memory", "0GB"), "--memory takes the memory of a device in GB"),
        (("--memory", "1.5GB"), "--memory 1.50 GB is no more than a device takes for its context and libraries."),
        (("--gpus", "5"), "= 384 is not divisible by num_devices = 5"),
        (("--gpus", "2", "num_devices=4"), "--gpus is num_devices. Give one of them."),
        (("--gpus", "2", "--on", "here"), "--gpus and --memory are of devices that --on names: h100"),
        (
            ("--gpus", "4", "backend.topology._target_=unirl.train.configs.TrainTopology", "backend.topology.sp=3"),
            "backend.topology",
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_rehearsed(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan(parse(["plan", BASE, *words]))


def test_memory_is_a_size_for_plan_and_alone_for_check() -> None:
    assert parse(["plan", BASE, "--memory", "80GB"]).options == {"memory": "80GB"}
    assert parse(["check", "--memory", BASE]) == Command("check", BASE, (), {"memory": True})
