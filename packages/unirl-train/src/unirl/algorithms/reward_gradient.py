"""What the methods that train through a differentiable reward share: steps, decoding, reward and its gradient.

The rollout has walked the deterministic schedule and kept every latent, so training goes back only to the steps that
need gradients. The gradient of the loss with respect to the clean latents is taken first, through reward and decoder,
whose activations are freed before the denoiser's backward.

With x_n the stored latent at sigma_n, n = 0 .. T, a step is x_{n+1} = x_n + (sigma_{n+1} - sigma_n) v(x_n, sigma_n).
Legend: B samples, T steps, K gradient steps per sample, R rows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unirl.algorithms.base import (
    LossPart,
    MicroBatch,
    RowMetrics,
    row_chunks,
    sampled_with,
)
from unirl.algorithms.kl import AdaptiveKL
from unirl.algorithms.losses import velocity_distance
from unirl.algorithms.reference import PenalisedAlgorithm, ReferenceKL
from unirl.types.bounds import NonNegative, Positive, PositiveInt, Seed, bounded
from unirl.types.devices import widened
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Images
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.rewards import DifferentiableReward
from unirl.types.protocols.training import PolicyStore
from unirl.types.reward import RewardRequest, request_for_track
from unirl.types.rollout import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


class Denoising:
    """The stored trajectories of B samples, and the model's velocity at rows of them.

    is_checkpointed: forget the activations of every velocity and compute them again in the backward pass.
    Raises ContractError for a trajectory that was not deterministic Euler, or of which latents are missing.
    """

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        track: RolloutTrack,
        params: DiffusionSamplingParams,
        *,
        is_checkpointed: bool = False,
    ) -> None:
        segment = track.segment
        if not isinstance(segment, LatentSegment):
            raise ContractError(f"expected a latent segment, the track holds {type(segment).__name__}")
        if segment.sde_indices or params.post_solver != "euler":
            raise ContractError(
                f"gradients of the reward go back along Euler steps; this rollout had stochastic steps "
                f"{segment.sde_indices} and post_solver = {params.post_solver!r}. Set sampling.eta: 0 and "
                "sampling.post_solver: euler."
            )
        if segment.indices != list(range(segment.num_steps + 1)):
            raise ContractError(
                f"the trajectory holds positions {segment.indices} of 0..{segment.num_steps}. "
                "Set sampling.keep_latents: all."
            )
        self._pipeline = pipeline
        self.params = params
        self.is_checkpointed = is_checkpointed
        self._known: dict[tuple[int, ...], Tensor] = {}
        self.track = track
        self.latents = segment.latents.float()
        """[B, T + 1, ...] float32, without gradients."""
        self.sigmas = segment.sigmas.to(self.latents.device)
        """[T + 1] float32."""

    @property
    def num_samples(self) -> int:
        """B."""
        return self.latents.shape[0]

    @property
    def num_steps(self) -> int:
        """T."""
        return self.sigmas.numel() - 1

    @property
    def samples(self) -> Tensor:
        """0 .. B - 1, int64 on the device of the latents."""
        return torch.arange(self.num_samples, device=self.latents.device)

    def at(self, position_B: Tensor) -> Tensor:
        """The stored latent of every sample at its own position, [B, ...]."""
        return self.latents[self.samples, position_B]

    def stored_velocity(self, step_BK: Tensor) -> Tensor:
        """The velocity at stored latents, K steps of every sample: [B, K, ...] float32, in one forward of B K rows.

        Asked for the same steps twice, it gives the same tensor with its graph; without gradients it always computes.
        """
        places = tuple(step_BK.flatten().tolist())
        if torch.is_grad_enabled() and places in self._known:
            return self._known[places]
        sample_R = self.samples.repeat_interleave(step_BK.shape[1])
        step_R = step_BK.flatten()
        v = self.velocity(self.latents[sample_R, step_R], sample_R, step_R).unflatten(0, tuple(step_BK.shape))
        if torch.is_grad_enabled():
            self._known[places] = v
        return v

    def velocity(self, x_R: Tensor, sample_R: Tensor, step_R: Tensor) -> Tensor:
        """The model's velocity [R, ...] float32 at x_R, in one forward.

        sample_R: int64 [R], whose conditions. step_R: int64 [R] in 0 .. T - 1, which step and so which sigma.
        """
        conditions = {name: item.select(sample_R) for name, item in self.track.conditions.items()}

        def forward(x_R: Tensor) -> Tensor:
            return self._pipeline.velocity(conditions, x_R, self.sigmas[step_R], step_R, self.params).float()

        if self.is_checkpointed and torch.is_grad_enabled():
            return checkpoint(forward, x_R, use_reentrant=False)
        return forward(x_R)


@bounded("algorithm")
class RewardGradient(PenalisedAlgorithm):
    """Maximise the reward of what the sampler makes, by its gradient; subclasses say how far back that goes.

    The loss of a sample is scale * relu(margin - reward). Advantages are not used.
    scale: of the loss; AdamW undoes it but for stack.max_grad_norm and the penalty.
    margin: a reward above it teaches nothing; .inf, the default, makes the loss scale * -reward.
    kl_coef, adaptive_kl: penalty mean (v - v_ref)^2 at the steps with gradients, see `ReferenceKL`; 0 switches the
        reference off. It is taken at the stored latents: it moves the velocity there, not where the latents lie.
    is_checkpointed: recompute every velocity in the backward pass instead of keeping its activations.
    rows_per_forward: most rows of the model in one forward, and so in one backward; the memory knob.
    Draws are made from counters (rollout, sample id), so they depend on neither devices nor batching. How many forwards
    a micro-batch makes must not depend on its samples: ranks that share a sharded model make them together.
    """

    requires_trajectory: ClassVar[bool] = True
    requires_reward_gradient: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        scale: Positive = 1.0,
        margin: float = math.inf,
        kl_coef: NonNegative = 0.0,
        adaptive_kl: AdaptiveKL | None = None,
        is_checkpointed: bool = False,
        rows_per_forward: PositiveInt | None = None,
        seed: Seed = 0,
        params: DiffusionSamplingParams | None = None,
    ) -> None:
        if math.isnan(margin) or margin == -math.inf:
            raise ConfigError(f"algorithm.margin = {margin} must be a number, or .inf for no margin")
        if rows_per_forward is not None and rows_per_forward < self.rows_per_sample:
            raise ConfigError(
                f"algorithm.rows_per_forward = {rows_per_forward} cannot hold the {self.rows_per_sample} rows of one "
                "sample. Raise it, or set it to null."
            )
        super().__init__(ReferenceKL(policies, coef=kl_coef, adaptive=adaptive_kl), seed=seed)
        self._pipeline = pipeline
        self._reward: DifferentiableReward | None = None
        self._params = params
        self.scale = scale
        self.margin = margin
        self.is_checkpointed = is_checkpointed
        self.rows_per_forward = rows_per_forward

    @property
    def rows_per_sample(self) -> int:
        """Rows of the model that one sample needs at a time."""
        return 1

    def use_reward(self, reward: object) -> None:
        """Keep the reward service. Raises ConfigError if it gives no gradients."""
        if not isinstance(reward, DifferentiableReward):
            raise ConfigError(
                f"{type(self).__name__} needs a reward with gradients, {type(reward).__name__} has none. "
                "Use unirl.reward.service.RewardService."
            )
        self._reward = reward

    @abstractmethod
    def clean_latents(self, steps: Denoising, keys: list[str]) -> Tensor:
        """The clean latents whose reward counts, [B, ...] or [B n, ...] sample after sample, with gradients.

        keys: what the draws of each sample are named after.
        """

    @abstractmethod
    def gradient_steps(self, steps: Denoising, keys: list[str]) -> Tensor:
        """Steps at which velocities get a gradient, int64 [B, K]: where the penalty is taken."""

    def scored(self, reward: DifferentiableReward, request: RewardRequest) -> Tensor:
        """The reward of every sample of the request, [R], with gradients to its media."""
        return reward.score_with_gradient(request)

    def reward_loss(self, reward_R: Tensor) -> Tensor:
        """scale * relu(margin - reward), or scale * -reward without a margin, [R]."""
        if self.margin == math.inf:
            return -self.scale * reward_R
        return self.scale * (self.margin - reward_R).relu()

    def extra_loss(self, steps: Denoising, keys: list[str], metrics: RowMetrics) -> Tensor | None:
        """Something more that a method adds, [B]; None for nothing."""
        return None

    def num_terms(self, track: RolloutTrack) -> int:
        """One a sample."""
        return track.batch_size

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part for every `rows_per_forward` rows: sum of the samples' losses."""
        params = sampled_with(micro.segment.params, self._params)
        limit = self.rows_per_forward
        samples = None if limit is None else limit // self.rows_per_sample
        for rows in row_chunks(micro.track.batch_size, samples):
            track = micro.track.slice(rows.start, rows.stop)
            steps = Denoising(self._pipeline, track, params, is_checkpointed=self.is_checkpointed)
            yield self._part(steps, [f"r{self.num_rollouts}:{sample}" for sample in track.sample_ids])

    def _part(self, steps: Denoising, keys: list[str]) -> LossPart:
        metrics = RowMetrics()
        penalty_B = self._penalty(steps, keys, metrics)
        latents = self.clean_latents(steps, keys)
        loss_B, gradient = self.loss_and_gradient(steps, latents.detach(), metrics)
        # Its value is the loss and its gradient that of the loss, by the chain rule at `latents`.
        along = (gradient * (latents - latents.detach())).flatten(1).sum(dim=1)
        total_B = loss_B + along.view(steps.num_samples, -1).sum(dim=1)
        metrics.mean("policy/loss", loss_B)
        for more_B in (penalty_B, self.extra_loss(steps, keys, metrics)):
            if more_B is not None:
                total_B = total_B + more_B
        return LossPart(total_B.sum(), steps.num_samples, metrics)

    def loss_and_gradient(self, steps: Denoising, latents: Tensor, metrics: RowMetrics) -> tuple[Tensor, Tensor]:
        """Loss [B] and its gradient with respect to the clean latents, through reward and decoder; both without graph.

        Where there are n latents per sample, its loss is the mean over them.
        """
        if self._reward is None:
            raise ContractError(f"{type(self).__name__} was given no reward; call use_reward first")
        with torch.enable_grad():
            latents.requires_grad_()
            media = self._pipeline.decode(latents, steps.params)
            pixels = media.pixels if isinstance(media, Images) else media.frames
            repeats = latents.shape[0] // steps.num_samples
            track = steps.track if repeats == 1 else _repeated(steps.track, repeats)
            reward = self.scored(self._reward, request_for_track(track, media))
            loss_B = self.reward_loss(reward).view(steps.num_samples, repeats).mean(dim=1)
            at_pixels, at_latents = torch.autograd.grad(loss_B.sum(), (pixels, latents))
        metrics.mean("reward_gradient/reward", reward)
        if self.margin < math.inf:
            metrics.mean("reward_gradient/above_margin_fraction", widened(reward >= self.margin))
        metrics.mean("reward_gradient/pixel_grad_norm", at_pixels.view(len(latents), -1).norm(dim=1))
        metrics.mean("reward_gradient/latent_grad_norm", at_latents.flatten(1).norm(dim=1))
        return loss_B.detach(), at_latents

    def _penalty(self, steps: Denoising, keys: list[str], metrics: RowMetrics) -> Tensor | None:
        """kl_coef * mean over the gradient steps of mean (v - v_ref)^2, [B]; None where the reference is off."""
        if not self.reference.is_on:
            return None
        step_BK = self.gradient_steps(steps, keys)
        v_reference = self.reference.evaluate(lambda: steps.stored_velocity(step_BK))
        if v_reference is None:
            raise ContractError("the reference is on but gave no velocity")
        v = steps.stored_velocity(step_BK)
        distance_R = velocity_distance(v.flatten(0, 1), v_reference.flatten(0, 1))
        # The reward's zero is arbitrary, so there is nothing that the size of the penalty could be compared with.
        return self.reference.penalty(distance_R, metrics, loss=None).view(step_BK.shape).mean(dim=1)


def unrolled(steps: Denoising, first: int) -> Tensor:
    """The clean latents [B, ...] of the sampler from the stored latents at `first`, 0 .. T - 1, on.

    Gradients flow through every step from there, and through the latents between. All samples take the same steps, so
    that every rank of a sharded model makes the same forwards.
    """
    x = steps.latents[:, first].clone()  # a view would keep the whole trajectory for the backward
    for step in range(first, steps.num_steps):
        v = steps.velocity(x, steps.samples, torch.full_like(steps.samples, step))
        x = x + (steps.sigmas[step + 1] - steps.sigmas[step]) * v
    return x


def straight_through(steps: Denoising, value: Tensor, step_BK: Tensor, weight_BK: Tensor) -> Tensor:
    """value + sum_k weight_k (v(x_k) - sg v(x_k)), [B, ...]: `value` with the gradient of the weighted velocities.

    step_BK: int64 [B, K]; the velocities are taken at the stored latents, in one forward of B K rows.
    """
    v = steps.stored_velocity(step_BK)
    weight = weight_BK.view(*step_BK.shape, *(1,) * (v.ndim - 2))
    return value + (weight * (v - v.detach())).sum(dim=1)


def _repeated(track: RolloutTrack, repeats: int) -> RolloutTrack:
    """Every sample `repeats` times, one after the other."""
    inputs = track.metadata_only().replace(primitives=track.primitives, metadata=track.metadata)
    return inputs.repeat_interleave(repeats)
