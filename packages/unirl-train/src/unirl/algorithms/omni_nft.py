"""OmniNFT: DiffusionNFT on latents that hold several media, each with its own advantages.

Source: Zhang et al. 2026 (arXiv 2605.12480), modality-wise advantage routing; how the losses of the media are joined is
that of the authors' code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics
from unirl.algorithms.diffusion_nft import DiffusionNFT, Velocities
from unirl.algorithms.forward_process import ForwardRows
from unirl.algorithms.omni_nft_rules import weights_problem
from unirl.types.bounds import bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import JointPipeline
from unirl.types.protocols.training import PolicyStore

PartT = TypeVar("PartT", Velocities, ForwardRows)


@bounded("algorithm")
class OmniNFT(DiffusionNFT):
    """The loss of DiffusionNFT for each medium m of a latent, on its own slice and with its own r in [0, 1]:

        L = sum_m w_m L_NFT(slice m, r_m) / sum_m w_m

    r_m comes from the advantages of `unirl.algorithms.routed_advantages`. The penalty towards the reference is taken
    per medium too, so that a long video does not drown its sound.
    media_weights: w_m by medium; 1 for those that are not named.
    Everything else: see `DiffusionNFT`. A latent of one medium gives DiffusionNFT's loss.
    The paper's region weights, from maps of cross-attention while sampling, are not here: the attention kernels give no
    maps. Raises ConfigError for weights below 0, or none above it.
    """

    recipe_rules: ClassVar[str] = "unirl.algorithms.omni_nft_rules"
    takes_media_advantages: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: JointPipeline,
        policies: PolicyStore,
        *,
        media_weights: Mapping[str, float] | None = None,
        **options: Any,  # Any: the keywords of DiffusionNFT
    ) -> None:
        problem = weights_problem("algorithm.media_weights", media_weights or {})
        if problem is not None:
            raise ConfigError(problem)
        super().__init__(pipeline, policies, **options)
        self._joint = pipeline
        self.media_weights = dict(media_weights or {})

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part per chunk of rows: sum over (sample, level) of the weighted mean over the media."""
        params = micro.segment.params
        if params is None:
            raise ContractError("the segment does not say how it was sampled; the engine must set its params")
        slices = self._joint.media_slices(params)
        share = self._shares(slices)
        advantages = self._advantages(micro, slices)
        for _, rows in self.forward_rows(micro):
            velocities, metrics = self.velocities(rows), RowMetrics()
            policy_R, penalty_R = torch.zeros_like(rows.sigma_R), torch.zeros_like(rows.sigma_R)
            for medium, where in slices.items():
                own, advantage_R = RowMetrics(), advantages[medium][rows.sample_R]
                loss, penalty = self.loss_of(sliced(velocities, where), sliced(rows, where), advantage_R, own)
                policy_R, penalty_R = policy_R + share[medium] * loss, penalty_R + share[medium] * penalty
                metrics.merge(own)
                metrics.mean(f"nft/{medium}/loss", loss)
                metrics.add(f"nft/{medium}/optimality_mean", *own.sums["nft/optimality_mean"])
            metrics.mean("policy/loss", policy_R)
            loss_R = policy_R + penalty_R
            yield LossPart(loss_R.sum(), loss_R.numel(), metrics)

    def _shares(self, slices: Mapping[str, slice]) -> dict[str, float]:
        """w_m over the sum of the weights."""
        problem = weights_problem("algorithm.media_weights", self.media_weights, slices)
        if problem is not None:
            raise ConfigError(problem)
        weights = {medium: self.media_weights.get(medium, 1.0) for medium in slices}
        total = sum(weights.values())
        return {medium: weight / total for medium, weight in weights.items()}

    def _advantages(self, micro: MicroBatch, slices: Mapping[str, slice]) -> dict[str, Tensor]:
        """[B] of each medium, in the order of the latent."""
        found = micro.track.media_advantages
        if set(found) != set(slices):
            raise ContractError(
                f"the latent holds {sorted(slices)}, the track has advantages of {sorted(found)}. Set "
                "advantages._target_: unirl.algorithms.routed_advantages.RoutedAdvantages with a route for each."
            )
        return {medium: found[medium] for medium in slices}


def sliced(whole: PartT, where: slice) -> PartT:
    """The same of one medium: its slice along dimension 1 of every [R, ...] tensor of latents."""
    return dataclasses.replace(
        whole,
        **{
            name: value[:, where] for name, value in vars(whole).items() if isinstance(value, Tensor) and value.ndim > 1
        },
    )
