"""Measures how fast samples move from one worker to another by each data plane, and prints Markdown.

    uv run python apps/trainer/bench/data_planes.py [--megabytes 8 64 512] [--repeats 3] [--planes ray rdt ...]

A worker of one group holds 16 samples whose latents have the size; the worker of another group takes them over, as it
does between an engine and what trains. Both sides compute a checksum of every tensor, outside the timing, and the
script ends with status 1 where one differs. Figures are medians, against a memory copy of the same bytes in this
process. Ray is started with more cores than there are, since TransferQueue reserves three that it does not use up.
"""

# ruff: noqa: INP001 - a script, no package
from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch

from unirl.distributed.group.framework import ray_module
from unirl.distributed.group.ray_runtime import RayRuntime
from unirl.distributed.tensor.planes.choice import make_plane
from unirl.distributed.worker import WorkerContext
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment
from unirl.types.weights import tensor_checksum

NUM_SAMPLES = 16


class Maker:
    """Stands for an engine."""

    @distributed(Dispatch.BROADCAST, Collect.HOLD)
    def make(self, megabytes: int) -> RolloutResp:
        """Samples whose latents have this size together."""
        generator = torch.Generator().manual_seed(megabytes)
        width = megabytes * 2**20 // 4 // (NUM_SAMPLES * 4 * 16)
        latents = torch.randn(NUM_SAMPLES, 4, 16, 1, width, generator=generator)
        segment = LatentSegment(
            latents=latents,
            sigmas=torch.linspace(1, 0, 5),
            indices=[1, 2, 3, 4],
            sde_indices=[1, 2],
            sde_logp=torch.randn(NUM_SAMPLES, 2, generator=generator),
            params=DiffusionSamplingParams(num_inference_steps=4, guidance_scale=1.0, height=8, width=8),
        )
        names = [f"sample {row}" for row in range(NUM_SAMPLES)]
        return RolloutResp(tracks={"image": RolloutTrack(sample_ids=names, segment=segment)})


def build_maker(context: WorkerContext) -> dict[str, object]:
    """A worker of either group."""
    torch.set_num_threads(1)
    return {"maker": Maker()}


def checksums(resp: RolloutResp) -> tuple[str, ...]:
    """Checksums of the fields with a row per sample."""
    segment = resp.root_track().segment
    if not isinstance(segment, LatentSegment) or segment.latents is None or segment.sde_logp is None:
        raise TypeError(f"samples came back with {type(segment).__name__}")
    return tuple(tensor_checksum(tensor) for tensor in (segment.latents, segment.sde_logp))


def copy_s(megabytes: int) -> float:
    """Seconds of a memory copy."""
    source = torch.ones(megabytes * 2**18)
    target = torch.zeros_like(source)
    begin = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - begin


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--planes", nargs="+", default=["ray", "rdt", "transfer_queue"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    ray_module().init(
        address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=3 * 10**9
    )
    lines = ["| plane | " + " | ".join(f"{size} MB: ms | MB/s | / copy" for size in options.megabytes) + " |"]
    lines.append("|---" * (1 + 3 * len(options.megabytes)) + "|")
    differing = []
    for name in options.planes:
        plane = make_plane(name, {}, 120.0)
        cells = [name]
        with (
            RayRuntime(build_maker, num_devices=1, timeout_s=300, plane=plane) as engines,
            RayRuntime(build_maker, num_devices=1, timeout_s=300, plane=plane) as training,
        ):
            for size in options.megabytes:
                spent, copies = [], []
                for _ in range(options.repeats + 1):
                    copies.append(copy_s(size))
                    with engines.role("maker").make(size) as held:
                        expected = held.map(checksums)
                        begin = time.perf_counter()
                        held.move_to(training)
                        spent.append(time.perf_counter() - begin)
                        if held.map(checksums) != expected:
                            differing.append(f"{name}, {size} MB")
                wall, copy = statistics.median(spent[1:]), statistics.median(copies[1:])  # the first warms up
                cells += [f"{wall * 1e3:,.0f}", f"{size / wall:,.0f}", f"{wall / copy:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    ray_module().shutdown()
    sys.stdout.write("\n".join(lines) + "\n")
    if differing:
        sys.stderr.write(f"other bits arrived than were sent: {'; '.join(differing)}\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
