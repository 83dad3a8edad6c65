"""Sample a sounds checkpoint and judge it: `python -m unirl.worlds.sounds.evaluate --checkpoint DIR [--steps 10]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from unirl.models.ltx2.adapter import LTX2Adapter
from unirl.models.ltx2.bundle import LTX2Bundle
from unirl.pretraining.judging import accuracy, print_accuracy
from unirl.pretraining.sampling import shifted_sigmas
from unirl.reward.worlds.sounds import score_sounds, score_videos
from unirl.reward.worlds.sounds_grammar import TONES, parse_prompt
from unirl.types.errors import ContractError
from unirl.types.media import Texts, Videos
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams
from unirl.worlds.sounds import text, world

SHIFT = 3.0
"""Shift of the noise schedule."""
PARAMS = DiffusionSamplingParams(
    height=world.IMAGE_SIDE,
    width=world.IMAGE_SIDE,
    num_frames=world.NUM_FRAMES,
    guidance_scale=1.0,
    max_sequence_length=text.TOKENS,
)


def encode_prompts(model: LTX2Adapter, prompts: Sequence[str]) -> Conditions:
    """What the transformer reads of prompts."""
    return model.encode({"text": Texts(texts=list(prompts))}, PARAMS)


@torch.no_grad()
def sample(model: LTX2Adapter, prompts: Sequence[str], noise: Tensor, num_steps: int) -> Videos:
    """Videos with sound, by Euler steps from noise [B, ...]."""
    latents, conditions = noise, encode_prompts(model, prompts)
    sigmas = shifted_sigmas(num_steps, SHIFT)
    for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
        velocity = model.predict(latents, sigma.expand(len(latents)), conditions, PARAMS)
        latents = latents + (following - sigma) * velocity
    videos = model.decode(latents, PARAMS)
    assert isinstance(videos, Videos)  # noqa: S101 - what the family decodes
    return videos


def evaluate(
    model: LTX2Adapter, prompts: Sequence[str], *, num_samples: int, num_steps: int, seed: int = 1234
) -> dict[str, float]:
    """Accuracies of "both", of the video and of the sound, see `unirl.pretraining.judging.accuracy`.

    The samples go round the prompts in order. Noise depends on `seed` alone.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = [prompts[index % len(prompts)] for index in range(num_samples)]
    shape = model.latent_shape(PARAMS)
    found: dict[str, list[tuple[Tensor, Tensor]]] = {"video": [], "sound": []}

    def score(batch: Sequence[str]) -> tuple[Tensor, Tensor]:
        videos = sample(model, batch, torch.randn(len(batch), *shape, generator=generator), num_steps)
        if videos.audio is None or videos.audio.sample_rate is None:
            raise ContractError("the model decoded videos without sound")
        seen = score_videos(videos.unpack("frames"), batch)
        heard = score_sounds(videos.audio.unpack("waveform"), videos.audio.sample_rate, batch)
        found["video"].append(seen)
        found["sound"].append(heard)
        return seen[0] * heard[0], (seen[1] + heard[1]) / 2

    both = accuracy(score, chosen, lambda prompt: parse_prompt(prompt).category, list(TONES))
    for name, scores in found.items():
        both[name] = round(torch.cat([strict for strict, _ in scores]).mean().item(), 3)
    return both


def load(checkpoint: Path) -> LTX2Adapter:
    """The trainer's own LTX-2 of a folder, in float32."""
    return LTX2Adapter(LTX2Bundle(str(checkpoint)), decode_batch_size=64)


def main() -> None:
    """Log the accuracy of a checkpoint on the prompts of RL and on those held out."""
    prompts = dict(zip(("train", "heldout"), world.split_prompts(), strict=True))
    print_accuracy(load, evaluate, prompts, __doc__)


if __name__ == "__main__":
    main()
