"""AnyFlow FAR as the pipeline that recipes name. Shape letters: see `unirl.models`; T steps, S of them stochastic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

import torch
from torch import Tensor

from unirl.models.adapter import select_rows
from unirl.models.anyflow.adapter import HISTORY, AnyFlowFARAdapter, Target
from unirl.models.anyflow.chunks import ranges
from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.diffusion import check_sizes, in_forwards, never, segment_of, stochastic_steps
from unirl.sde import loop
from unirl.sde.kernels import Transition
from unirl.sde.loop import Trajectory, Velocity
from unirl.sde.noise import step_noise
from unirl.types.conditions import Condition, ImageLatentCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.precision import DTYPES
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


class AnyFlowFARPipeline(DiffusersPipeline):
    """Videos that are made chunk by chunk, see `unirl.models.diffusers_pipeline.pipeline.DiffusersPipeline`.

    Every chunk walks the whole schedule, given the clean latents of those before it. A trajectory is that of all
    chunks: a stored latent holds each of them at that level, and a log-prob is that of their transitions together,
    each conditioned on the ends of those before it, which a replay reads in the segment.
    Deterministic steps use the average velocity down to the next level, as the stock pipeline does; stochastic ones
    that down to 0 where the kernel asks for a clean latent, else the velocity at their level.
    The schedule without a name is linspace(1, 0, T + 1) with the shift of the checkpoint's scheduler.
    """

    recipe_rules = "unirl.models.anyflow.rules"
    adapter_class = AnyFlowFARAdapter

    @property
    def _family(self) -> AnyFlowFARAdapter:
        return cast(AnyFlowFARAdapter, self.adapter)

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
        """See `DiffusionPipeline.diffuse`. Videos are always finished, `is_ending` is not asked; and each is walked
        alone, whatever `start_keys` says, since chunks after the first have no common start.

        Raises ConfigError for a solver, for trees, and for a stochastic step of each sample alone.
        """
        del start_keys, is_ending
        self._check(params)
        _check_walk(params, own_steps, begun)
        shape = self.latent_shape(params)
        check_sizes(conditions, initial_latents, sigmas, noise_keys, shape, params.num_inference_steps)
        steps = sorted(stochastic_steps(params))
        target = self._target(sigmas, steps)
        following: dict[int, list[Tensor]] = {step: [] for step in steps}
        walks: list[Trajectory] = []
        history = initial_latents[:, :, :0].float()

        @cache
        def noise(step: int) -> Tensor:
            return step_noise(noise_keys, step, params.seed, shape)

        def keep_next(step: int, latents: Tensor) -> None:
            if step in following:
                following[step].append(latents)

        for index, frames in enumerate(ranges(self._family.chunks(shape[1]))):
            before: dict[str, Condition] = {HISTORY: ImageLatentCondition(latents=history)}
            walked = loop.sample(
                self._bound_chunk({**conditions, **before}, params, target, index),
                initial_latents[:, :, frames],
                sigmas,
                strategy=self.strategy,
                eta=params.eta,
                sde_indices=steps,
                step_noise=lambda step, frames=frames: noise(step)[:, :, frames],
                storage_dtype=DTYPES[params.trajectory_precision],
                keep=params.keep_latents,
                keep_means=bool(steps),
                on_step=keep_next,
            )
            walks.append(walked)
            history = torch.cat([history, walked.final.float()], dim=2)
        return segment_of(self._joined(walks, following, sigmas, params), self.adapter.modality, sigmas, None)

    def replaying(
        self, conditions: Conditions, segment: LatentSegment, sample_R: Tensor, params: DiffusionSamplingParams
    ) -> Velocity:
        """Given the clean latents of the segment. Gradients flow to what the model makes of them."""
        rows, target = sample_R.tolist(), self._target(segment.sigmas, segment.sde_indices)
        history = ImageLatentCondition(latents=segment.clean_latents[rows].float())

        def bind(conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
            return self._family.bind_to(conditions, params, target)

        given: dict[str, Condition] = {**select_rows(conditions, rows), HISTORY: history}
        return in_forwards(bind, given, params, self.forward_batch_size)

    def _bound_chunk(
        self, conditions: Conditions, params: DiffusionSamplingParams, target: Target, index: int
    ) -> Velocity:
        def bind(conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
            return self._family.bind_chunk(conditions, params, target, index)

        return in_forwards(bind, conditions, params, self.forward_batch_size)

    def _target(self, sigmas: Tensor, stochastic: Sequence[int]) -> Target:
        """Down to which level the velocity of each step is averaged, by the step's own level."""
        levels = sigmas.detach().to("cpu", torch.float32)
        ends = levels[1:].clone()
        for step in stochastic:
            ends[step] = 0.0 if self.strategy.asks_for_clean else levels[step]

        def target(sigma_R: Tensor) -> Tensor:
            step_R = (sigma_R[:, None] - levels[:-1].to(sigma_R.device)).abs().argmin(dim=1)
            return ends.to(sigma_R.device)[step_R]

        return target

    def _joined(
        self,
        walks: Sequence[Trajectory],
        following: dict[int, list[Tensor]],
        sigmas: Tensor,
        params: DiffusionSamplingParams,
    ) -> Trajectory:
        """The trajectory of all chunks. following: their latents after each stochastic step."""
        latents = torch.cat([walk.latents for walk in walks], dim=3)
        rows = torch.zeros(len(latents), 1, device=latents.device)
        logps = []
        for slot, (step, parts) in enumerate(following.items()):
            means = [walk.sde_means[:, slot] for walk in walks if walk.sde_means is not None]
            sigma_R, sigma_next_R = (sigmas[at].float().to(rows).expand(len(rows)) for at in (step, step + 1))
            # The deviation depends on levels alone; one number per row stands for the latent.
            unit = self.strategy.transition(
                rows, rows, sigma_R, sigma_next_R, eta=params.eta, sigma_max=float(sigmas[1])
            )
            moved = Transition(mean=torch.cat(means, dim=2), std_R=unit.std_R, q_R=unit.q_R)
            logps.append(self.strategy.log_prob(torch.cat(parts, dim=2), moved))
        return Trajectory(
            latents=latents,
            indices=walks[0].indices,
            sde_indices=walks[0].sde_indices,
            sde_logp=torch.stack(logps, dim=1) if logps else None,
            sde_means=None,
        )


def _check_walk(params: DiffusionSamplingParams, own_steps: Sequence[int] | None, begun: LatentSegment | None) -> None:
    """Raise for a walk that chunks cannot take."""
    if params.post_solver != "euler":
        raise ConfigError(
            f"post_solver = {params.post_solver}: a solver combines velocities at levels, and AnyFlow FAR steps by "
            "average velocities down to the next. Set sampling.post_solver: euler."
        )
    if params.branching is not None or own_steps is not None:
        raise ConfigError(
            "AnyFlow FAR makes each video alone, with the same stochastic steps in all: chunks after the first have no "
            "common start. Remove sampling.branch_steps and branch_factors, and set sampling.one_step: null."
        )
    if begun is not None:
        raise ContractError("AnyFlow FAR finishes every video; none that was begun can be continued")
