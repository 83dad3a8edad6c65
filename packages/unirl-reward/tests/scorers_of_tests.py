"""Scorers that test_child_scorer runs in other processes."""

import os
import signal
import time
from pathlib import Path

import torch

from unirl.reward.base import LocalScorer, Scored


class Uneven(LocalScorer):
    """Two numbers of every image, and none of a dark one."""

    def __init__(self, *, name, device="cpu", scale=1.0):
        super().__init__(name=name, device=device, batch_size=2, component_weights={"mean": scale, "corner": 0.5})

    def score_batch(self, request):
        pixels = request.generated["image"].pixels
        mean = pixels.mean(dim=(1, 2, 3))
        is_dark = mean < 0.05
        mean[is_dark] = torch.nan
        return Scored({"mean": mean, "corner": pixels[:, 0, 0, 0]}, ["too dark" if dark else None for dark in is_dark])


class Steered(LocalScorer):
    """The length of each text. Files in `folder` steer it: it dies or hangs where it removes one of that name, and
    always dies while `deadly` is there."""

    def __init__(self, *, name, folder):
        super().__init__(name=name)
        self.folder = Path(folder)

    def score_batch(self, request):
        if (self.folder / "deadly").exists():
            os._exit(7)
        for what in ("die", "hang", "raise"):
            try:
                (self.folder / what).unlink()
            except FileNotFoundError:
                continue
            if what == "die":
                os._exit(7)
            if what == "raise":
                raise TypeError("a bug of the scorer")
            time.sleep(600)
        return torch.tensor([float(len(text)) for text in request.generated["text"].texts])


def frames(videos, prompts, metadata):
    """The number of frames of each video."""
    return [float(len(video)) for video in videos]


def ranks(images, prompts, metadata):
    """Place of each image of one prompt by its grey, 0 for the darkest."""
    assert len(set(prompts)) == 1
    return images.mean((1, 2, 3)).argsort().argsort().float()


class Colliding(Uneven):
    """Calls a component as the sum is called."""

    def __init__(self, *, name):
        super().__init__(name=name)
        self.component_weights = {"reward": 1.0}


class Deadly(Steered):
    """Kills its process where it is made."""

    def __init__(self, *, name):
        os.kill(os.getpid(), signal.SIGKILL)
