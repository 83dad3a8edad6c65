"""Measures a device case by case, each in its own process, and judges what was found. See docs/guides/gpu_report.md.

A case that fails or takes too long is named in the report, and the others are measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unirl.app.bench import commit
from unirl.trainer.versions import versions
from unirl.types.devices import device_name, is_accelerator

SCHEMA = 1
Values = dict[str, Any]  # Any: JSON

FIRST_RATIO_LIMIT = 1e-4
"""Deviation of a first ratio from 1: the policy has not changed, so that only rounding may differ."""
GAP_LIMITS: Mapping[str, float] = {"latents": 5e-5, "text": 2e-2}
"""Nats per latent element, the largest: half of the smallest clip range of packaged recipes. Nats per token, the mean:
in bfloat16 decoding with a cache and one forward of all tokens round differently."""
BYTES_LIMITS = (0.8, 1.1)
"""Measured peak of training as a share of the rehearsed one, beyond `WORKSPACE_BYTES` of an allocator."""
WORKSPACE_BYTES = 128e6
"""Libraries of matrix products and convolutions allocate as much once, whatever the model; no operator shows it."""


@dataclass(frozen=True)
class Case:
    """A recipe at a geometry."""

    recipe: str
    overrides: tuple[str, ...]
    repeats: int = 2
    checkpoint: str | None = None
    """Name of a checkpoint of apps/trainer/bench/random_checkpoint.py that is written first; `{folder}` in overrides
    is its folder."""

    def words(self, device: str, folder: Path) -> list[str]:
        """Arguments of a process that measures or rehearses it."""
        own = [each.format(folder=folder) for each in self.overrides]
        return [self.recipe, *own, f"device={device}"]


REDUCED: Mapping[str, Case] = {
    "shapes": Case(
        "worlds/shapes/flowgrpo",
        (
            "batch_size=4",
            "sampling.samples_per_prompt=4",
            "sampling.num_inference_steps=4",
            "stack.micro_batch_size=4",
            "engine.forward_batch_size=4",
            "guardrails.action=off",
        ),
    ),
    "arithmetic": Case(
        "worlds/arithmetic/grpo",
        ("batch_size=4", "sampling.samples_per_prompt=4", "stack.micro_batch_size=8", "guardrails.action=off"),
    ),
}
"""For a CPU: seconds each."""
WHOLE: Mapping[str, Case] = {
    "shapes": Case("worlds/shapes/flowgrpo", ("guardrails.action=off",)),
    "arithmetic": Case(
        "worlds/arithmetic/grpo",
        (
            "guardrails.action=off",
            "bundle.dtype=bf16",
            "+backend.fsdp._target_=unirl.train.configs.FSDPConfig",
            "+backend.fsdp.param_dtype=bf16",
        ),
    ),
    "sd3.5-medium": Case(
        "sd3/grpo",
        (
            "runtime=local",
            "num_devices=1",
            "batch_size=1",
            "sampling.samples_per_prompt=8",
            "stack.num_updates_per_batch=1",
            "bundle.pretrained_model={folder}",
            "data.path={folder}/prompts.txt",
            "eval.prompts={folder}/prompts.txt",
            "engine.drop_text_encoders=true",
            "~reward.scorers.pickscore",
            "+reward.scorers.jpeg._target_=unirl.reward.local.images.compressibility.JPEGCompressibilityScorer",
            "guardrails.action=off",
        ),
        repeats=1,
        checkpoint="sd3.5-medium",
    ),
}
"""For an accelerator: small models, whose launches dominate, and one of released size with random weights."""
PUSHES: Mapping[bool, Mapping[str, float]] = {
    False: {"--megabytes": 64, "--bucket-megabytes": 32, "--repeats": 2},
    True: {"--megabytes": 1250, "--bucket-megabytes": 512, "--repeats": 2},
}
"""Options of apps/trainer/bench/pushes.py, with an accelerator and without."""

Run = Callable[[Sequence[str], float], Any]
"""(command, seconds) -> the JSON that it writes. Raises Failed."""


class Failed(Exception):
    """A process did not give what was asked, and why. said: all that it wrote to its standard error."""

    def __init__(self, reason: str, said: str = "") -> None:
        super().__init__(reason)
        self.said = said


def asked(command: Sequence[str], timeout_s: float) -> Any:  # Any: JSON
    """The JSON on the last line of a command's standard output. Its processes are killed after `timeout_s`.

    Raises Failed with the end of what it said.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        late = False
        try:
            out, _ = process.communicate(timeout=max(1.0, timeout_s))
        except subprocess.TimeoutExpired:
            out, late = "", True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        said = errors.read()
    if late:
        raise Failed(f"did not end within the {timeout_s:.0f} s that it was given", said)
    if process.returncode:
        raise Failed("; ".join(said.strip().splitlines()[-3:]) or f"ended with status {process.returncode}", said)
    lines = out.strip().splitlines()
    return json.loads(lines[-1]) if lines else None


def report(
    device: str, cases: Mapping[str, Case], bench: Path, folder: Path, budget_s: float, run: Run = asked
) -> Values:
    """Measure `cases` on a device, and pushes. bench: the folder apps/trainer/bench. folder: for checkpoints.

    Each process is given half of the time that is left of `budget_s`, so that one that hangs leaves the others theirs.
    Cases for which none is left are among the failures. What a process that failed wrote goes to the standard error.
    """
    began = time.monotonic()
    found: dict[str, Values] = {}
    failures: dict[str, str] = {}

    def left_s() -> float:
        return budget_s - (time.monotonic() - began)

    def attempted(name: str, *command: str) -> Any:  # Any: JSON
        try:
            if left_s() <= 0:
                raise Failed(f"no time was left of {budget_s:.0f} s")
            return run([sys.executable, *command], left_s() / 2)
        except Failed as error:
            failures[name] = str(error)
            sys.stderr.write(f"{name} failed: {error}\n{error.said}\n")
            return None

    for name, case in cases.items():
        place = folder / name
        if case.checkpoint is not None:
            attempted(f"{name}, its checkpoint", str(bench / "random_checkpoint.py"), case.checkpoint, str(place))
            if f"{name}, its checkpoint" in failures:
                continue
        words = case.words(device, place)
        module = "unirl.app.device_report."
        measured = attempted(name, "-m", f"{module}measured", "--repeats", str(case.repeats), *words)
        rehearsed = attempted(f"{name}, rehearsed", "-m", f"{module}rehearsed", *words)
        if measured is not None:
            found[name] = joined(case, words, measured, rehearsed)
    options = [str(word) for pair in PUSHES[is_accelerator(device)].items() for word in pair]
    pushes = attempted(
        "pushes", str(bench / "pushes.py"), *options, "--device", device, "--transports", "ipc", "files", "--json"
    )
    checks = [check for name, each in found.items() for check in judged(name, each)]
    return {
        "schema": SCHEMA,
        "commit": commit(),
        "environment": {
            **versions(),
            "platform": platform.platform(),
            "device": device,
            "hardware": device_name(device),
            "threads": torch.get_num_threads(),
        },
        "seconds": time.monotonic() - began,
        "cases": found,
        "pushes": pushes,
        "checks": checks,
        "failures": failures,
    }


def joined(case: Case, words: Sequence[str], measured: Values, rehearsed: Values | None) -> Values:
    """A case as the report has it: phases of the step next to what the rehearsal says of them."""
    bench = measured["bench"]
    expected = rehearsed or {"bytes": {}, "flops": {}, "seconds": {}}
    counted = measured.get("counted_bytes")
    phases = {}
    for name, phase in bench["phases"].items():
        peak = phase["peak_device_bytes"] if counted is None else counted.get(name)
        phases[name] = {
            "wall_s": phase["wall_s"],
            "device_s": phase["device_s"],
            "planned_s": expected["seconds"].get(name),
            "peak_bytes": peak,
            "rehearsed_bytes": expected["bytes"].get(name),
            "flops": phase["flops"],
            "rehearsed_flops": expected["flops"].get(name),
            "gemm_fraction": phase["gemm_fraction"],
        }
    return {
        "recipe": case.recipe,
        "overrides": list(words[1:]),
        "kind": measured["kind"],
        "dtype": measured["dtype"],
        "geometry": bench["geometry"],
        "log_prob_gap": measured["log_prob_gap"],
        "first_ratio_max_abs_dev": measured["first_ratio_max_abs_dev"],
        "attention": measured["attention"],
        "step_wall_s": bench["step_wall_s"],
        "samples_per_s": bench["samples_per_s"],
        "gemm_flops_per_device_s": bench["gemm_flops_per_device_s"],
        "bytes_are": "allocated" if counted is None else "counted",
        "phases": phases,
        "notes": [] if rehearsed is None else rehearsed["notes"],
    }


def judged(name: str, case: Values) -> list[Values]:
    """The checks of a case: what was found, its bounds, and whether it is within them."""
    is_text = case["kind"] == "text"
    gap = case["log_prob_gap"]["mean" if is_text else "max"]
    checks = [
        ("log-prob gap", gap, 0.0, GAP_LIMITS[case["kind"]]),
        ("first ratio", case["first_ratio_max_abs_dev"], 0.0, FIRST_RATIO_LIMIT),
    ]
    train = case["phases"]["train"]
    if train["peak_bytes"] and train["rehearsed_bytes"]:
        low, high = BYTES_LIMITS
        high += WORKSPACE_BYTES / train["rehearsed_bytes"] if case["bytes_are"] == "allocated" else 0.0
        # A rehearsed text has its full length, which is an upper bound.
        checks.append(("training bytes", train["peak_bytes"] / train["rehearsed_bytes"], 0.0 if is_text else low, high))
    return [
        {
            "case": name,
            "check": what,
            "value": value,
            "low": low,
            "high": high,
            "holds": value is not None and low <= value <= high,
        }
        for what, value, low, high in checks
    ]


def passes(found: Values) -> bool:
    """True if every case was measured and every check holds."""
    return not found["failures"] and all(check["holds"] for check in found["checks"])
