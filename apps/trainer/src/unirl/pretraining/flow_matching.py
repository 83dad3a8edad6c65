"""Flow matching on latents that were encoded once, with captions of which some are wrong.

Shape letters: B samples, J drawings of one scene, L scenes, P prompts, N captioned scenes of a prompt; `...` a latent.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from unirl.pretraining.fit import fit

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=nn.Module)


class Request(Protocol):
    """What a prompt asks for."""

    @property
    def category(self) -> str:
        """Requests of a category are drawn equally often."""


SceneT = TypeVar("SceneT", bound=Hashable)
RequestT = TypeVar("RequestT", bound=Request)


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
    null_fraction: float
    """Share of the samples with the empty prompt, so that classifier-free guidance has something to guide from."""

    @classmethod
    def of_scenes(
        cls,
        encoded: Iterable[tuple[Tensor, Tensor]],
        scenes: Sequence[SceneT],
        requests: Sequence[RequestT],
        sample_scene: Callable[[RequestT], SceneT],
        *,
        num_captioned: int,
        category_shares: Mapping[str, float],
        null_fraction: float,
    ) -> LatentBank:
        """The bank of encoded scenes, `num_captioned` of them drawn for every request.

        encoded: batches of mean and deviation of latents, the J drawings of each scene one after another.
        category_shares: of the samples by category of the request.
        """
        means, stds = (torch.cat(parts) for parts in zip(*encoded, strict=True))
        index = {scene: number for number, scene in enumerate(scenes)}
        captioned = [[index[sample_scene(request)] for _ in range(num_captioned)] for request in requests]
        sizes = {category: sum(each.category == category for each in requests) for category in category_shares}
        logger.info("bank of %d drawings, posterior std %.3f", len(stds), stds.mean().item())
        return cls(
            mean_LJ=means.unflatten(0, (len(scenes), -1)),
            std_LJ=stds.unflatten(0, (len(scenes), -1)),
            scenes_PN=torch.tensor(captioned),
            prompt_weights_P=torch.tensor([category_shares[each.category] / sizes[each.category] for each in requests]),
            null_fraction=null_fraction,
        )

    def draw(self, num: int) -> tuple[Tensor, Tensor]:
        """Clean latents [B, ...] and the number of the prompt of each; number P stands for the empty one."""
        prompt_B = torch.multinomial(self.prompt_weights_P, num, replacement=True)
        scene_B = self.scenes_PN[prompt_B, torch.randint(self.scenes_PN.shape[1], (num,))]
        drawing_B = torch.randint(self.mean_LJ.shape[1], (num,))
        clean = self.mean_LJ[scene_B, drawing_B]
        clean = clean + self.std_LJ[scene_B, drawing_B] * torch.randn_like(clean)
        return clean, torch.where(torch.rand(num) < self.null_fraction, len(self.prompt_weights_P), prompt_B)


def conditioned_velocity(
    transformer: Callable[..., tuple[Tensor, ...]], conditions_P: Mapping[str, Tensor]
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The velocity of a transformer that is fed 1000 sigma, as `train_flow` asks for it.

    conditions_P: its other inputs by keyword, of every number that is drawn.
    """

    def predict_velocity(noisy_B: Tensor, sigma_B: Tensor, number_B: Tensor) -> Tensor:
        conditions = {name: value[number_B] for name, value in conditions_P.items()}
        return transformer(hidden_states=noisy_B, timestep=1000 * sigma_B, **conditions, return_dict=False)[0]

    return predict_velocity


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
    """Train in place on what `draw` gives; `snapshot` gets the averaged weights every `every` steps (0: never) and at
    the end.

    draw: (B) to clean latents [B, ...] and a number of each, by which `predict_velocity` finds its conditions:
    (noisy_B, sigma_B, number_B) to the velocity. is_hidden: see `fit`.
    Noise levels are uniform on the sampler's own grid, sigma = shift u / (1 + (shift - 1) u), so training is dense
    where sampling is.
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
