"""`trainer profile`: one training step under torch's profiler, a trace for Perfetto, and the largest costs in words."""

from __future__ import annotations

import gzip
import json
import tempfile
import threading
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from unirl.app.bench import refuse_what_is_not_measured
from unirl.config.runs import ComposedRun
from unirl.trainer.build.assembly import make_trainer
from unirl.trainer.build.launch import make_runtime
from unirl.trainer.clock import PhaseClock
from unirl.types.devices import is_accelerator

TRACE = "trace.json.gz"
SUMMARY = "profile.json"
MARK = "phase "
"""What the name of a phase begins with in the trace."""
NUM_COSTS = 5
HOST = "host"
"""Wall time of a phase in which no operator ran: Python, and waiting."""
KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention", "_softmax", "flash"),
    "convolution": ("conv", "mkldnn", "cudnn"),
    "matrix products": ("mm", "linear", "matmul", "bmm", "gemm"),
    "random numbers": ("rand", "normal_", "uniform_", "bernoulli"),
    "normalisation": ("norm",),
    "optimizer": ("_foreach", "_fused", "adam", "sgd"),
    "copies": ("copy", "cat", "clone", "contiguous", "stack", "to_copy", "memcpy", "memset", "fill_", "zero"),
    "indexing": ("index", "gather", "scatter", "embedding", "select", "slice", "where", "masked"),
    "collectives": ("nccl", "gloo", "all_gather", "reduce_scatter", "all_reduce"),
}
"""Kind of work -> parts of operators' names, the first match counts; what is left is elementwise."""
ADVICE: Mapping[str, str] = {
    "attention": "It grows with the square of the sequence: fewer tokens cost less (sampling.height, sampling.width, "
    "sampling.num_frames, sampling.max_new_tokens).",
    "convolution": "Convolutions are the VAE or a scorer: pipeline.decode_batch_size and the scorer's batch_size "
    "decide how full they are.",
    "matrix products": "This is the model itself. Where the device is not full, raise stack.micro_batch_size "
    "(training) or engine.forward_batch_size (rollout); fewer steps cost less: sampling.num_inference_steps, "
    "algorithm.step_fraction.",
    "normalisation": "Compile the blocks, which joins these operators with their neighbours: "
    "backend.fsdp.compile=true.",
    "optimizer": "Train fewer weights (parts/train=lora), or fewer updates: stack.num_updates_per_batch.",
    "copies": "Tensors are moved or cast: LoRA, mixed precision and sharding cast weights at every forward. Larger "
    "micro-batches do it less often; backend.fsdp.compile=true joins casts with products.",
    "indexing": "Rows are gathered one by one: larger micro-batches gather more at once.",
    "random numbers": "Noise is drawn per sample, so that samples do not depend on batches. It is needed.",
    "collectives": "Devices wait for each other: divide the model over fewer of them (docs/guides/axes.md), or take "
    "larger micro-batches.",
    "elementwise": "Small operators between products. Compile the blocks: backend.fsdp.compile=true.",
    HOST: "No operator ran: Python between small operators, or waiting for another process. Larger micro-batches, "
    "engine.forward_batch_size; if it waits, a schedule that overlaps (docs/guides/async.md).",
}
"""Kind of work -> what to change."""


@dataclass(frozen=True)
class Cost:
    """Time of one kind of work in one phase."""

    phase: str
    kind: str
    seconds: float
    share: float
    """Its seconds over those of the whole step."""
    calls: int
    largest: str
    """The operator with most of it."""
    advice: str


def profile_recipe(run: ComposedRun, folder: Path, *, warmup: int = 1) -> list[Cost]:
    """Run `warmup` steps and one more under the profiler; writes the trace and the summary into `folder`, which exists.

    Returns the largest costs. Raises ConfigError for what `bench` does not measure either.
    """
    refuse_what_is_not_measured(run, "profile")
    clock = PhaseClock()
    activities = {ProfilerActivity.CPU}
    if is_accelerator(run.resolved["device"]):
        activities |= supported_activities()
    with tempfile.TemporaryDirectory() as place, make_runtime(run, Path(place)) as runtime:
        trainer = make_trainer(replace(run, evaluation=None), runtime, Path(place), [], threading.Event(), clock)
        runtime.role("stack").prepare()
        for step in range(warmup):
            trainer.step(step)
        clock.observer = _marked
        with profile(activities=activities, profile_memory=True, acc_events=True) as profiled:
            trainer.step(warmup)
    profiled.export_chrome_trace(str(folder / TRACE))
    _draw_memory(folder / TRACE)
    costs = largest_costs(profiled.events() or [], on_device=len(activities) > 1)
    summary = {"recipe": run.resolved["recipe"], "trace": TRACE, "costs": [asdict(cost) for cost in costs]}
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return costs[:NUM_COSTS]


@contextmanager
def _marked(name: str) -> Generator[None]:
    with record_function(f"{MARK}{name}"):
        yield


def kind_of_work(name: str) -> str:
    """The kind of an operator or kernel."""
    lowered = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lowered for part in parts)), "elementwise")


def largest_costs(events: Sequence[Any], *, on_device: bool) -> list[Cost]:
    """Costs of a profiled step, largest first. events: FunctionEvents of torch; on_device: count the device's time, not
    the host's. An event belongs to the phase in which it began, whatever thread it ran in."""
    phases = [event for event in events if event.name.startswith(MARK) and event.time_range.elapsed_us() > 0]
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    operators: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    calls: dict[tuple[str, str], int] = defaultdict(int)
    busy: dict[str, float] = defaultdict(float)
    for event in events:
        if event.name.startswith(MARK):
            continue
        spent = (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6
        phase = _phase_of(event, phases)
        if phase is None or spent <= 0:
            continue
        key = phase, kind_of_work(event.name)
        seconds[key] += spent
        calls[key] += 1
        operators[key][event.name] += spent
        busy[phase] += spent
    wall: dict[str, float] = defaultdict(float)
    for event in phases:
        wall[event.name.removeprefix(MARK)] += event.time_range.elapsed_us() / 1e6
    for phase, whole in wall.items():
        if (idle := whole - busy[phase]) > 0:
            seconds[phase, HOST] = idle
    total = sum(wall.values())
    costs = [
        Cost(phase, kind, spent, spent / total, calls[phase, kind], _first(operators[phase, kind]), ADVICE[kind])
        for (phase, kind), spent in seconds.items()
    ]
    return sorted(costs, key=lambda cost: -cost.seconds)


def _phase_of(event: Any, phases: Sequence[Any]) -> str | None:
    for phase in phases:
        if phase.time_range.start <= event.time_range.start <= phase.time_range.end:
            return phase.name.removeprefix(MARK)
    return None


def _first(operators: Mapping[str, float]) -> str:
    return max(operators, key=lambda name: operators[name]) if operators else ""


def _draw_memory(path: Path) -> None:
    """Make allocated bytes, which the trace has as instants, a curve that Perfetto draws: one per device."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    trace["traceEvents"] += list(_counters(trace["traceEvents"]))
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
        json.dump(trace, file)


def _counters(events: Iterable[Mapping[str, Any]]) -> Generator[dict[str, Any]]:
    for event in events:
        if event.get("name") == "[memory]" and "Total Allocated" in event.get("args", {}):
            device = {0: "host"}.get(event["args"].get("Device Type"), f"device {event['args'].get('Device Id', 0)}")
            allocated = {"bytes": event["args"]["Total Allocated"]}
            yield {"ph": "C", "name": f"memory of {device}", "pid": event["pid"], "ts": event["ts"], "args": allocated}


def as_text(costs: Sequence[Cost], folder: Path) -> str:
    """The costs for a terminal."""
    lines = []
    for place, cost in enumerate(costs, start=1):
        most = f", mostly {cost.largest} in {cost.calls:,} calls" if cost.largest else ""
        lines.append(f"{place}. {cost.phase}: {cost.kind} {cost.seconds:.2f} s, {cost.share:.0%} of the step{most}")
        lines.append(f"   {cost.advice}")
    lines.append(f"trace      {folder / TRACE}  (drop it on ui.perfetto.dev, which keeps it in the browser)")
    lines.append(f"all costs  {folder / SUMMARY}")
    return "\n".join(lines) + "\n"
