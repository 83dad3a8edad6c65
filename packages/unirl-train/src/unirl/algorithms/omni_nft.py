"""OmniNFT: DiffusionNFT on latents that hold several media, each with its own advantages.

Source: Zhang et al. 2026 (arXiv 2605.12480), modality-wise advantage routing and region-wise loss reweighting; how the
losses of the media are joined, and the weights of regions, are those of the authors' code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from unirl.algorithms.base import LossPart, MicroBatch, RowMetrics
from unirl.algorithms.diffusion_nft import DiffusionNFT, Velocities
from unirl.algorithms.forward_process import ForwardRows
from unirl.algorithms.omni_nft_rules import warmup_of_nothing, weights_problem
from unirl.algorithms.regions import element_weights, region_weights
from unirl.types.bounds import Bounds, NonNegativeInt, bounded
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
    region_weight: most that a place of the video weighs in its L_NFT, where the least is 1, by the attention that the
        sound paid to it while it was sampled (`unirl.algorithms.regions.region_weights`, and the pipeline's
        `region_steps`); 1: all weigh the same. The authors have 1.5. The penalty and the adaptive weight stay as they
        are.
    region_warmup: rollouts after which it is reached, from 1 in the first; the authors have 400.
    Everything else: see `DiffusionNFT`. A latent of one medium gives DiffusionNFT's loss.
    Raises ConfigError for weights below 0, or none above it, and for a warmup of nothing.
    """

    recipe_rules: ClassVar[str] = "unirl.algorithms.omni_nft_rules"
    takes_media_advantages: ClassVar[bool] = True
    takes_regions: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: JointPipeline,
        policies: PolicyStore,
        *,
        media_weights: Mapping[str, float] | None = None,
        region_weight: Annotated[float, Bounds(ge=1)] = 1.0,
        region_warmup: NonNegativeInt = 0,
        **options: Any,  # Any: the keywords of DiffusionNFT
    ) -> None:
        problem = weights_problem("algorithm.media_weights", media_weights or {})
        if problem is not None:
            raise ConfigError(problem)
        if region_warmup and region_weight == 1:
            raise ConfigError(warmup_of_nothing("algorithm", region_warmup))
        super().__init__(pipeline, policies, **options)
        self._joint = pipeline
        self.region_weight = region_weight
        self.region_warmup = region_warmup
        self.media_weights = dict(media_weights or {})

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part per chunk of rows: sum over (sample, level) of the weighted mean over the media."""
        params = micro.segment.params
        if params is None:
            raise ContractError("the segment does not say how it was sampled; the engine must set its params")
        slices = self._joint.media_slices(params)
        share = self._shares(slices)
        advantages, regions = self._advantages(micro, slices), self._regions(micro, slices)
        for _, rows in self.forward_rows(micro):
            velocities, metrics = self.velocities(rows), RowMetrics()
            policy_R, penalty_R = torch.zeros_like(rows.sigma_R), torch.zeros_like(rows.sigma_R)
            for medium, where in slices.items():
                own, advantage_R, part = RowMetrics(), advantages[medium][rows.sample_R], sliced(rows, where)
                weight = None
                if medium in regions:
                    weight = element_weights(regions[medium][rows.sample_R], part.x0)
                    metrics.max(f"nft/{medium}/region_weight_max", weight)
                loss, penalty = self.loss_of(sliced(velocities, where), part, advantage_R, own, weight)
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

    def _regions(self, micro: MicroBatch, slices: Mapping[str, slice]) -> dict[str, Tensor]:
        """Weights of places [B, f, h, w], on the device of the latents, of each medium that has some."""
        if self.region_weight == 1:
            return {}
        maps = micro.segment.regions
        if not maps or not set(maps) <= set(slices):
            raise ContractError(
                f"algorithm.region_weight = {self.region_weight:g} needs maps of attention of {sorted(slices)}, the "
                f"samples bring {sorted(maps)}. Set pipeline.region_steps: [0.5, 0.9] and an engine that samples with "
                "the pipeline."
            )
        share = min(self.num_rollouts / self.region_warmup, 1.0) if self.region_warmup else 1.0
        most, device = 1.0 + (self.region_weight - 1.0) * share, micro.segment.latents.device
        return {medium: region_weights(found.to(device), most) for medium, found in maps.items()}

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
