"""How fast `trainer view` is: first paint over 50 runs of 10,000 steps, and frames while 10,000 samples are scrolled.

    uv run python apps/trainer/bench/viewer.py --runs 50 --steps 10000 --samples 10000

Needs Debian's `chromium` (or --browser), which is driven by its own protocol. Prints lines of Markdown.
"""

# ruff: noqa: INP001, T201 - a script, no package

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import numpy as np
import psutil
from aiohttp import web
from browser import Browser, Tab
from PIL import Image

from unirl.viewer.server import make_app

NUM_METRICS = 45
"""Per line, as a run of worlds/arithmetic/grpo has."""
SCROLL_S = 5.0


def write_run(folder: Path, seed: int, num_steps: int) -> None:
    """A run directory with noisy curves."""
    folder.mkdir(parents=True)
    draw = random.Random(seed)  # noqa: S311 - not secret
    (folder / "config.yaml").write_text(f"recipe: bench/{seed % 10}\nseed: {seed}\nnum_rollouts: {num_steps}\n")
    names = ["reward/mean", "eval/reward", "train/loss", "train/grad_norm", "group/zero_std_ratio", "policy/approx_kl"]
    names += [f"section{number % 6}/metric{number}" for number in range(NUM_METRICS - len(names))]
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, num_steps + 1):
            level = math.log1p(step) / 10
            row = {name: level + draw.gauss(0, 0.1) for name in names}
            file.write(json.dumps({"step": step, **row}) + "\n")


def write_samples(folder: Path, num_samples: int, size: int, per_step: int = 200) -> None:
    """Records of images, one file each, as a run writes them; those of the first step under other names, too."""
    pixels = np.random.default_rng(0).integers(0, 255, (size, size, 3), dtype=np.uint8)
    first = folder / "samples" / "rollout-000001"
    for step in range(1, num_samples // per_step + 1):
        media = folder / "samples" / f"rollout-{step:06d}"
        media.mkdir(parents=True)
        with media.with_suffix(".jsonl").open("w", encoding="utf-8") as file:
            for number in range(per_step):
                image = media / f"image-{number:04d}.png"
                if step == 1:
                    Image.fromarray(np.roll(pixels, number, axis=0)).save(image)
                else:
                    image.hardlink_to(first / image.name)
                line = {
                    "version": 1, "kind": "rollout", "step": step, "sample_id": f"s{number}", "track": "image",
                    "group_id": f"g{number // 8}", "group_size": 8, "group_reward_std": 0.1,
                    "prompt_id": f"g{number // 8}",
                    "parent_id": None, "parent_track": None, "prompt": f"an image of number {number // 8}", "given": [],
                    "drawn_from": None, "scores": {"reward": number / per_step}, "error": None, "advantage": 0.1,
                    "policy_version": step - 1, "end": None, "counts": {}, "metadata": {},
                    "media": {
                        "kind": "image", "file": f"{media.name}/image-{number:04d}.png", "height": size, "width": size
                    },
                }  # fmt: skip
                file.write(json.dumps(line) + "\n")


PAINTS = """new Promise(resolve => {
  const seen = () => {
    const paint = performance.getEntriesByName('first-contentful-paint')[0];
    const done = document.querySelectorAll(WANTED).length >= NUM;
    if (paint && done) resolve({paint: paint.startTime, shown: performance.now()});
    else setTimeout(seen, 10);
  };
  seen();
})"""
SCROLLS = """new Promise(resolve => {
  const place = document.querySelector('.scrolls'), frames = [], begin = performance.now();
  let before = begin;
  const frame = now => {
    frames.push(now - before);
    before = now;
    place.scrollTop = (now - begin) * SPEED;
    if (now - begin < LENGTH) requestAnimationFrame(frame);
    else resolve({frames, top: place.scrollTop});
  };
  requestAnimationFrame(frame);
})"""


async def first_paint(tab: Tab, address: str, wanted: str, num: int) -> tuple[float, float]:
    """Milliseconds to the first paint of content, and until `num` of the wanted elements are there."""
    await tab.open("about:blank")
    await tab.open(address)
    script = PAINTS.replace("WANTED", json.dumps(wanted)).replace("NUM", str(num))
    found = await tab.value(script, timeout_s=120)
    return found["paint"], found["shown"]


async def measured(args: argparse.Namespace, folder: Path) -> None:
    """Serve the folder from this process and ask a browser."""
    process = psutil.Process()
    runner = web.AppRunner(make_app(folder), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    print("| page | first paint, ms | complete, ms |\n|---|---|---|")
    async with aiohttp.ClientSession() as session, Browser(session, args.browser) as browser, browser.tab() as tab:
        for name, page, wanted, num in (
            (f"runs, first visit, {args.runs} runs", "#/runs", "tbody tr", args.runs),
            (f"curves, coarse, {args.runs} runs", "#/curves", ".chart canvas", 2),
            (f"samples, {args.samples} samples", "#/gallery?run=run-00", ".card img", 6),
        ):
            paint, shown = await first_paint(tab, f"{base}{page}", wanted, num)
            print(f"| {name} | {paint:.0f} | {shown:.0f} |")
        begin = time.perf_counter()
        await tab.open("about:blank")
        await tab.open(f"{base}#/curves")
        await tab.value(PAINTS.replace("WANTED", "'.chart canvas'").replace("NUM", "2"), timeout_s=120)
        whole = "document.querySelectorAll('.chart').length > 1 && !document.body.textContent.includes('still reading')"
        while not await tab.value(whole):
            await asyncio.sleep(0.2)
        print(f"| curves, whole, {args.runs} runs | | {(time.perf_counter() - begin) * 1e3:.0f} |")
        paint, shown = await first_paint(tab, f"{base}#/curves", ".chart canvas", 2)
        print(f"| curves, second visit | {paint:.0f} | {shown:.0f} |")
        await first_paint(tab, f"{base}#/gallery?run=run-00", ".card img", 6)
        print("\n| scrolling 10,000 samples | frames | median, ms | 95 %, ms | longest, ms |\n|---|---|---|---|---|")
        for speed in (1.0, 5.0):
            script = SCROLLS.replace("SPEED", str(speed)).replace("LENGTH", str(SCROLL_S * 1e3))
            frames = sorted((await tab.value(script, timeout_s=60))["frames"][1:])
            quantile = frames[int(len(frames) * 0.95)]
            print(
                f"| {speed:.0f},000 pixels per second | {len(frames)} | {statistics.median(frames):.1f} "
                f"| {quantile:.1f} | {frames[-1]:.1f} |"
            )
        print(f"\nserver: {process.memory_info().rss / 1e6:.0f} MB")
        for line in tab.said:
            print(f"the page said: {line}", file=sys.stderr)
    await runner.cleanup()


def main() -> None:
    """Make the runs, in --folder if that has none yet, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=64, help="of the images, which are noise: 600 makes 1.08 MB")
    parser.add_argument("--folder", type=Path, help="where the runs are, or are to be kept")
    parser.add_argument("--browser", default="chromium")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or Path(made)
        if not (folder / "run-00").exists():
            for seed in range(args.runs):
                write_run(folder / f"run-{seed:02d}", seed, args.steps)
            write_samples(folder / "run-00", args.samples, args.size)
        asyncio.run(measured(args, folder))


if __name__ == "__main__":
    main()
