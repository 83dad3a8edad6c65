"""Draws docs/images/sounds_before_after.png: some held-out prompts of the sounds world by the base and by a trained
checkpoint, with the same noise, each with five of its nine frames and the spectrogram of its sound.

    uv run trainer worlds/sounds/omni_nft seed=0 run_dir=runs/sounds
    uv run trainer export runs/sounds --to exported --merged
    uv run python docs/images/sounds.py exported
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import torch
from PIL import Image

from unirl.reward.worlds.sounds import score_sounds, score_videos
from unirl.worlds.sounds import world
from unirl.worlds.sounds.evaluate import PARAMS, load, sample

mpl.use("Agg")
from matplotlib import pyplot

BASE = Path(world.__file__).parent / "checkpoint"
RIGHT, WRONG = "green", "red"


def main(trained: Path) -> None:
    """Draw the image."""
    torch.set_num_threads(1)
    prompts = world.split_prompts()[1][::3]
    figure, axes = pyplot.subplots(len(prompts), 4, figsize=(13, 0.85 * len(prompts)))
    for column, checkpoint in ((0, BASE), (2, trained)):
        model = load(checkpoint)
        noise = torch.randn(len(prompts), *model.latent_shape(PARAMS), generator=torch.Generator().manual_seed(5))
        videos = sample(model, prompts, noise, 10)
        frames = videos.unpack("frames")
        waves = videos.audio.unpack("waveform") if videos.audio is not None else []
        seen, heard = score_videos(frames, prompts)[0], score_sounds(waves, world.RATE, prompts)[0]
        for row, prompt in enumerate(prompts):
            picture, spectrum = axes[row, column], axes[row, column + 1]
            picture.imshow(torch.cat(list(frames[row][::2]), dim=2).permute(1, 2, 0).clamp(0, 1).numpy())
            picture.set_title(prompt, fontsize=7, color=RIGHT if seen[row] else WRONG)
            picture.axis("off")
            spectrum.specgram(waves[row].flatten().numpy(), NFFT=256, noverlap=192, Fs=world.RATE, vmin=-120)
            spectrum.set_title("Hz by seconds", fontsize=7, color=RIGHT if heard[row] else WRONG)
            spectrum.set_ylim(0, 1600)
            spectrum.tick_params(labelsize=5)
    figure.tight_layout(pad=0.3)
    file = Path(__file__).with_name("sounds_before_after.png")
    figure.savefig(file, dpi=75)
    with Image.open(file) as drawn:
        drawn.convert("RGB").quantize(64).save(file, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
