"""Sampling and replay of any adapter: the one place where a model meets the denoise loop.

The model runs under autocast as the parameters say, the kernel always in float32 outside of it. Step noise is keyed by
sample and step, so a sample gets the same trajectory alone or in any batch up to the model's own rounding. In float32
on a CPU a replay of one step with the rows of the rollout gives the rollout's log-probability bit for bit.
Shape letters: see `unirl.models`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.models.adapter import DiffusionAdapter, num_rows, select_rows
from unirl.sde import loop
from unirl.sde.kernels import SDEStrategy
from unirl.sde.loop import Velocity
from unirl.sde.noise import step_noise
from unirl.sde.shared_steps import sample_shared
from unirl.sde.solvers import DPMSolverPP2M, Solver, UniPCSolver
from unirl.types.branching import Branching
from unirl.types.errors import ConfigError, ContractError
from unirl.types.precision import DTYPES
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


@dataclass(frozen=True)
class ReplayedTransitions:
    """Stored transitions under the present weights; gradients flow to them through logp_R and mean."""

    logp_R: Tensor
    """[R] float32, nats per latent element, or summed, as the strategy's reduction says."""
    mean: Tensor
    """[R, ...] float32."""
    std_R: Tensor
    """[R] float32, without gradient."""
    q_R: Tensor | None
    """[R] float32 diffusion coefficient, without gradient; None for a kernel that has none."""


class DiffusionStage:
    """Samples trajectories of an adapter with a kernel, and replays rows of them.

    forward_batch_size: most rows in one forward of the model, before guidance doubles them; None sets no limit. It
    bounds memory without gradients; with gradients the activations of all rows of one call are kept all the same.
    """

    def __init__(
        self, adapter: DiffusionAdapter, strategy: SDEStrategy, *, forward_batch_size: int | None = None
    ) -> None:
        if forward_batch_size is not None and forward_batch_size < 1:
            raise ConfigError(f"forward_batch_size = {forward_batch_size} must be at least 1, or null for no limit")
        self.adapter = adapter
        self.strategy = strategy
        self.forward_batch_size = forward_batch_size

    def diffuse(
        self,
        conditions: Conditions,
        initial_latents: Tensor,
        sigmas: Tensor,
        params: DiffusionSamplingParams,
        *,
        noise_keys: Sequence[str],
        start_keys: Sequence[str] | None = None,
        keep_means: bool = False,
    ) -> LatentSegment:
        """Trajectories of B samples from `initial_latents` [B, ...], which the adapter's `starting_latents` puts at
        sigmas[0].

        sigmas: [T + 1], used verbatim. noise_keys: B ids that seed the noise of each step with params.seed.
        start_keys: B ids; samples of one id have equal initial latents and conditions, so the steps before the first
        stochastic one are taken once for all of them. None: every sample for itself.
        params.keep_latents, keep_means: what is stored, see `unirl.sde.loop.sample`.
        The stochastic steps are params.sde_indices, or every step where that is None; none at eta = 0.
        Raises ContractError if sizes disagree, ConfigError for parameters that this stage cannot honour.
        """
        self._check(params)
        num_samples = initial_latents.shape[0]
        shape = self.adapter.latent_shape(params)
        if tuple(initial_latents.shape[1:]) != shape:
            raise ContractError(
                f"initial latents are {tuple(initial_latents.shape)}; this geometry needs [B, *{shape}]"
            )
        if not num_rows(conditions) == len(noise_keys) == num_samples:
            raise ContractError(
                f"{num_samples} initial latents, {num_rows(conditions)} conditions and {len(noise_keys)} noise keys: "
                "one of each per sample"
            )
        if sigmas.numel() != params.num_inference_steps + 1:
            raise ContractError(
                f"{sigmas.numel()} sigmas for num_inference_steps = {params.num_inference_steps}: one more than steps"
            )
        sde_indices = _stochastic_steps(params)
        latents, start = self.adapter.starting_latents(initial_latents, float(sigmas[0]), conditions), 0
        branching = params.branching
        if branching is not None:
            _check_trees(branching, start_keys, num_samples)
        elif start_keys is not None and sde_indices and params.keep_latents != "all":
            latents, start = self._common_start(conditions, latents, sigmas, params, start_keys, min(sde_indices))

        def velocity_of(rows: list[int]) -> Velocity:
            return self.velocity(conditions if len(rows) == num_samples else select_rows(conditions, rows), params)

        trajectory = sample_shared(
            velocity_of,
            latents,
            sigmas,
            [(start, 1)] if branching is None else branching.stages,
            strategy=self.strategy,
            eta=params.eta,
            sde_indices=sde_indices,
            step_noise=lambda step, rows: step_noise([noise_keys[row] for row in rows], step, params.seed, shape),
            storage_dtype=DTYPES[params.trajectory_precision],
            solver=_solver(params),
            keep=params.keep_latents,
            keep_means=keep_means,
        )
        return LatentSegment(
            modality=self.adapter.modality,
            latents=trajectory.latents,
            sigmas=sigmas.detach().to("cpu", torch.float32),
            indices=trajectory.indices,
            sde_indices=trajectory.sde_indices,
            sde_logp=trajectory.sde_logp,
            sde_means=trajectory.sde_means,
        )

    def _common_start(
        self,
        conditions: Conditions,
        initial_latents: Tensor,
        sigmas: Tensor,
        params: DiffusionSamplingParams,
        start_keys: Sequence[str],
        position: int,
    ) -> tuple[Tensor, int]:
        """Latents [B, ...] at `position`, walked to once for every distinct start; and that position."""
        first_of = {key: row for row, key in reversed(list(enumerate(start_keys)))}
        if position == 0 or len(first_of) == len(start_keys):
            return initial_latents, 0
        rows = sorted(first_of.values())
        walked = loop.sample(
            self.velocity(select_rows(conditions, rows), params),
            initial_latents[rows],
            sigmas[: position + 1],
            storage_dtype=DTYPES[params.trajectory_precision],
            keep="last",
        )
        return walked.final[[rows.index(first_of[key]) for key in start_keys]], position

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
            self.velocity(select_rows(conditions, sample_R.tolist()), params),
            x_R,
            next_R,
            sigma_R,
            sigma_next_R,
            step_R.to(x_R.device),
            strategy=self.strategy,
            eta=params.eta,
            sigma_max=sigma_max,
        )
        # The coefficient depends on sigmas alone; one zero per row stands for the latent.
        nothing = torch.zeros(len(sigma_R), 1, device=sigma_R.device)
        q_R = self.strategy.transition(nothing, nothing, sigma_R, sigma_next_R, eta=params.eta, sigma_max=sigma_max).q_R
        return ReplayedTransitions(logp_R=out.logp_R, mean=out.mean, std_R=out.std_R, q_R=q_R)

    def step_std(self, segment: LatentSegment) -> Tensor:
        """Standard deviation of the noise of each stochastic step of a sampled segment, [S] float32 on the CPU."""
        if segment.params is None:
            raise ContractError("the segment does not hold the parameters that it was sampled with")
        self._check(segment.params)
        return self.strategy.step_std(segment.sigmas, segment.sde_indices, eta=segment.params.eta)

    def velocity(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        """velocity(x_R, sigma_R, step_R) -> float32, under autocast, in forwards of at most `forward_batch_size` rows.

        conditions: one row per row of x.
        """
        rows = num_rows(conditions)
        size = self.forward_batch_size
        if size is None or rows <= size:
            parts = [(slice(0, rows), self.adapter.bind(conditions, params))]
        else:
            starts = range(0, rows, size)
            cuts = [slice(start, min(start + size, rows)) for start in starts]
            parts = [
                (cut, self.adapter.bind(select_rows(conditions, list(range(cut.start, cut.stop))), params))
                for cut in cuts
            ]
        is_mixed = params.autocast_precision != "fp32"
        dtype = DTYPES[params.autocast_precision] if is_mixed else None

        def run(x_R: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
            if x_R.shape[0] != rows:
                raise ContractError(f"{x_R.shape[0]} rows of latents for conditions of {rows} rows")
            with torch.autocast(x_R.device.type, dtype=dtype, enabled=is_mixed):
                outputs = [bound(x_R[cut], sigma_R[cut], step_R[cut]) for cut, bound in parts]
            return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).float()

        return run

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


def _stochastic_steps(params: DiffusionSamplingParams) -> list[int]:
    if params.sde_indices is None and params.scheduler is not None:
        raise ConfigError(
            "sampling.scheduler chooses the stochastic steps per rollout and has not been asked: "
            "pass params.resolved(rollout_id)"
        )
    return params.resolve_sde_indices(rollout_id=0)


def _check_trees(branching: Branching, start_keys: Sequence[str] | None, num_samples: int) -> None:
    """Raise ContractError unless the samples are whole trees, each from one start."""
    size = branching.num_leaves
    trees = [] if start_keys is None else [set(start_keys[at : at + size]) for at in range(0, num_samples, size)]
    if not trees or num_samples % size or any(len(tree) > 1 for tree in trees):
        raise ContractError(
            f"{num_samples} samples from {len(set(start_keys or ()))} common starts are not whole trees of {size}, one "
            f"after the other (branch_factors = {list(branching.factors)}). Set engine.forward_batch_size to a "
            f"multiple of {size}"
        )


def _solver(params: DiffusionSamplingParams) -> Solver | None:
    """Solver of the deterministic steps; None for Euler's, which the loop takes itself."""
    match params.post_solver:
        case "euler":
            return None
        case "dpmpp_2m":
            return DPMSolverPP2M()
        case "unipc":
            return UniPCSolver()
