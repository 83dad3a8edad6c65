"""The report of a device as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unirl.types.errors import as_sentence

Values = Mapping[str, Any]  # Any: JSON


def page(found: Values) -> str:
    """The page of a report."""
    environment = found["environment"]
    hardware = environment["hardware"] or environment["device"]
    told = ", ".join(f"{name} {environment[name]}" for name in ("torch", "transformers", "diffusers"))
    lines = [
        f"# {hardware}",
        "",
        f"Written by `scripts/gpu_report` in {found['seconds']:.0f} s, at commit {found['commit']}, with {told}.",
        "",
        "## Checks",
        "",
        *_table(("case", "check", "found", "bounds", ""), map(_check, found["checks"])),
    ]
    for name, reason in found["failures"].items():
        lines += ["", f"{name} failed: {as_sentence(reason)}"]
    for name, case in found["cases"].items():
        lines += ["", *_case(name, case)]
    if found["pushes"] is not None:
        lines += ["", *_pushes(found["pushes"])]
    return "\n".join(lines) + "\n"


def _check(check: Values) -> tuple[str, ...]:
    value = "not measured" if check["value"] is None else f"{check['value']:.3g}"
    bounds = f"{check['low']:.3g} to {check['high']:.3g}"
    return check["case"], check["check"], value, bounds, "holds" if check["holds"] else "**does not hold**"


def _case(name: str, case: Values) -> Iterator[str]:
    yield f"## {name}"
    yield ""
    samples = f"{case['geometry']['samples']} samples per step, {case['samples_per_s']:.3g} per second"
    yield f"`{case['recipe']}` in {case['dtype']}: {samples}."
    yield ""
    yield "```"
    yield " ".join(case["overrides"])
    yield "```"
    yield ""
    header = ("phase", "s", "s, planned", f"bytes, {case['bytes_are']}", "bytes, rehearsed", "FLOP", "FLOP, rehearsed")
    yield from _table((*header, "of the matrix rate"), _phases(case["phases"]))
    yield ""
    gap = case["log_prob_gap"]
    yield (
        f"- Log-probs of {gap['samples']} samples, rollout and replay: at most {gap['max']:.3g} nats apart, "
        f"{gap['mean']:.3g} on average."
    )
    for phase, calls in case["attention"].items():
        kernels = ", ".join(f"{kernel} ({num} calls)" for kernel, num in calls.items())
        yield f"- Attention in {phase}: {kernels or 'no fused kernel'}."
    for note in case["notes"]:
        yield f"- Of the rehearsal: {as_sentence(note)}"


def _phases(phases: Mapping[str, Values]) -> Iterator[tuple[str, ...]]:
    for name, phase in phases.items():
        yield (
            name,
            _number(phase["wall_s"]),
            _number(phase["planned_s"]),
            _large(phase["peak_bytes"]),
            _large(phase["rehearsed_bytes"]),
            _large(phase["flops"]),
            _large(phase["rehearsed_flops"]),
            _number(phase["gemm_fraction"] or None),
        )


def _pushes(pushes: Values) -> Iterator[str]:
    yield "## Pushes"
    yield ""
    yield f"{pushes['megabytes']:.0f} MB in {pushes['tensors']} tensors to an engine in another process."
    yield ""
    rows = [
        (name, _number(own["megabytes"]), _number(own["seconds"]), _number(own["megabytes"] / own["seconds"]))
        for name, own in pushes["pushes"].items()
    ]
    yield from _table(("", "MB", "s", "MB per s"), rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _large(value: float | None) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value and value >= size:
            return f"{value / size:.3g} {unit}"
    return _number(value or None)


def _table(header: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
