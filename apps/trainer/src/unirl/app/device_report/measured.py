"""One recipe on this machine's device: how closely a replay follows the rollout, the first ratio, seconds and bytes by
phase, and kernels of attention. JSON on standard output.

    python -m unirl.app.device_report.measured [--repeats N] RECIPE [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from unirl.app.bench import bench_recipe
from unirl.app.command_line import Command
from unirl.app.conformance.checks import Running, replay_gap
from unirl.app.environment import prepare_process
from unirl.app.recipe import checked, composed
from unirl.config.runs import ComposedRun
from unirl.distributed.runtime import LocalRuntime, Runtime
from unirl.models.allocations import Allocations
from unirl.trainer.base import Trainer
from unirl.trainer.build.assembly import make_trainer
from unirl.trainer.build.launch import make_runtime
from unirl.trainer.clock import PhaseClock
from unirl.types.devices import is_accelerator
from unirl.types.errors import ConfigError
from unirl.types.segments import TextSegment

FIRST_RATIO = "policy/first_ratio_max_abs_dev"


class AttentionKernels(TorchDispatchMode):
    """Counts calls of operators that attend in one kernel, while this is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],  # Any: an operator's values
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator."""
        del types
        name = str(func).rsplit(".", 1)[0]
        if "attention" in name or "attn" in name:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def measure(run: ComposedRun, *, repeats: int = 1) -> dict[str, Any]:
    """The report of a checked run of runtime: local, in this process. repeats: steps that are timed, after one that
    warms up."""
    found: dict[str, Any] = {}

    def look(runtime: Runtime, trainer: Trainer) -> None:
        found.update(_looked_at(runtime, trainer))

    bench = bench_recipe(run, warmup=0, repeats=repeats, first=look, compares_replays=False)  # `look` warms up
    if not is_accelerator(run.device):
        found["counted_bytes"] = counted_peaks(run)
    return {**found, "dtype": bench["gemm_dtype"], "bench": bench}


def _looked_at(runtime: Runtime, trainer: Trainer) -> dict[str, Any]:
    if not isinstance(runtime, LocalRuntime):
        raise ConfigError("a device is measured in one process; set runtime=local num_devices=1")
    running = Running.of(runtime, trainer)
    kernels: dict[str, dict[str, int]] = {}
    with AttentionKernels() as sampling:
        track = running.sampled(running.request(0))
    kernels["sampling"] = dict(sampling.calls)
    gaps = replay_gap(running.pipeline, track)
    with AttentionKernels() as step:
        metrics = trainer.step(0)
    kernels["step"] = dict(step.calls)
    return {
        "kind": "text" if isinstance(track.segment, TextSegment) else "latents",
        "log_prob_gap": {"max": float(gaps.max()), "mean": float(gaps.mean()), "samples": track.batch_size},
        "first_ratio_max_abs_dev": metrics.get(FIRST_RATIO),
        "attention": kernels,
    }


def counted_peaks(run: ComposedRun) -> dict[str, int]:
    """Most bytes of tensors alive by phase of a second step, counted operator by operator: for a CPU, whose allocator
    tells nothing. What the reward computes is left out, as in a rehearsal."""
    peaks: dict[str, int] = {}
    clock = PhaseClock()
    with tempfile.TemporaryDirectory() as folder, Allocations() as counter:

        @contextmanager
        def observed(phase: str) -> Generator[None]:
            counter.peak_bytes = counter.num_bytes
            yield
            peaks[phase] = max(peaks.get(phase, 0), counter.peak_bytes)

        with make_runtime(run, Path(folder)) as runtime:
            trainer = make_trainer(run, runtime, Path(folder), [], threading.Event(), clock)
            runtime.role("stack").prepare()
            trainer.step(0)
            clock.observer = observed
            trainer.step(1)
    return peaks


def main(argv: Sequence[str] | None = None) -> None:
    """Measure one recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(argv)
    prepare_process()
    run = checked(composed(Command("bench", given.recipe, tuple(given.overrides))))
    sys.stdout.write(json.dumps(measure(run, repeats=given.repeats)) + "\n")


if __name__ == "__main__":
    main()
