"""Our rollout next to the stock pipeline's own loop, and our replay next to one forward per step. Prints Markdown.

    uv run python apps/trainer/bench/stock_pipelines.py [FAMILY ...] [--batch N] [--turns N]

The shipped miniatures, float32, one thread. Both sides get the same prompts, noise and steps, encode every prompt and
decode every sample; ours also with noise in every step and log-probs, as rollouts for training are. Both sides of a row
take turns in one process and CPU seconds are counted; a ratio is the median over the turns, theirs over ours: above 1
ours is faster.
"""

# ruff: noqa: INP001 - a script, no package
from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch

from unirl.app.environment import register_resolvers
from unirl.config import instantiate
from unirl.config.recipes import compose, resolve
from unirl.data.data_source import MultimodalRLDataSource
from unirl.models.embedding_cache import EmbeddingCache
from unirl.sde.loop import transition_rows
from unirl.sde.noise import initial_noise
from unirl.types.media import Texts
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

RECIPES = {
    "sd3": "worlds/shapes/nft",
    "wan": "worlds/moves/nft",
    "flux2": "worlds/shapes/flux2_klein",
}
ETA = 0.9
"""Noise of the stochastic rollout."""
REPLAYED = 8
"""Samples of a micro-batch."""
Call = Callable[[], object]


class Miniature:
    """A shipped miniature, loaded by our code and by the stock pipeline, and one batch of prompts for both."""

    def __init__(self, recipe: Mapping[str, Any], batch_size: int) -> None:  # Any: a recipe's values
        self.bundle = instantiate(recipe["bundle"])
        self.ours = instantiate(recipe["pipeline"], bundle=self.bundle)
        folder = recipe["bundle"]["pretrained_model"]
        self.stock: Any = diffusers.DiffusionPipeline.from_pretrained(folder)  # Any: of the folder's own class
        self.stock.set_progress_bar_config(disable=True)
        params: DiffusionSamplingParams = instantiate(recipe["sampling"])
        steps = params.num_inference_steps
        self.stochastic = dataclasses.replace(
            params, eta=ETA, sde_indices=list(range(steps)), keep_latents="transitions"
        )
        self.plain = dataclasses.replace(params, eta=0.0, sde_indices=[], keep_latents="last")
        rows = MultimodalRLDataSource(recipe["data"]["path"], seed=0).rows
        self.prompts = [rows[i % len(rows)].prompt for i in range(batch_size)]
        self.keys = [f"r0:{i}" for i in range(batch_size)]

    def noise(self, params: DiffusionSamplingParams) -> torch.Tensor:
        """What both sides start from."""
        return initial_noise(self.keys, params.seed, self.ours.latent_shape(params))

    def sample(self, params: DiffusionSamplingParams) -> tuple[LatentSegment, Any]:  # Any: conditions
        """Our rollout: prompts not seen before, trajectory, media."""
        self.ours.adapter.embedding_cache = EmbeddingCache()
        with self.ours.evaluating():
            conditions = self.ours.encode({"text": Texts(texts=self.prompts)}, params)
            sigmas = self.ours.sigmas(params)
            segment = self.ours.diffuse(conditions, self.noise(params), sigmas, params, noise_keys=self.keys)
            self.ours.decode(segment.clean_latents, params)
        return segment, conditions

    def stock_call(self) -> None:
        """The stock pipeline from the same prompts to media."""
        params = self.plain
        frames = {"num_frames": params.num_frames} if params.num_frames > 1 else {}
        with torch.no_grad():
            self.stock(
                prompt=self.prompts,
                num_inference_steps=params.num_inference_steps,
                guidance_scale=params.guidance_scale,
                height=params.height,
                width=params.width,
                max_sequence_length=params.max_sequence_length,
                output_type="pt",
                **frames,
            )

    def replays(self) -> tuple[Call, Call]:
        """All rows of a micro-batch in one forward and backward, and one per step."""
        segment, conditions = self.sample(self.stochastic)
        part = segment.select(list(range(REPLAYED)))
        rows = {slot: condition.select(list(range(REPLAYED))) for slot, condition in conditions.items()}
        sample_R, step_R = transition_rows(REPLAYED, part.sde_indices)

        def replay(chosen: torch.Tensor) -> None:
            stats = self.ours.replay(rows, part, sample_R[chosen], step_R[chosen], self.stochastic)
            stats.logp_R.sum().backward()

        def step_by_step() -> None:
            for step in part.sde_indices:
                replay(step_R == step)

        return lambda: replay(step_R >= 0), step_by_step


def seconds(work: Call) -> float:
    """CPU seconds of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def side_by_side(ours: Call, theirs: Call, turns: int) -> tuple[float, float, float]:
    """Median seconds of both after one of each to warm up, and the median ratio, theirs over ours."""
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(turns + 1)][1:]
    return (
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        statistics.median(pair[1] / pair[0] for pair in pairs),
    )


def main() -> None:
    """Print a row per family and comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(RECIPES))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    register_resolvers()
    sys.stdout.write("| family | what | ours, CPU s | theirs, CPU s | theirs / ours |\n|---|---|---|---|---|\n")
    for name in options.families:
        miniature = Miniature(resolve(compose(RECIPES[name])), options.batch)
        batched, step_by_step = miniature.replays()
        rows: list[tuple[str, Call, Call]] = [
            ("rollout", lambda one=miniature: one.sample(one.plain), miniature.stock_call),
            (
                "rollout with noise and log-probs",
                lambda one=miniature: one.sample(one.stochastic),
                miniature.stock_call,
            ),
            (f"replay of {REPLAYED} samples", batched, step_by_step),
        ]
        for what, ours, theirs in rows:
            mine, other, ratio = side_by_side(ours, theirs, options.turns)
            sys.stdout.write(f"| {name} | {what} | {mine:.3f} | {other:.3f} | **{ratio:.2f}** |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
