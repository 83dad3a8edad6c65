"""What every engine verifies about its own work before a response leaves it."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.sde.noise import initial_noise
from unirl.types.conditions import ImageLatentCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.noise import NoiseRecipe, noise_key
from unirl.types.own_steps import own_logp
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


def diffusion_params(req: RolloutReq) -> DiffusionSamplingParams:
    """The request's sampling parameters. Raises ContractError if they are not DiffusionSamplingParams or their
    stochastic steps are not resolved."""
    params = req.sampling_params
    if not isinstance(params, DiffusionSamplingParams):
        raise ContractError(f"this engine needs DiffusionSamplingParams, the request has {type(params).__name__}")
    if params.scheduler is not None:
        raise ContractError("the request's stochastic steps are not resolved; the driver calls params.resolved(...)")
    return params


def pinned_sigmas(req: RolloutReq, params: DiffusionSamplingParams) -> Tensor:
    """The request's noise levels, checked: float32 [T+1], decreasing, ending with 0."""
    sigmas = req.sigmas
    if sigmas is None:
        raise ContractError("the request pins no sigmas; they have one owner, the driver")
    if sigmas.dtype != torch.float32 or sigmas.shape != (params.num_inference_steps + 1,):
        raise ContractError(
            f"sigmas are {sigmas.dtype} {tuple(sigmas.shape)}, expected float32 [{params.num_inference_steps + 1}]"
        )
    if float(sigmas[-1]) != 0.0 or not bool((sigmas.diff() < 0).all()):
        raise ContractError(f"sigmas must decrease and end with 0, got {sigmas.tolist()}")
    return sigmas


def noise_recipe(req: RolloutReq, params: DiffusionSamplingParams) -> NoiseRecipe:
    """The recipe of the request's initial noise. Raises ContractError if ids or shape are missing."""
    if len(req.init_noise_group_ids) != req.batch_size or req.init_noise_latent_shape is None:
        raise ContractError(
            f"the request has {len(req.init_noise_group_ids)} noise ids for {req.batch_size} samples and latent shape "
            f"{req.init_noise_latent_shape}; the driver sets both"
        )
    start = req.request_conditions.get("initial_latents")
    return NoiseRecipe(
        keys=tuple(req.init_noise_group_ids),
        base_seed=params.seed,
        latent_shape=tuple(req.init_noise_latent_shape),
        initial_latents=start.latents if isinstance(start, ImageLatentCondition) else None,
    )


def starting_latents(recipe: NoiseRecipe) -> Tensor:
    """x_T of a recipe, float32 on CPU [B, ...]: its initial latents verbatim, else counter-based noise."""
    if recipe.initial_latents is not None:
        return recipe.initial_latents
    return initial_noise(recipe.keys, recipe.base_seed, recipe.latent_shape)


def step_noise_keys(req: RolloutReq) -> list[str]:
    """What the draws of each sample are named after, of every step or token: one per sample, even if samples share
    their initial noise."""
    return [noise_key(req.rollout_id, sample) for sample in req.sample_ids]


def own_steps(req: RolloutReq, params: DiffusionSamplingParams) -> list[int] | None:
    """The one stochastic step of each sample; None where samples have all. Raises ContractError if they are missing."""
    if params.one_step is None or params.eta == 0:
        return None
    if len(req.own_steps) != req.batch_size:
        raise ContractError(
            f"one_step = {params.one_step} but the request names {len(req.own_steps)} steps for {req.batch_size} "
            "samples; the driver sets them"
        )
    return req.own_steps


def same_kernel(params: DiffusionSamplingParams, engine_kernel: str) -> None:
    """Raise ConfigError if the request names another kernel than the engine uses."""
    if params.sde_strategy is not None and params.sde_strategy != engine_kernel:
        raise ConfigError(
            f"the request asks for the {params.sde_strategy!r} kernel, this engine steps with {engine_kernel!r}. "
            "Set pipeline.strategy and the engine's kernel to the same one."
        )


def verify_segment(segment: LatentSegment, sigmas: Tensor, params: DiffusionSamplingParams) -> None:
    """Raise ContractError unless the segment echoes the request's sigmas and stochastic steps, with log-probs."""
    if not torch.equal(segment.sigmas.cpu(), sigmas.cpu()):
        raise ContractError(f"the engine used sigmas {segment.sigmas.tolist()}, the request pinned {sigmas.tolist()}")
    expected = params.sde_indices if params.eta > 0 else []
    if expected is not None and sorted(segment.sde_indices) != sorted(expected):
        raise ContractError(f"the engine made steps {segment.sde_indices} stochastic, the request asked for {expected}")
    if (segment.own_steps is None) != (params.one_step is None or params.eta == 0):
        raise ContractError(f"the request has one_step = {params.one_step}, which the engine did not heed")
    logp = own_logp(segment)
    if segment.sde_indices and logp is not None and not bool(torch.isfinite(logp).all()):
        bad = (~torch.isfinite(logp)).any(dim=1).nonzero().flatten().tolist()
        raise ContractError(f"log-probs of samples {bad[:8]} are not finite")
    if not bool(torch.isfinite(segment.clean_latents).all()):
        finite = torch.isfinite(segment.clean_latents).flatten(1).all(dim=1)
        bad = (~finite).nonzero().flatten().tolist()
        raise ContractError(f"latents of samples {bad[:8]} are not finite; the policy has diverged")
