"""`trainer bench`: where the time of a recipe goes, against the device's own matrix-multiplication rate.

The report is a JSON object, documented field by field in docs/results/performance.md. Ratios within one report are
taken in one process; compare reports of different machines only through them.
"""

from __future__ import annotations

import functools
import platform
import resource
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from unirl.app.meters import Meter, Spent, gemm_rate, meter_of
from unirl.config.runs import ComposedRun
from unirl.distributed.runtime import LocalRuntime, Runtime
from unirl.models.text_pipeline import AutoregressivePipeline
from unirl.sde.loop import transition_rows
from unirl.train.flops import FlopCounter
from unirl.trainer.base import Trainer
from unirl.trainer.build.assembly import make_trainer
from unirl.trainer.build.launch import make_runtime
from unirl.trainer.clock import PhaseClock
from unirl.trainer.versions import versions
from unirl.types.devices import device_name, is_accelerator
from unirl.types.errors import ConfigError
from unirl.types.precision import dtype_named
from unirl.types.protocols.models import Conditions, DiffusionPipeline
from unirl.types.rollout import RolloutResp
from unirl.types.segments import LatentSegment, TextSegment

SCHEMA = 3
ResultT = TypeVar("ResultT")
COMPUTE_PHASES = ("rollout", "reward", "train")


def commit() -> str | None:
    """The commit of the working tree, None outside one."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def bench_recipe(
    run: ComposedRun,
    *,
    warmup: int = 1,
    repeats: int = 3,
    first: Callable[[Runtime, Trainer], object] | None = None,
    compares_replays: bool = True,
) -> dict[str, Any]:
    """Run `warmup` + `repeats` training steps of a run in this process; returns the report.

    first: called with what was built, before any step. compares_replays: see `replay_variants`, whose forwards of all
    steps may take more memory than the run.
    Raises ConfigError for runtime: ray, whose workers are other processes, and for stages.
    """
    refuse_what_is_not_measured(run, "bench")
    recipe = run.resolved
    if repeats < 1 or warmup < 0:
        raise ConfigError(f"bench needs repeats >= 1 and warmup >= 0, got {repeats} and {warmup}")
    meter, dtype = meter_of(recipe["device"]), _compute_dtype(recipe)
    rates = [gemm_rate(meter, dtype)]
    with stepping(run, meter) as benched:
        if first is not None:
            first(benched.runtime, benched.trainer)
        for _ in range(warmup):
            benched.step()
        steps = [benched.step() for _ in range(repeats)]
        rates.append(gemm_rate(meter, dtype))
        flops = benched.flops()
        variants: dict[str, float] = {}
        if compares_replays and isinstance(benched.runtime, LocalRuntime):
            variants = benched.sampled(1, replay_variants, benched.runtime.component("pipeline"), meter)
    num_samples = recipe["batch_size"] * recipe["sampling"]["samples_per_prompt"]
    trained = statistics.median(step.num_trained for step in steps)
    return _report(run, steps, flops, max(rates), dtype, (num_samples, trained), variants)


@contextmanager
def stepping(run: ComposedRun, meter: Meter) -> Generator[Benched]:
    """A run that was built and is ready for its first step, without its evaluation."""
    clock = PhaseClock()
    with tempfile.TemporaryDirectory() as folder, make_runtime(run, Path(folder)) as runtime:
        trainer = make_trainer(replace(run, evaluation=None), runtime, Path(folder), [], threading.Event(), clock)
        runtime.role("stack").prepare()
        yield Benched(runtime, trainer, clock, meter)


class Benched:
    """Steps of a run that are measured one by one."""

    def __init__(self, runtime: Runtime, trainer: Trainer, clock: PhaseClock, meter: Meter) -> None:
        self.runtime = runtime
        self.trainer = trainer
        self._clock = clock
        self._meter = meter
        self._number = 0

    def step(self) -> Step:
        """The next one, by phase."""
        before = self._clock.state_dict()
        spent: dict[str, Spent] = {}
        trained = self._observed(_device_observer(self._meter, spent))
        passed = _difference(self._clock.state_dict(), before)
        return Step(passed["wall_s"], passed["cpu_s"], spent, trained)

    def flops(self) -> dict[str, int]:
        """Floating-point operations of the next step, by phase."""
        flops: dict[str, int] = {}
        self._observed(_flop_observer(flops))
        return flops

    def sampled(self, num_prompts: int, call: Callable[..., ResultT], *args: Any) -> ResultT:  # Any: of the function
        """What a function finds in samples of so many other prompts, which are not trained on."""
        with self.runtime.role("engine").generate(self.trainer.collector.request(self._number, num_prompts)) as resp:
            return resp.map(call, *args)[0]

    def _observed(self, observer: Callable[[str], Any]) -> float:
        """One step; returns how many samples it trained on."""
        self._clock.observer = observer
        metrics = self.trainer.step(self._number)
        self._clock.observer = None
        self._number += 1
        return metrics["group/trained_samples"]


def refuse_what_is_not_measured(run: ComposedRun, verb: str) -> None:
    """Raises ConfigError for a run whose step is not made by this process alone, one phase after the other."""
    if run.resolved["runtime"] != "local":
        raise ConfigError(f"{verb} measures one process; set runtime=local num_devices=1")
    if len(run.policies) > 1:
        raise ConfigError(f"{verb} measures the training of one policy, this recipe has several. Measure one of each.")
    if run.file.schedule.kind != "sync":
        raise ConfigError(
            f"{verb} measures one phase after the other, and this recipe's schedule lets them overlap. Set "
            "schedule.kind=sync; the metrics of a run measure the overlap (schedule/...)."
        )
    if run.is_staged:
        raise ConfigError(f"{verb} measures one engine, this recipe has stages. Plan it instead: uv run trainer plan.")


def relative_to_first(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Training seconds per sample of every report relative to the first, next to what its FLOPs would make it."""

    def per_sample(report: Mapping[str, Any], quantity: str) -> float:
        return report["phases"]["train"][quantity] / report["geometry"]["samples"]

    first = reports[0]
    rows = []
    for report in reports:
        ratio = per_sample(report, "device_s") / per_sample(first, "device_s")
        expected = per_sample(report, "flops") / per_sample(first, "flops")
        rows.append(
            {
                "recipe": report["recipe"],
                "train_device_s_per_sample": per_sample(report, "device_s"),
                "train_gflop_per_sample": per_sample(report, "flops") / 1e9,
                "ratio": ratio,
                "expected_ratio": expected,
                "off_by": ratio / expected,
            }
        )
    return rows


def replay_variants(
    resp: RolloutResp, pipeline: Any, meter: Meter, samples: int = 8, repeats: int = 5
) -> dict[str, float]:  # Any: the pipeline that generated the response
    """Device seconds of replaying a micro-batch with gradients, in the way of training and in the plain one."""
    part = resp.root_track().slice(0, samples)
    return _variants_of(part.segment, part.conditions, pipeline, meter, repeats)


@functools.singledispatch
def _variants_of(
    segment: object, conditions: Conditions, pipeline: Any, meter: Meter, repeats: int
) -> dict[str, float]:
    """Nothing to compare; Any: a pipeline of the segment's kind."""
    return {}


@_variants_of.register
def _latent_variants(
    segment: LatentSegment, conditions: Conditions, pipeline: DiffusionPipeline, meter: Meter, repeats: int
) -> dict[str, float]:
    """All steps in one forward, and one forward per step."""
    if not segment.sde_indices or segment.params is None:
        return {}
    params = segment.params
    sample_R, step_R = transition_rows(segment.batch_size, segment.sde_indices)

    def batched() -> None:
        pipeline.replay(conditions, segment, sample_R, step_R, params).logp_R.sum().backward()

    def per_step() -> None:
        for step in segment.sde_indices:
            rows = step_R == step
            pipeline.replay(conditions, segment, sample_R[rows], step_R[rows], params).logp_R.sum().backward()

    return {
        "replay_samples": float(segment.batch_size),
        "replay_steps": float(len(segment.sde_indices)),
        **_side_by_side("batched", batched, "per_step", per_step, meter, repeats),
    }


@_variants_of.register
def _text_variants(
    segment: TextSegment, conditions: Conditions, pipeline: AutoregressivePipeline, meter: Meter, repeats: int
) -> dict[str, float]:
    """Samples end to end, and each padded to the longest."""
    params = segment.params
    if not pipeline.is_packed or params is None:
        return {}
    stages = pipeline, AutoregressivePipeline(pipeline.adapter, packed=False)
    packed, padded = (
        lambda stage=stage: stage.replay(conditions, segment, params).logp_N.sum().backward() for stage in stages
    )
    return {
        "replay_samples": float(segment.batch_size),
        "replay_tokens": float(segment.tokens.numel()),
        "replay_longest_tokens": float(max(map(len, segment.unpack("tokens")))),
        **_side_by_side("packed", packed, "padded", padded, meter, repeats),
    }


def _side_by_side(
    ours: str, run: Callable[[], None], plain: str, run_plain: Callable[[], None], meter: Meter, repeats: int
) -> dict[str, float]:
    """Median device seconds of both, taken in turn after one of each to warm up, and the median ratio."""
    pairs = [(_seconds(run, meter), _seconds(run_plain, meter)) for _ in range(repeats + 1)][1:]
    return {
        f"replay_{ours}_device_s": statistics.median(pair[0] for pair in pairs),
        f"replay_{plain}_device_s": statistics.median(pair[1] for pair in pairs),
        "replay_speedup": statistics.median(pair[1] / pair[0] for pair in pairs),
    }


def _seconds(work: Callable[[], None], meter: Meter) -> float:
    with meter.measuring() as spent:
        work()
    return spent.seconds


def _compute_dtype(recipe: Mapping[str, Any]) -> torch.dtype:
    """What the model's products are computed in, as far as the recipe says; float32 on a CPU, which emulates others."""
    if not is_accelerator(recipe["device"]):
        return torch.float32
    return dtype_named(recipe["sampling"].get("autocast_precision") or recipe["bundle"].get("dtype", "fp32"), "dtype")


@dataclass(frozen=True)
class Step:
    """One measured step by phase."""

    wall_s: dict[str, float]
    cpu_s: dict[str, float]
    spent: dict[str, Spent]
    num_trained: float
    """Samples that were trained on."""


def _difference(after: dict[str, dict[str, float]], before: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        kind: {name: seconds - before[kind].get(name, 0.0) for name, seconds in phases.items()}
        for kind, phases in after.items()
    }


def _device_observer(meter: Meter, found: dict[str, Spent]) -> Callable[[str], Any]:
    @contextmanager
    def observe(name: str) -> Generator[None]:
        with meter.measuring() as spent:
            yield
        before = found.get(name, Spent())
        peak_bytes = _largest((before.peak_bytes, spent.peak_bytes))
        found[name] = Spent(before.seconds + spent.seconds, peak_bytes)

    return observe


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _flop_observer(flops: dict[str, int]) -> Callable[[str], Any]:
    @contextmanager
    def observe(name: str) -> Generator[None]:
        with FlopCounter() as counter:
            yield
        flops[name] = flops.get(name, 0) + counter.total

    return observe


def _report(
    run: ComposedRun,
    steps: list[Step],
    flops: dict[str, int],
    rate: float,
    dtype: torch.dtype,
    samples: tuple[int, float],
    variants: dict[str, float],
) -> dict[str, Any]:
    recipe, (num_samples, num_trained) = run.resolved, samples
    phases: dict[str, dict[str, Any]] = {}
    for name in sorted(steps[0].wall_s):
        spent = [step.spent.get(name, Spent()) for step in steps]
        device_s = statistics.median(each.seconds for each in spent)
        phases[name] = {
            "wall_s": statistics.median(step.wall_s[name] for step in steps),
            "cpu_s": statistics.median(step.cpu_s[name] for step in steps),
            "device_s": device_s,
            "peak_device_bytes": _largest(each.peak_bytes for each in spent),
            "flops": flops.get(name, 0),
            "gemm_fraction": flops.get(name, 0) / device_s / rate if device_s > 0 else 0.0,
        }
    totals = [sum(step.wall_s.values()) for step in steps]
    total_device = sum(phase["device_s"] for phase in phases.values())
    driver_device = sum(phase["device_s"] for name, phase in phases.items() if name not in COMPUTE_PHASES)
    return {
        "schema": SCHEMA,
        "recipe": recipe["recipe"],
        "commit": commit(),
        "environment": {
            **versions(),
            "platform": platform.platform(),
            "processor": _processor(),
            "threads": torch.get_num_threads(),
            "device": recipe["device"],
            "gpu": device_name(recipe["device"]),
        },
        "geometry": {
            "prompts": recipe["batch_size"],
            "samples": num_samples,
            "trained_samples": num_trained,
            "sampling": {name: value for name, value in recipe["sampling"].items() if type(value) in (int, float)},
            "micro_batch_size": run.policy.stack.node["micro_batch_size"],
            "forward_batch_size": recipe["engine"].get("forward_batch_size"),
        },
        "repeats": len(steps),
        "step_wall_s": {"min": min(totals), "median": statistics.median(totals), "max": max(totals)},
        "samples_per_s": num_samples / statistics.median(totals),
        "samples_per_device_s": num_samples / total_device,
        "phases": phases,
        "driver_share": driver_device / total_device,
        "gemm_flops_per_device_s": rate,
        "gemm_dtype": str(dtype).removeprefix("torch."),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "variants": variants,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
