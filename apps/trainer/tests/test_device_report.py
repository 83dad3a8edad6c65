"""The report of a device: what is judged, what is written, and processes that fail."""

import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from unirl.app.command_line import Command
from unirl.app.device_report.measured import AttentionKernels, measure
from unirl.app.device_report.page import page
from unirl.app.device_report.report import REDUCED, WHOLE, Case, Failed, asked, passes, report
from unirl.app.environment import register_resolvers
from unirl.app.recipe import composed, settled
from unirl.config.check import check_recipe, run_findings

PHASE = {"wall_s": 2.0, "device_s": 1.5, "peak_device_bytes": 9e9, "flops": 3e12, "gemm_fraction": 0.2}
MEASURED: dict[str, Any] = {
    "kind": "latents",
    "dtype": "bfloat16",
    "log_prob_gap": {"max": 1e-6, "mean": 1e-7, "samples": 8},
    "first_ratio_max_abs_dev": 0.0,
    "attention": {"sampling": {"aten._flash": 3}, "step": {}},
    "bench": {
        "phases": {"train": PHASE, "other": {**PHASE, "flops": 0, "peak_device_bytes": None}},
        "geometry": {"samples": 8},
        "step_wall_s": {"min": 1.0, "median": 1.0, "max": 1.0},
        "samples_per_s": 4.0,
        "gemm_flops_per_device_s": 1e14,
    },
}
REHEARSED = {
    "bytes": {"train": 10e9},
    "flops": {"train": 3.1e12},
    "seconds": {"train": 2.1},
    "notes": ["scores are drawn"],
}
PUSHED = {"megabytes": 63.0, "tensors": 30, "pushes": {"ipc": {"megabytes": 63.0, "seconds": 0.5}}}


def reported(measured=MEASURED, failing=(), budget_s=60.0, cases=None):
    """A report whose processes give canned answers; those whose command has a word of `failing` fail."""
    commands = []

    def run(command, timeout_s):
        commands.append(list(command))
        assert 0 < timeout_s <= budget_s / 2
        if any(word in " ".join(command) for word in failing):
            raise Failed("no memory")
        answers = {"measured": measured, "rehearsed": REHEARSED, "pushes.py": PUSHED, "random_checkpoint.py": None}
        return copy.deepcopy(next(answer for word, answer in answers.items() if word in " ".join(command)))

    cases = cases or {"one": Case("worlds/shapes/flowgrpo", ("batch_size=4",))}
    return report("cpu", cases, Path("/bench"), Path("/folder"), budget_s, run), commands


def changed(**changes):
    return {**copy.deepcopy(MEASURED), **changes}


def test_a_case_has_its_step_next_to_its_rehearsal_and_its_plan():
    found, commands = reported()
    assert passes(found) and found["pushes"] == PUSHED
    train = found["cases"]["one"]["phases"]["train"]
    assert (train["wall_s"], train["peak_bytes"], train["rehearsed_bytes"]) == (2.0, 9e9, 10e9)
    assert (train["flops"], train["rehearsed_flops"], train["planned_s"]) == (3e12, 3.1e12, 2.1)
    assert found["cases"]["one"]["phases"]["other"]["rehearsed_bytes"] is None
    assert commands[0][-3:] == ["worlds/shapes/flowgrpo", "batch_size=4", "device=cpu"] == commands[1][-3:]
    assert "pushes.py" in commands[2][1]
    json.dumps(found)


@pytest.mark.parametrize(
    ("measured", "check"),
    [
        (changed(log_prob_gap={"max": 6e-5, "mean": 0.0, "samples": 8}), "log-prob gap"),
        (changed(log_prob_gap={"max": float("nan"), "mean": 0.0, "samples": 8}), "log-prob gap"),
        (changed(kind="text", log_prob_gap={"max": 1.0, "mean": 3e-2, "samples": 8}), "log-prob gap"),
        (changed(first_ratio_max_abs_dev=2e-4), "first ratio"),
        (changed(first_ratio_max_abs_dev=None), "first ratio"),
        (changed(counted_bytes={"train": 12e9}), "training bytes"),
        (changed(counted_bytes={"train": 7e9}), "training bytes"),
    ],
)
def test_what_is_out_of_bounds_fails_its_check_alone(measured, check):
    found, _ = reported(measured)
    assert not passes(found)
    assert [each["check"] for each in found["checks"] if not each["holds"]] == [check]
    assert "**does not hold**" in page(found)


def test_an_allocator_also_holds_the_workspaces_of_libraries():
    for peak, holds in ((11.1e9, True), (11.2e9, False)):
        bench = copy.deepcopy(MEASURED["bench"])
        bench["phases"]["train"]["peak_device_bytes"] = peak
        assert passes(reported(changed(bench=bench))[0]) is holds


def test_texts_may_be_shorter_than_rehearsed_and_differ_in_single_tokens():
    gap = {"max": 1.0, "mean": 1e-3, "samples": 8}
    found, _ = reported(changed(kind="text", log_prob_gap=gap, counted_bytes={"train": 1e9}))
    assert passes(found)


def test_a_process_that_fails_is_named_and_the_others_are_measured():
    cases = {"one": Case("a", ()), "two": Case("b", ("x={folder}",), checkpoint="sd3.5-medium")}
    found, commands = reported(failing=("random_checkpoint",), cases=cases)
    assert found["failures"] == {"two, its checkpoint": "no memory"} and set(found["cases"]) == {"one"}
    assert not any("b" in command for command in commands) and not passes(found)
    found, commands = reported(failing=("rehearsed",), cases=cases)
    assert set(found["failures"]) == {"one, rehearsed", "two, rehearsed"} and set(found["cases"]) == {"one", "two"}
    assert found["cases"]["two"]["overrides"] == ["x=/folder/two", "device=cpu"]
    assert [each["check"] for each in found["checks"]] == ["log-prob gap", "first ratio"] * 2
    assert "two, rehearsed failed: no memory." in page(found)


def test_what_no_time_is_left_for_is_said():
    found, commands = reported(budget_s=0.0)
    assert commands == [] and found["failures"]["one"] == "no time was left of 0 s" and found["pushes"] is None
    page(found)


def test_a_page_has_every_figure():
    text = page(reported()[0])
    assert "| train | 2 | 2.1 | 9 G | 10 G | 3 T | 3.1 T | 0.2 |" in text
    assert "| other | 2 | - | - | - | - | - | 0.2 |" in text
    assert "| ipc | 63 | 0.5 | 126 |" in text
    assert "- Attention in sampling: aten._flash (3 calls)." in text
    assert "- Attention in step: no fused kernel." in text
    assert "at most 1e-06 nats apart, 1e-07 on average" in text


def test_the_answer_of_a_process_is_its_last_line():
    assert asked([sys.executable, "-c", "print('loading'); print('{\"a\": 1}')"], 60.0) == {"a": 1}
    assert asked([sys.executable, "-c", ""], 60.0) is None
    with pytest.raises(Failed, match="ValueError: too large$") as failed:
        asked([sys.executable, "-c", "import sys; sys.stderr.write('x\\n' * 9); raise ValueError('too large')"], 60.0)
    assert failed.value.said.startswith("x\nx\n") and "Traceback" in failed.value.said


def test_a_process_that_takes_too_long_is_killed_with_its_children(tmp_path):
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time, pathlib\n"
        "print('begun', file=sys.stderr, flush=True)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(Failed, match="did not end within the 2 s") as failed:
        asked([sys.executable, "-c", code], 2.0)
    assert failed.value.said == "begun\n"
    deadline = time.monotonic() + 10
    while _runs(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(int(pid.read_text()))


def _runs(pid):
    """False also for a process that has ended and is not yet collected."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("name", WHOLE)
def test_cases_of_an_accelerator_are_recipes_without_mistakes(tmp_path, name):
    recipe, *words = WHOLE[name].words("cuda", tmp_path)
    register_resolvers()
    run = check_recipe(settled(composed(Command("bench", recipe, tuple(words)))))
    assert run.runtime == "local" and run.device == "cuda" and not list(run_findings(run))


def test_attention_is_counted_by_its_kernel():
    query, key, value = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    with AttentionKernels() as counted:
        scaled_dot_product_attention(query, key, value).sum().backward()
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert counted.calls == {name: 1, f"{name}_backward": 1}
    with AttentionKernels() as counted, sdpa_kernel(SDPBackend.MATH):
        scaled_dot_product_attention(query, key, value).sum().backward()
    assert counted.calls == {}


@pytest.mark.slow
def test_a_recipe_is_measured_on_this_machine():
    """In float32 on a CPU a replay gives the rollout's log-probs, and the first ratio is 1."""
    recipe, *words = REDUCED["arithmetic"].words("cpu", Path())
    register_resolvers()
    found = measure(check_recipe(settled(composed(Command("bench", recipe, tuple(words))))))
    assert found["kind"] == "text" and found["first_ratio_max_abs_dev"] < 1e-6
    assert 0 <= found["log_prob_gap"]["mean"] <= found["log_prob_gap"]["max"] < 1e-5
    assert set(found["attention"]["step"]) == {
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    }
    # float32 weights, two moments of Adam, and in training gradients too.
    assert found["counted_bytes"]["train"] > found["counted_bytes"]["reward"] > 1e6
    assert found["bench"]["phases"]["train"]["flops"] > found["bench"]["phases"]["rollout"]["flops"] > 0


@pytest.mark.matrix
@pytest.mark.nightly
@pytest.mark.ray
def test_one_command_reports_this_machine(tmp_path):
    script = Path(__file__).resolve().parents[3] / "scripts" / "gpu_report"
    done = subprocess.run(
        [sys.executable, str(script), "--reduced", "--device", "cpu", "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["failures"] == {} and len(found["checks"]) == 6 and set(found["cases"]) == set(REDUCED)
    # The rehearsal's bytes and operations are those of real tensors, but for weights, which files bring.
    train = found["cases"]["shapes"]["phases"]["train"]
    assert 0.97 < train["peak_bytes"] / train["rehearsed_bytes"] < 1.0
    assert 0.99 < train["flops"] / train["rehearsed_flops"] <= 1.0
    assert train["planned_s"] > 0
    assert {"ipc", "files"} <= set(found["pushes"]["pushes"])
    assert (tmp_path / "out" / "report.md").read_text() == page(found)
