"""Make the bases of the tabletop: `python -m unirl.worlds.tabletop.pretrain --out DIR [--seed 0] [--flow-steps N]`.

Each clones an expert with a shaky hand: what it sees before a chunk of moves, and the chunk that was made. A base has
seen too little to be good, so that RL has something to teach. docs/worlds/tabletop.md has time and figures.
Legend: B rows of a batch, N rows, H moves of a chunk, D numbers of a move.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from unirl.models.action.bundle import ActionBundle
from unirl.models.action.config import ActionConfig, Head
from unirl.pretraining.command_line import make_checkpoint
from unirl.pretraining.fit import fit
from unirl.sde.forward import interpolate, velocity_target
from unirl.worlds.tabletop.environment import MAX_MOVES
from unirl.worlds.tabletop.evaluate import evaluate
from unirl.worlds.tabletop.physics import SIZE, expert_move, image_of, is_home, moved, starts_of

logger = logging.getLogger(__name__)

CHUNK, ACTION_SIZE = 4, 2
NUM_BINS, SMOOTHED_BINS = 256, 4.0
"""Bins of a number, and the standard deviation in bins over which the label of one is spread."""
FIRST_SEED = 500_000
"""Seeds of demonstrations begin here: neither those of training nor those held out."""
BATCH_SIZE = 128


@dataclass(frozen=True)
class Lesson:
    """How one base is cloned."""

    num_episodes: int
    shake: float
    """Standard deviation of the noise of the expert's hand, in moves."""
    rate: float


LESSONS: dict[Head, Lesson] = {"flow": Lesson(2000, 0.15, 2e-3), "bins": Lesson(3000, 0.10, 3e-3)}


@dataclass(frozen=True)
class Budget:
    """Optimiser steps of each base."""

    flow: int = 520
    bins: int = 560


@dataclass(frozen=True)
class Demonstrations:
    """Rows to clone."""

    images_N: Tensor
    """[N, 3, 64, 64] uint8."""
    chunks_N: Tensor
    """[N, H, D] float32, what the hand did."""


def main() -> None:
    """Read the command line and make the checkpoints."""
    make_checkpoint(pretrain, Budget, __doc__, has_snapshots=False)


def pretrain(out: Path, *, seed: int, budget: Budget) -> None:
    """Clone both bases into `out / "flow"` and `out / "bins"`. Seeds the global generator of torch."""
    for head, num_steps in (("flow", budget.flow), ("bins", budget.bins)):
        if num_steps:
            clone(out / head, head, seed=seed, num_steps=num_steps)


def clone(out: Path, head: Head, *, seed: int, num_steps: int) -> None:
    """Clone one base into `out`."""
    torch.manual_seed(seed)
    lesson = LESSONS[head]
    shown = demonstrations(lesson, np.random.default_rng(seed))
    config = ActionConfig(
        head=head, action_size=ACTION_SIZE, chunk=CHUNK, image_shape=(3, SIZE, SIZE), num_bins=NUM_BINS
    )
    bundle = ActionBundle(config=config, seed=seed)
    losses = {"flow": flow_loss, "bins": bins_loss}
    fit(
        bundle.network,
        batches(bundle.network, shown, losses[head]),
        num_steps=num_steps,
        muon_rate=0.0,
        adam_rate=lesson.rate,
        is_hidden=lambda name: False,
        warm_up=20,
        decay=0.9,
    )
    state = {name: tensor.half() for name, tensor in bundle.network.state_dict().items()}
    bundle.export_merged(str(out), {bundle.component: state})
    logger.info("%s after %d rows: %s", head, len(shown.images_N), evaluate(out))


def demonstrations(lesson: Lesson, rng: np.random.Generator) -> Demonstrations:
    """Episodes of the expert, whose hand shakes; what follows the end of an episode is no row."""
    state = starts_of(range(FIRST_SEED, FIRST_SEED + lesson.num_episodes))
    images, chunks = [], []
    live = np.ones(len(state), np.bool_)
    for _ in range(MAX_MOVES // CHUNK):
        images.append(image_of(state[live]))
        made = np.zeros((len(state), CHUNK, ACTION_SIZE), np.float32)
        for each in range(CHUNK):
            shake = lesson.shake * rng.standard_normal((len(state), ACTION_SIZE))
            made[:, each] = np.clip(expert_move(state) + shake, -1, 1)
            goes_on = live & ~is_home(state)
            state = np.where(goes_on[:, None, None], moved(state, made[:, each]), state)
        chunks.append(made[live])
        live &= ~is_home(state)
    return Demonstrations(torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(chunks)))


def batches(
    network: nn.Module, shown: Demonstrations, loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
) -> Callable[[], Tensor]:
    """The loss of a random batch at each call."""

    def batch_loss() -> Tensor:
        row_B = torch.randint(len(shown.images_N), (BATCH_SIZE,))
        return loss(network, shown.images_N[row_B], shown.chunks_N[row_B])

    return batch_loss


def flow_loss(network: nn.Module, images_B: Tensor, chunks_B: Tensor) -> Tensor:
    """Flow matching of the chunk."""
    noise, sigma_B = torch.randn_like(chunks_B), torch.rand(len(chunks_B))
    x = interpolate(chunks_B, noise, sigma_B)
    _, velocity, _ = network(images_B, x=x, sigma_R=sigma_B)
    return (velocity - velocity_target(chunks_B, noise)).square().mean()


def bins_loss(network: nn.Module, images_B: Tensor, chunks_B: Tensor) -> Tensor:
    """Cross entropy with the bin of each number, spread over its neighbours."""
    bins = ((chunks_B + 1) / 2 * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    distance = (torch.arange(NUM_BINS) - bins[..., None]) / SMOOTHED_BINS
    target = (-0.5 * distance.square()).softmax(dim=-1)
    _, logits, _ = network(images_B)
    return -(target * logits.log_softmax(dim=-1)).sum(dim=-1).mean()


if __name__ == "__main__":
    main()
