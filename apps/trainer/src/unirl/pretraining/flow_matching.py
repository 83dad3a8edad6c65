"""Flow matching on latents that were encoded once, with captions of which some are wrong.

Shape letters: B samples, J drawings of one scene, L scenes, P prompts, N captioned scenes of a prompt; `...` a latent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from unirl.pretraining.fit import fit

ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True)
class LatentBank:
    """Encoded drawings of every scene, and for every prompt the scenes that its caption comes with."""

    mean_LJ: Tensor
    """[L, J, ...], as the transformer sees latents: centred and scaled."""
    std_LJ: Tensor
    scenes_PN: Tensor
    """Scene indices, near misses included."""
    prompt_weights_P: Tensor
    """How often a prompt is drawn, up to a factor."""


def train_on_bank(
    transformer: ModelT,
    bank: LatentBank,
    predict_velocity: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    num_steps: int,
    shift: float,
    null_fraction: float,
    is_hidden: Callable[[str], bool],
    snapshot: Callable[[ModelT], None],
    every: int,
    batch_size: int = 128,
    muon_rate: float = 0.02,
    adam_rate: float = 1.5e-3,
    average: float = 0.998,
) -> None:
    """Train in place; `snapshot` gets the averaged weights every `every` steps (0: never) and at the end.

    predict_velocity: (noisy_B, sigma_B, prompt_B) to the velocity; prompt number P stands for the empty prompt, which a
    share `null_fraction` of the samples has, so that classifier-free guidance has something to guide from.
    Noise levels are uniform on the sampler's own grid, sigma = shift u / (1 + (shift - 1) u), so training is dense
    where sampling is. is_hidden: see `fit`.
    """
    null_row = len(bank.prompt_weights_P)

    def draw(num: int) -> tuple[Tensor, Tensor]:
        prompt_B = torch.multinomial(bank.prompt_weights_P, num, replacement=True)
        scene_B = bank.scenes_PN[prompt_B, torch.randint(bank.scenes_PN.shape[1], (num,))]
        drawing_B = torch.randint(bank.mean_LJ.shape[1], (num,))
        clean = bank.mean_LJ[scene_B, drawing_B]
        clean = clean + bank.std_LJ[scene_B, drawing_B] * torch.randn_like(clean)
        return clean, torch.where(torch.rand(num) < null_fraction, null_row, prompt_B)

    train_flow(
        transformer,
        draw,
        predict_velocity,
        num_steps=num_steps,
        shift=shift,
        is_hidden=is_hidden,
        snapshot=snapshot,
        every=every,
        batch_size=batch_size,
        muon_rate=muon_rate,
        adam_rate=adam_rate,
        average=average,
    )


def train_flow(
    transformer: ModelT,
    draw: Callable[[int], tuple[Tensor, Tensor]],
    predict_velocity: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    num_steps: int,
    shift: float,
    is_hidden: Callable[[str], bool],
    snapshot: Callable[[ModelT], None],
    every: int,
    batch_size: int = 128,
    muon_rate: float = 0.02,
    adam_rate: float = 1.5e-3,
    average: float = 0.998,
) -> None:
    """Flow matching on what `draw` gives; see `train_on_bank`.

    draw: (B) to clean latents [B, ...] and a number of each, by which `predict_velocity` finds its conditions.
    """
    averaged = copy.deepcopy(transformer).requires_grad_(False)

    def batch_loss() -> Tensor:
        clean, row_B = draw(batch_size)
        # Stratified over the batch: every batch sees every noise level.
        u_B = (torch.randperm(batch_size) + torch.rand(batch_size)) / batch_size
        sigma_B = shift * u_B / (1 + (shift - 1) * u_B)
        noise = torch.randn_like(clean)
        noisy = torch.lerp(clean, noise, sigma_B.view(-1, *[1] * (clean.ndim - 1)))
        return nn.functional.mse_loss(predict_velocity(noisy, sigma_B, row_B), noise - clean)

    @torch.no_grad()
    def after_step(step: int) -> None:
        decay = min(average, (1 + step) / (10 + step))
        for slow, fast in zip(averaged.parameters(), transformer.parameters(), strict=True):
            slow.lerp_(fast, 1 - decay)
        if step == num_steps or (every and step % every == 0):
            snapshot(averaged)

    fit(
        transformer,
        batch_loss,
        num_steps=num_steps,
        muon_rate=muon_rate,
        adam_rate=adam_rate,
        is_hidden=is_hidden,
        warm_up=100,
        decay=0.45,
        after_step=after_step,
    )
