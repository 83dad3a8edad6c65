"""A rehearsal as lines for people, and whether it fits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from unirl.app.rehearsal.knobs import knobs_of
from unirl.app.rehearsal.rehearse import Rehearsed
from unirl.types.errors import ConfigError

GB = 1e9
SMALLEST = 0.005
"""Share of a peak that is named."""
SLACK, FIXED_BYTES = 1.05, 1.5e9
"""What a real device takes beyond what is counted: fragments of the allocator, and the context with its libraries."""
NUM_HOLDERS = 3


def lines(found: Rehearsed) -> Iterator[str]:
    """Peaks by phase, then what was computed, sent and read."""
    shares = [
        f"{f'{track}: ' if len(found.works) > 1 else ''}{work.num_made} of {work.num_samples} samples made, "
        f"{work.num_trained} trained on"
        for track, work in found.works.items()
    ]
    yield f"{found.recipe}: rank 0 of {found.num_ranks}, {', '.join(shares)}, in {found.cpu_s:.0f} CPU s"
    for phase, peak in found.peaks.items():
        parts = sorted(peak.parts.items(), key=lambda part: -part[1])
        named = ", ".join(f"{name} {size_text(size)}" for name, size in parts if size >= SMALLEST * peak.num_bytes)
        mark = "  <- most" if phase == found.most else ""
        yield f"  {phase:8} {size_text(peak.num_bytes):>8} per device: {named}{mark}"
    if found.host_bytes:
        yield f"  host     {size_text(found.host_bytes):>8} of weights, states and activations rest in host memory"
    computed = ", ".join(f"{phase} {flops / 1e12:.3g}" for phase, flops in found.flops.items() if flops)
    yield f"  TFLOP of a step, per device: {computed}"
    for phase, kinds in found.collectives.items():
        sent = ", ".join(f"{kind} {size_text(size)}" for kind, size in sorted(kinds.items()) if size >= 1e6)
        if sent:
            yield f"  collectives in {phase}, of what was made: {sent}"
    reads = sorted(found.reads.items(), key=lambda read: -read[1])
    if reads:
        yield f"  {sum(found.reads.values())} reads of the device, most often {reads[0][0]}"
    for note in found.notes:
        yield f"  {note}"


def limit_of(text: str, option: str = "--fits") -> float:
    """Bytes of a size such as 80GB. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*GB", text)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"{option} takes the memory of a device in GB, such as 80GB, not {text!r}.")
    return float(match[1]) * GB


def expected_bytes(counted: float) -> float:
    """What a real device takes of counted bytes."""
    return counted * SLACK + FIXED_BYTES


def verdict(found: Rehearsed, limit: float) -> tuple[bool, list[str]]:
    """True if the counted bytes fit into a device, and lines that say so, with the largest holders if they do not."""
    peak = found.peaks[found.most]
    expected = expected_bytes(peak.num_bytes)
    said = f"counted {size_text(peak.num_bytes)} in {found.most}, about {size_text(expected)} on a real device"
    if peak.num_bytes <= limit:
        close = "" if expected <= limit else ", which may be too much"
        return True, [f"  fits {size_text(limit)}: {said}{close}"]
    largest = sorted(peak.parts.items(), key=lambda part: -part[1])[:NUM_HOLDERS]
    return False, [
        f"  does not fit {size_text(limit)}: {said}. The largest holders:",
        *(f"    {name} {size_text(size)}{_knob(found.most, name)}" for name, size in largest),
    ]


def _knob(phase: str, category: str) -> str:
    found = [knob.says for knob in knobs_of(phase, category)]
    if len(found) < 2:
        return f": {found[0]}" if found else ""
    return f": {', '.join(found[:-1])}, or {found[-1]}"


def size_text(num_bytes: float) -> str:
    return f"{num_bytes / GB:.2f} GB" if num_bytes >= 0.1 * GB else f"{num_bytes / 1e6:.3g} MB"
