"""DiffusionNFT: reinforcement on the forward process. No log-prob, no stochastic sampler.

Samples come from an old policy (a named copy that follows the trained one); the loss pulls the velocity towards
good samples and away from bad ones. Legend: B samples, K noise levels a sample, R rows (sample-major B x K).
Source: Zheng et al. 2025 (arXiv 2509.16117).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from torch import Tensor

from unirl.algorithms.base import (
    LossPart,
    MicroBatch,
    RowMetrics,
    StageAlgorithm,
    check_rows_per_forward,
    row_chunks,
    sampled_with,
)
from unirl.algorithms.losses import nft_loss, optimality, velocity_distance
from unirl.algorithms.schedules import OldPolicyDecay
from unirl.sde.forward import interpolate
from unirl.sde.noise import keyed_normal, keyed_permutation, keyed_uniform
from unirl.types.errors import ConfigError
from unirl.types.protocols import DiffusionPipeline, PolicyStore
from unirl.types.rollout import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

AdvantageMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]
ADVANTAGE_MODES = ("all", "positive_only", "negative_only", "one_only", "binary")
OLD = "old"


def mode_advantages(advantages_B: Tensor, mode: AdvantageMode) -> Tensor:
    """Advantages as the mode sees them: all; max(A, 0); min(A, 0); 1 where A > 0 else 0; sign(A)."""
    if mode == "positive_only":
        return advantages_B.clamp(min=0)
    if mode == "negative_only":
        return advantages_B.clamp(max=0)
    if mode == "one_only":
        return (advantages_B > 0).to(advantages_B.dtype)
    if mode == "binary":
        return advantages_B.sign()
    return advantages_B


class DiffusionNFT(StageAlgorithm):
    """Forward-process policy optimisation between the trained policy and the old one.

    beta: how far the implicit positive and negative policies lie from the old one; the first gradient does not
        depend on it. advantage_max: advantages are clipped to +- this and mapped to [0, 1].
    advantage_mode: all, positive_only, negative_only, one_only or binary.
    num_timesteps: noise levels trained a sample; None takes int(timestep_fraction * T).
    timestep_sampler: "rollout" draws without repetition from the rollout's own levels (the terminal 0 excluded),
        "uniform" and "logit_normal" draw continuously from (0, 1).
    kl_coef: weight of mean (v - v_ref)^2; 0 switches the reference off.
    decay: how the old policy follows. rows_per_forward: memory knob.
    Noise and levels are drawn from counters (sample id, draw), so they depend on neither devices nor batching.
    """

    rollout_policy: ClassVar[str | None] = OLD

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore,
        *,
        beta: float = 1.0,
        advantage_max: float = 5.0,
        advantage_mode: AdvantageMode = "all",
        adaptive_weight: bool = True,
        num_timesteps: int | None = None,
        timestep_fraction: float = 0.99,
        timestep_sampler: Literal["rollout", "uniform", "logit_normal"] = "rollout",
        kl_coef: float = 0.0,
        decay: OldPolicyDecay | None = None,
        rows_per_forward: int | None = None,
        seed: int = 0,
        params: DiffusionSamplingParams | None = None,
    ) -> None:
        if beta <= 0:
            raise ConfigError(f"algorithm.beta = {beta} must be above 0")
        if advantage_max <= 0:
            raise ConfigError(f"algorithm.advantage_max = {advantage_max} must be above 0")
        if advantage_mode not in ADVANTAGE_MODES:
            raise ConfigError(
                f"algorithm.advantage_mode = {advantage_mode!r} must be one of {', '.join(ADVANTAGE_MODES)}"
            )
        if timestep_sampler not in ("rollout", "uniform", "logit_normal"):
            raise ConfigError(
                f"algorithm.timestep_sampler = {timestep_sampler!r} must be rollout, uniform or logit_normal"
            )
        if not 0 < timestep_fraction <= 1:
            raise ConfigError(f"algorithm.timestep_fraction = {timestep_fraction} must lie in (0, 1]")
        if num_timesteps is None and timestep_sampler != "rollout":
            raise ConfigError(f"algorithm.num_timesteps is needed with timestep_sampler: {timestep_sampler}")
        if num_timesteps is not None and num_timesteps < 1:
            raise ConfigError(f"algorithm.num_timesteps = {num_timesteps} must be at least 1, or null")
        if kl_coef < 0:
            raise ConfigError(f"algorithm.kl_coef = {kl_coef} must be at least 0")
        check_rows_per_forward(rows_per_forward)
        self._pipeline = pipeline
        self._policies = policies
        self.beta = beta
        self.advantage_max = advantage_max
        self.advantage_mode: AdvantageMode = advantage_mode
        self.adaptive_weight = adaptive_weight
        self.num_timesteps = num_timesteps
        self.timestep_fraction = timestep_fraction
        self.timestep_sampler = timestep_sampler
        self.kl_coef = kl_coef
        self.decay = decay if decay is not None else OldPolicyDecay()
        self.rows_per_forward = rows_per_forward
        self.seed = seed
        self.num_rollouts = 0
        self._params = params

    def prepare(self) -> None:
        """Keep the starting weights as the old policy."""
        self._policies.keep_policy(OLD)

    def num_terms(self, track: RolloutTrack) -> int:
        """Samples times noise levels."""
        return track.batch_size * self._num_levels(track.segment)

    def _num_levels(self, segment: object) -> int:
        if not isinstance(segment, LatentSegment):
            raise ConfigError(f"DiffusionNFT trains latent tracks, this one holds {type(segment).__name__}")
        if self.timestep_sampler != "rollout":
            return int(self.num_timesteps or 1)
        available = segment.num_steps
        if self.num_timesteps is None:
            return max(int(available * self.timestep_fraction), 1)
        if self.num_timesteps > available:
            raise ConfigError(
                f"algorithm.num_timesteps = {self.num_timesteps} exceeds the {available} levels of the rollout. "
                "Lower it or raise sampling.num_inference_steps."
            )
        return self.num_timesteps

    def levels(self, keys: list[str], segment: LatentSegment) -> Tensor:
        """Noise levels [B, K] in (0, 1] for the samples with these noise keys."""
        num_levels = self._num_levels(segment)
        if self.timestep_sampler == "rollout":
            rows = [keyed_permutation(f"{key}::nft::levels", self.seed, segment.num_steps)[:num_levels] for key in keys]
            return segment.sigmas[torch.stack([torch.as_tensor(row) for row in rows])]
        names = [f"{key}::nft::levels" for key in keys]
        if self.timestep_sampler == "uniform":
            return 1.0 - keyed_uniform(names, self.seed, (num_levels,))
        return keyed_normal(names, self.seed, (num_levels,)).sigmoid()

    def losses(self, micro: MicroBatch) -> Iterator[LossPart]:
        """One part a chunk of rows: sum over (sample, level) of the loss."""
        segment = micro.segment
        params = sampled_with(segment, self._params)
        x0_B = segment.clean_latents.float()
        device = x0_B.device
        version = self._policies.num_optimizer_steps
        keys = [f"v{version}:{sample}" for sample in micro.track.sample_ids]
        sigma_BK = self.levels(keys, segment).to(device)
        num_levels = sigma_BK.shape[1]
        latent_shape = tuple(x0_B.shape[1:])
        noise_BK = keyed_normal([f"{key}::nft::noise" for key in keys], self.seed, (num_levels, *latent_shape)).to(
            device
        )
        advantages = mode_advantages(micro.advantages, self.advantage_mode).to(device)
        r_B = optimality(advantages, advantage_max=self.advantage_max)
        sample_R = torch.arange(x0_B.shape[0], device=device).repeat_interleave(num_levels)
        step_R = self._nearest_steps(segment, sigma_BK.reshape(-1))
        for rows in row_chunks(sample_R.numel(), self.rows_per_forward):
            samples = sample_R[rows]
            sigma = sigma_BK.reshape(-1)[rows]
            x0 = x0_B[samples]
            x_t = interpolate(x0, noise_BK.reshape(-1, *latent_shape)[rows], sigma)
            conditions = {name: item.select(samples) for name, item in micro.track.conditions.items()}

            def velocity(x_t=x_t, sigma=sigma, steps=step_R[rows], conditions=conditions) -> Tensor:
                return self._pipeline.velocity(conditions, x_t, sigma, steps, params).float()

            # Other policies run first: they swap parameter values, which a pending backward would not survive.
            with torch.no_grad(), self._policies.using_policy(OLD):
                v_old = velocity()
            v_reference = None
            if self.kl_coef > 0:
                with torch.no_grad(), self._policies.reference_policy():
                    v_reference = velocity()
            v_new = velocity()
            branches = nft_loss(
                v_new,
                v_old,
                x_t,
                x0,
                sigma,
                r_B[samples],
                beta=self.beta,
                advantage_max=self.advantage_max,
                adaptive_weight=self.adaptive_weight,
            )
            loss_R = branches.loss_R
            metrics = RowMetrics()
            metrics.mean("nft/positive_loss", branches.positive_R)
            metrics.mean("nft/negative_loss", branches.negative_R)
            metrics.mean("nft/optimality_mean", r_B[samples])
            metrics.mean("nft/policy_distance", velocity_distance(v_new, v_old))
            metrics.mean("policy/loss", loss_R)
            if v_reference is not None:
                distance_R = velocity_distance(v_new, v_reference)
                metrics.mean("policy/reference_kl", distance_R)
                loss_R = loss_R + self.kl_coef * distance_R
            yield LossPart(loss_R.sum(), loss_R.numel(), metrics)

    @staticmethod
    def _nearest_steps(segment: LatentSegment, sigma_R: Tensor) -> Tensor:
        """Index of the rollout step whose level is nearest: what a model with per-step state is told."""
        levels = segment.sigmas[:-1].to(sigma_R.device)
        return (sigma_R[:, None] - levels[None, :]).abs().argmin(dim=1)

    def after_rollout(self) -> dict[str, float]:
        """Let the old policy follow: old <- d old + (1 - d) new."""
        decay = self.decay(self.num_rollouts)
        self._policies.update_policy(OLD, decay)
        self.num_rollouts += 1
        return {"nft/old_policy_decay": decay}

    def state_dict(self) -> dict[str, float]:
        """How many rollouts the decay has seen."""
        return {"num_rollouts": self.num_rollouts}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the decay's counter."""
        self.num_rollouts = int(state["num_rollouts"])
