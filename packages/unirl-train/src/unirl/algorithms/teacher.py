"""What a teacher must share with its student: the tokens, or the latent space."""

from __future__ import annotations

import torch

from unirl.sde.noise import keyed_normal
from unirl.types.errors import ConfigError
from unirl.types.media import Images
from unirl.types.protocols.models import AutoregressivePipeline, DiffusionPipeline
from unirl.types.sampling import DiffusionSamplingParams

PIXEL_TOLERANCE = 0.05
"""Largest difference of one decoder's pixels, in [0, 1], between precisions; those of two decoders differ by more."""


def require_same_tokens(student: AutoregressivePipeline, teacher: AutoregressivePipeline, name: str) -> None:
    """Raises ConfigError if a token of one vocabulary is none, or another, of the other: log-probs of the student's
    tokens would be of other texts."""
    ours, theirs = student.vocabulary, teacher.vocabulary
    if ours == theirs:
        return
    differing = sorted({token for token, _ in set(ours.items()) ^ set(theirs.items())})
    raise ConfigError(
        f"the teacher {name!r} has another tokenizer: {len(theirs)} tokens against the student's {len(ours)}, and "
        f"{len(differing)} that only one has or numbers otherwise, such as {differing[:3]}. Take a teacher of the "
        "student's family."
    )


def require_same_latents(
    student: DiffusionPipeline, teacher: DiffusionPipeline, params: DiffusionSamplingParams, name: str
) -> None:
    """Raises ConfigError if one latent is not the same image to both: shapes differ, or decoded pixels do."""
    ours, theirs = student.latent_shape(params), teacher.latent_shape(params)
    if ours != theirs:
        raise ConfigError(
            f"the teacher {name!r} has another latent space: a latent is {theirs}, the student's {ours}. Take a "
            "teacher with the student's autoencoder."
        )
    latent = keyed_normal(["teacher"], 0, ours)
    pixels = []
    for pipeline in (student, teacher):
        with pipeline.evaluating():
            media = pipeline.decode(latent, params)
        pixels.append((media.pixels if isinstance(media, Images) else media.frames).float().cpu())
    if pixels[0].shape != pixels[1].shape or not torch.allclose(pixels[0], pixels[1], rtol=0, atol=PIXEL_TOLERANCE):
        gap = float((pixels[0] - pixels[1]).abs().max()) if pixels[0].shape == pixels[1].shape else float("nan")
        raise ConfigError(
            f"the teacher {name!r} has another latent space: one latent decodes to images {tuple(pixels[1].shape)} "
            f"and {tuple(pixels[0].shape)} that differ by {gap:.3g} of the range of a pixel. Take a teacher with the "
            "student's autoencoder."
        )
