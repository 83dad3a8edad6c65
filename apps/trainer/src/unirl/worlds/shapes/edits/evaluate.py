"""Sample an edits checkpoint and judge it: `python -m unirl.worlds.shapes.edits.evaluate --checkpoint DIR`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from unirl.data.data_source import PromptRow
from unirl.data.datasets import read_rows
from unirl.models.qwen_image_edit.bundle import QwenImageEditBundle
from unirl.models.qwen_image_edit.pipeline import QwenImageEditPipeline
from unirl.pretraining.judging import accuracy, print_accuracy
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

HELDOUT = world.FOLDER / "data" / "heldout.jsonl"


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
    """See `unirl.pretraining.judging.accuracy`, over the first rows."""
    pipeline = load(checkpoint)

    def score(part: Sequence[PromptRow]) -> tuple[Tensor, Tensor]:
        results, givens = edit(pipeline, part, num_steps=num_steps, seed=seed)
        return score_edits(results, givens, [row.prompt for row in part])

    return accuracy(score, read_rows(prompts)[:num_samples], lambda row: row.metadata["category"], CATEGORIES)


def main() -> None:
    """Log the held-out accuracy of a checkpoint."""
    print_accuracy(Path, evaluate, {"heldout": HELDOUT}, __doc__, num_samples=world.NUM_HELDOUT)


if __name__ == "__main__":
    main()
