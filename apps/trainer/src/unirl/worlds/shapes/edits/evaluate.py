"""Sample an edits checkpoint and judge it: `python -m unirl.worlds.shapes.edits.evaluate --checkpoint DIR`."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from unirl.data.data_source import PromptRow
from unirl.data.datasets import read_rows
from unirl.models.qwen_image_edit.bundle import QwenImageEditBundle
from unirl.models.qwen_image_edit.pipeline import QwenImageEditPipeline
from unirl.reward.worlds.edits import score_edits
from unirl.reward.worlds.edits_grammar import CATEGORIES
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import initial_noise
from unirl.sde.schedule import SigmaSchedule
from unirl.trainer.request import repeated
from unirl.types.media import ImageLists, Images
from unirl.types.sampling import DiffusionSamplingParams
from unirl.worlds.shapes.edits import world
from unirl.worlds.shapes.world import IMAGE_SIDE

logger = logging.getLogger(__name__)

HELDOUT = world.FOLDER / "data" / "heldout.jsonl"
BATCH_SIZE = 128


def load(checkpoint: Path) -> QwenImageEditPipeline:
    """The checkpoint at the size of the world, on its own schedule."""
    area = IMAGE_SIDE**2
    bundle = QwenImageEditBundle(str(checkpoint), image_area=area, condition_area=area)
    schedule = SigmaSchedule(convention="linear", shift=bundle.scheduler_config["shift"])
    return QwenImageEditPipeline(bundle, FlowSDEStrategy(), schedule, decode_batch_size=48)


def edit(
    pipeline: QwenImageEditPipeline, rows: Sequence[PromptRow], *, num_steps: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Results and givens of the rows, [B, 3, 32, 32] in [0, 1]. Noise depends on `seed` and the rows' ids alone."""
    params = DiffusionSamplingParams(
        num_inference_steps=num_steps, guidance_scale=1.0, height=IMAGE_SIDE, width=IMAGE_SIDE, eta=0.0, seed=seed
    )
    primitives = repeated(rows, 1)["primitives"]
    keys = [row.prompt_id for row in rows]
    with pipeline.evaluating():
        conditions = pipeline.encode(primitives, params)
        noise = initial_noise(keys, seed, pipeline.latent_shape(params))
        segment = pipeline.diffuse(conditions, noise, pipeline.sigmas(params), params, noise_keys=keys)
        media = pipeline.decode(segment.clean_latents, params)
    sources = primitives["image"]
    assert isinstance(media, Images) and isinstance(sources, ImageLists)  # noqa: S101 - what the world has
    return media.pixels, torch.stack([images[0] for images in sources.images])


def evaluate(
    checkpoint: Path, prompts: Path = HELDOUT, *, num_samples: int = 256, num_steps: int = 10, seed: int = 1234
) -> Mapping[str, float]:
    """Strict accuracy over the first rows and per category, and the mean soft score."""
    pipeline = load(checkpoint)
    rows = read_rows(prompts)[:num_samples]
    strict: list[float] = []
    soft: list[float] = []
    for start in range(0, len(rows), BATCH_SIZE):
        part = rows[start : start + BATCH_SIZE]
        strict_B, soft_B = score_edits(
            *edit(pipeline, part, num_steps=num_steps, seed=seed), [row.prompt for row in part]
        )
        strict += strict_B.tolist()
        soft += soft_B.tolist()
    found = {"strict": fmean(strict), "soft": fmean(soft)}
    for category in CATEGORIES:
        found[category] = fmean(s for s, row in zip(strict, rows, strict=True) if row.metadata["category"] == category)
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    """Read the command line and print the held-out accuracy of a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--samples", type=int, default=world.NUM_HELDOUT)
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    figures = evaluate(
        arguments.checkpoint, num_samples=arguments.samples, num_steps=arguments.steps, seed=arguments.seed
    )
    logger.info("%s", figures)


if __name__ == "__main__":
    main()
