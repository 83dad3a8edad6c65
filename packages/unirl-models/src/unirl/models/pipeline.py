"""The object that engines and trainers hold: an adapter, a kernel and a sigma schedule under one roof.

The one place where a model meets the denoise loop.

The model runs under autocast as the parameters say, the kernel always in float32 outside of it. Step noise is keyed by
sample and step, so a sample gets the same trajectory alone or in any batch up to the model's own rounding. In float32
on a CPU a replay of one step with the rows of the rollout gives the rollout's log-probability bit for bit.
Implements `unirl.types.protocols.models.DiffusionPipeline`. Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from torch import Tensor

from unirl.models.adapter import DiffusionAdapter, select_rows
from unirl.models.diffusion import (
    ReplayedTransitions,
    check_sizes,
    check_trees,
    common_start,
    ended_early,
    in_forwards,
    never,
    recalls,
    segment_of,
    solver_of,
    stochastic_steps,
    unfinished_steps,
    walked_together,
)
from unirl.models.evaluation_mode import evaluating
from unirl.sde import loop
from unirl.sde.kernels import SDEStrategy
from unirl.sde.loop import Velocity
from unirl.sde.noise import step_noise
from unirl.sde.schedule import Schedule
from unirl.sde.shared_steps import sample_shared
from unirl.sde.unfinished import Walk, stages_from
from unirl.types.conditions import Condition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Images, Primitive, Videos
from unirl.types.precision import DTYPES
from unirl.types.protocols.models import Conditions, ModelBundle
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


class DiffusionPipeline:
    """A diffusion model that can sample a trajectory and replay rows of it.

    strategy: the kernel of the stochastic steps. Required: a default that differs from the engine's would make replay
    silently wrong.
    schedule: the noise levels; `sigmas` evaluates it once per request, everyone else uses the result verbatim.
    forward_batch_size: most rows in one forward of the model, before guidance doubles them; None sets no limit. It
    bounds memory without gradients; with gradients the activations of all rows of one call are kept all the same.
    """

    recipe_rules: ClassVar[str] = "unirl.models.pipeline_rules"
    """Module with the rules of recipes, see `unirl.types.recipe`."""
    takes_any_sigma: ClassVar[bool] = True
    """False for a model that knows the levels of its own timesteps alone."""
    latent_media: ClassVar[tuple[str, ...]] = ()
    """Names of the media that a latent holds one after the other; empty where it is one."""

    def __init__(
        self,
        adapter: DiffusionAdapter,
        strategy: SDEStrategy,
        schedule: Schedule,
        *,
        forward_batch_size: int | None = None,
    ) -> None:
        if forward_batch_size is not None and forward_batch_size < 1:
            raise ConfigError(f"forward_batch_size = {forward_batch_size} must be at least 1, or null for no limit")
        self.adapter = adapter
        self.strategy = strategy
        self.schedule = schedule
        self.forward_batch_size = forward_batch_size

    @property
    def bundle(self) -> ModelBundle:
        """The model's modules and what training needs to know of them."""
        return self.adapter.bundle

    @property
    def strategy_name(self) -> str:
        return self.strategy.name

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """Shape of ONE latent. Raises ConfigError if the geometry does not divide."""
        return self.adapter.latent_shape(params)

    def sigmas(self, params: DiffusionSamplingParams) -> Tensor:
        """[T + 1] float32 noise levels of the model's schedule for this number of steps and geometry."""
        return self.schedule.sigmas(params.num_inference_steps, self.adapter.image_seq_len(params))

    def encode(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> dict[str, Condition]:
        """Conditions of B samples, without gradient."""
        return self.adapter.encode(primitives, params)

    # Sampling --------------------------------------------------------------------------------------------------------

    def diffuse(
        self,
        conditions: Conditions,
        initial_latents: Tensor,
        sigmas: Tensor,
        params: DiffusionSamplingParams,
        *,
        noise_keys: Sequence[str],
        start_keys: Sequence[str] | None = None,
        own_steps: Sequence[int] | None = None,
        begun: LatentSegment | None = None,
        is_ending: Callable[[], bool] = never,
    ) -> LatentSegment:
        """Trajectories of B samples from `initial_latents` [B, ...], which the adapter's `starting_latents` puts at
        sigmas[0]. Call inside `evaluating()`.

        sigmas: [T + 1], used verbatim. noise_keys: B ids that seed the noise of each step with params.seed.
        start_keys: B ids; samples of one id have equal initial latents and conditions, so the steps before the first
        stochastic one are taken once for all of them. None: every sample for itself.
        own_steps: B of the stochastic steps, the only one of each sample; None: samples have all of them.
        begun, is_ending: see `unirl.types.protocols.models.ResumingDiffusionPipeline`.
        params.keep_latents: what is stored, see `unirl.sde.loop.sample`.
        The stochastic steps are params.sde_indices, or every step where that is None; none at eta = 0.
        Raises ContractError if sizes disagree, ConfigError for parameters that this pipeline cannot honour.
        """
        self._check(params)
        num_samples, shape = initial_latents.shape[0], self.adapter.latent_shape(params)
        check_sizes(conditions, initial_latents, sigmas, noise_keys, shape, params.num_inference_steps)
        sde_indices, solver, left = stochastic_steps(params), solver_of(params), unfinished_steps(begun)
        walk, branching = Walk(left, is_ending), params.branching
        solver_goes_on = recalls(solver, left, sigmas, sde_indices)
        latents, start = self.adapter.starting_latents(initial_latents, float(sigmas[0]), conditions), 0
        if left is not None and left.reached:
            latents, start = left.state[:, 0], left.reached

        def velocity_of(rows: list[int]) -> Velocity:
            return self.bound(conditions if len(rows) == num_samples else select_rows(conditions, rows), params)

        dtype, trajectory = DTYPES[params.trajectory_precision], None
        if branching is not None:
            check_trees(branching, start_keys, num_samples)
        elif start_keys is not None and sde_indices and params.keep_latents != "all":
            latents, start = common_start(
                velocity_of, latents, sigmas[: min(sde_indices) + 1], dtype, start_keys, start, walk
            )
        velocities = velocity_of
        if own_steps is not None and start_keys is not None and self.forward_batch_size is None:
            # Ranks that share a model's shards must run equally many forwards, so rows that are cut are not left out.
            together = walked_together(velocity_of, start_keys, own_steps, start)
            velocities = lambda rows: together  # noqa: E731
        if not walk.is_over:
            trajectory = sample_shared(
                velocities,
                latents,
                sigmas,
                stages_from([(0, 1)] if branching is None else branching.stages, start),
                strategy=self.strategy,
                eta=params.eta,
                sde_indices=sde_indices,
                step_noise=lambda step, rows: step_noise([noise_keys[row] for row in rows], step, params.seed, shape),
                storage_dtype=dtype,
                solver=solver,
                keep=params.keep_latents,
                own_steps=own_steps,
                on_step=walk,
                solver_goes_on=solver_goes_on,
            )
        trajectory, unfinished = walk.whole(
            trajectory,
            latents,
            start,
            keep=params.keep_latents,
            sde_indices=sde_indices,
            num_steps=params.num_inference_steps,
            solver=solver,
            storage_dtype=dtype,
        )
        segment = segment_of(trajectory, self.adapter.modality, sigmas, own_steps)
        if unfinished is not None:
            return ended_early(segment, unfinished)
        self.remember(conditions, segment, params)
        return segment

    def remember(self, conditions: Conditions, segment: LatentSegment, params: DiffusionSamplingParams) -> None:
        """Add to `conditions` what replays of the segment need besides it; nothing for most models."""

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images | Videos:
        """Media of clean latents [B, ...] that were sampled with `params`, float32 in [0, 1]."""
        return self.adapter.decode(latents, params)

    def encode_media(self, media: Images | Videos) -> Tensor:
        """Clean latents [B, ...] of media, float32, without gradient, see `DiffusionAdapter.encode_media`."""
        return self.adapter.encode_media(media)

    # Replay ----------------------------------------------------------------------------------------------------------

    def replay(
        self,
        conditions: Conditions,
        segment: LatentSegment,
        sample_R: Tensor,
        step_R: Tensor,
        params: DiffusionSamplingParams,
    ) -> ReplayedTransitions:
        """Log-probs of stored transitions under the present weights: one call of the velocity for all R rows.

        conditions: of the segment's B samples. sample_R, step_R: int64 [R], any mixture of samples and steps.
        Raises ContractError for a step that was not stochastic or not stored.
        """
        self._check(params)
        steps = set(step_R.tolist())
        if not steps <= set(segment.sde_indices):
            raise ContractError(
                f"steps {sorted(steps - set(segment.sde_indices))} were not stochastic and have no density; the "
                f"stochastic steps of this segment are {segment.sde_indices}"
            )
        x_R, next_R, sigma_R, sigma_next_R = segment.transitions(sample_R, step_R)
        sigma_max = float(segment.sigmas[1])
        out = loop.replay(
            self.replaying(conditions, segment, sample_R, params),
            x_R,
            next_R,
            sigma_R,
            sigma_next_R,
            step_R.to(x_R.device),
            strategy=self.strategy,
            eta=params.eta,
            sigma_max=sigma_max,
        )
        # Coefficients depend on sigmas alone; one number per row stands for the latent.
        nothing, one = (torch.full((len(sigma_R), 1), value, device=sigma_R.device) for value in (0.0, 1.0))
        unit = self.strategy.transition(nothing, one, sigma_R, sigma_next_R, eta=params.eta, sigma_max=sigma_max)
        return ReplayedTransitions(
            logp_R=out.logp_R, mean=out.mean, std_R=out.std_R, q_R=unit.q_R, gain_R=unit.mean[:, 0]
        )

    def replaying(
        self, conditions: Conditions, segment: LatentSegment, sample_R: Tensor, params: DiffusionSamplingParams
    ) -> Velocity:
        """The velocity of stored rows; `conditions` has one row per sample of the segment."""
        del segment
        return self.bound(select_rows(conditions, sample_R.tolist()), params)

    def step_std(self, segment: LatentSegment) -> Tensor:
        """Standard deviation of the noise of each stochastic step of a sampled segment, [S] float32 on the CPU."""
        if segment.params is None:
            raise ContractError("the segment does not hold the parameters that it was sampled with")
        self._check(segment.params)
        return self.strategy.step_std(segment.sigmas, segment.sde_indices, eta=segment.params.eta)

    def step_gain(self, segment: LatentSegment) -> Tensor:
        """Derivative of the mean by the velocity at each stochastic step of a segment, [S] float32 on the CPU."""
        if segment.params is None:
            raise ContractError("the segment does not hold the parameters that it was sampled with")
        self._check(segment.params)
        return self.strategy.step_gain(segment.sigmas, segment.sde_indices, eta=segment.params.eta)

    def velocity(
        self, conditions: Conditions, x_R: Tensor, sigma_R: Tensor, step_R: Tensor, params: DiffusionSamplingParams
    ) -> Tensor:
        """Velocity [R, ...] float32 at R rows; `conditions` has one row per row. Guidance as in `params`."""
        return self.bound(conditions, params)(x_R, sigma_R, step_R)

    def bound(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        """velocity(x_R, sigma_R, step_R) -> float32, under autocast, in forwards of at most `forward_batch_size` rows.

        conditions: one row per row of x.
        """
        return in_forwards(self.adapter.bind, conditions, params, self.forward_batch_size)

    def _check(self, params: DiffusionSamplingParams) -> None:
        if params.sde_strategy is not None and params.sde_strategy != self.strategy.name:
            raise ConfigError(
                f"the request asks for the kernel {params.sde_strategy!r}, this pipeline has {self.strategy.name!r}. "
                "Use one kernel in sampling.sde_strategy and in the pipeline's strategy."
            )
        if params.logprob_precision != "fp32":
            raise ConfigError(
                f"logprob_precision = {params.logprob_precision!r}: log-probs are always taken in float32. Set fp32."
            )

    # Texts -----------------------------------------------------------------------------------------------------------

    def encode_texts(
        self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams
    ) -> dict[str, Condition]:
        """Those of the conditions that text encoders make, which are then remembered. See `DiffusionAdapter`."""
        return self.adapter.encode_texts(primitives, params)

    def cut_tokens(self, texts: Sequence[str], params: DiffusionSamplingParams) -> list[int]:
        """Tokens of each text that no encoder reads, see `DiffusionAdapter`."""
        return self.adapter.cut_tokens(texts, params)

    @property
    def encoders_rest(self) -> bool:
        """True if text encoders rest in host memory between rollouts."""
        return self.adapter.encoders_rest

    def visiting_encoders(self) -> AbstractContextManager[None]:
        """Text encoders that rest leave the device at its end. See `DiffusionAdapter`."""
        return self.adapter.visiting_encoders()

    def drop_text_encoders(self) -> None:
        """Free the text encoders; prompts that were encoded before still encode. See `DiffusionAdapter`."""
        self.adapter.drop_text_encoders()

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients; each submodule gets its own mode back afterwards."""
        return evaluating(self.bundle)
