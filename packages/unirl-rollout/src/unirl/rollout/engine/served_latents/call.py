"""Converts requests to the plain values that diffusion engines in other processes take, and answers to segments.

The engine only samples: it takes the initial latents, the noise keys of every stochastic step, the sigmas and the
encoded prompts, and returns the stored latents and log-probs. The trainer's pipeline encodes and decodes, so both sides
use identical text embeddings, and the engine's own encoders and VAE are not used.

Legend: B samples, T steps, K stored positions of the T + 1, S stochastic steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unirl.rollout.checks import (
    diffusion_params,
    noise_recipe,
    pinned_sigmas,
    same_kernel,
    starting_latents,
    step_noise_keys,
    verify_segment,
)
from unirl.sde.kernels import SIGMA_ONE
from unirl.sde.noise import step_noise
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Modality
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment

LATENTS = "latents"
"""Name of the initial latents in a request's file, and of the stored latents in an answer's."""
LOG_PROBS, ECHOED_SIGMAS = "log_probs", "sigmas"
_NOISE_TOLERANCE = 1e-4
"""Nats per element by which a log-prob may differ from that of the requested noise. Rounding stays below 1e-5; other
noise differs by about 0.7 / sqrt(elements), 7e-4 for a million elements."""


@dataclass(frozen=True)
class SampleLatents:
    """Sample one trajectory for every row of a file of tensors."""

    path: str
    """safetensors: the initial latents and the conditions, in the engine's own names and layout."""
    num_samples: int
    noise_keys: list[str]
    """B ids that seed the noise of each step, see `unirl.sde.noise.step_noise`."""
    noise_seed: int
    noise_shape: list[int]
    """Shape of a single latent in the trainer's layout."""
    sigmas: list[float]
    """T + 1, ending with 0."""
    kernel: str
    eta: float
    sde_indices: list[int]
    positions: list[int]
    """K positions to store, ascending; the last is T."""
    height: int
    width: int
    num_frames: int
    guidance_scale: float
    guidance_scale_2: float | None = None
    """Guidance scale of the second of two experts; None if it has the first one's."""
    layout: dict[str, Any] = field(default_factory=dict)  # Any: JSON, in the engine's own words
    """Further facts about the tensors that the engine needs."""

    @property
    def scale_of_second(self) -> float:
        """Guidance scale by which the second of two experts is guided."""
        return self.guidance_scale if self.guidance_scale_2 is None else self.guidance_scale_2


@dataclass(frozen=True)
class SampledLatents:
    """The trajectories, in a file of tensors: `LATENTS` [B, K, ...], `LOG_PROBS` [B, S], `ECHOED_SIGMAS` [T + 1]."""

    policy_version: int
    path: str


def sampling_of(
    req: RolloutReq,
    kernel: str,
    kernels: Collection[str],
    engine: str,
    settings: Collection[str] = (),
    *,
    served: Collection[str] = (),
) -> DiffusionSamplingParams:
    """The request's parameters, checked against what the engine supports.

    kernel: the trainer's, used for replay. kernels: those that the engine has. settings: keys of `sampler_kwargs` that
    the engine knows. served: settings that this model has and others have not. Raises ConfigError naming the setting
    to change.
    """
    params = diffusion_params(req)
    same_kernel(params, kernel)
    if kernel not in kernels and params.eta > 0:
        raise ConfigError(
            f"{engine} steps with the kernels {sorted(kernels)}, the trainer replays with {kernel!r}. Set "
            "pipeline.strategy to one of them, or sample with the trainside or replica engine."
        )
    for name, neutral in (
        ("post_solver", "euler"),
        ("trajectory_precision", "fp32"),
        ("guidance_scale_2", None),
        ("distilled_guidance_scale", None),
    ):
        if name not in served and getattr(params, name) != neutral:
            raise ConfigError(
                f"sampling.{name} = {getattr(params, name)} is not served by {engine}. Set it to "
                f"{'null' if neutral is None else neutral}, or sample with the trainside or replica engine."
            )
    unknown = sorted(params.sampler_kwargs.keys() - set(settings))
    if unknown:
        raise ConfigError(f"sampling.sampler_kwargs {unknown} mean nothing to {engine}")
    return params


def stored_positions(params: DiffusionSamplingParams, sde_indices: list[int]) -> list[int]:
    """The positions that `params.keep_latents` asks for, ascending; T is always included."""
    last = params.num_inference_steps
    if params.keep_latents == "all":
        return list(range(last + 1))
    ends = {end for step in sde_indices for end in (step, step + 1)} if params.keep_latents == "transitions" else set()
    return sorted(ends | {last})


def latents_call(
    req: RolloutReq, params: DiffusionSamplingParams, kernel: str, path: str
) -> tuple[SampleLatents, Tensor]:
    """The call for a request, and its initial latents float32 [B, ...] on the CPU."""
    sigmas = pinned_sigmas(req, params)
    recipe = noise_recipe(req, params)
    sde_indices = params.resolve_sde_indices(req.rollout_id)
    call = SampleLatents(
        path=path,
        num_samples=req.batch_size,
        noise_keys=step_noise_keys(req),
        noise_seed=params.seed,
        noise_shape=list(recipe.latent_shape),
        sigmas=sigmas.tolist(),
        kernel=kernel,
        eta=params.eta,
        sde_indices=sde_indices,
        # The first position is stored too, to compare it with the initial latents.
        positions=sorted({0, *stored_positions(params, sde_indices)}),
        height=params.height,
        width=params.width,
        num_frames=params.num_frames,
        guidance_scale=params.guidance_scale,
        guidance_scale_2=params.guidance_scale_2,
    )
    return call, starting_latents(recipe)


def latent_segment(
    tensors: Mapping[str, Tensor],
    call: SampleLatents,
    params: DiffusionSamplingParams,
    start: Tensor,
    *,
    dtype: torch.dtype,
    modality: Modality = Modality.IMAGE,
) -> LatentSegment:
    """The segment of an answer. Raises ContractError unless the engine used the given sigmas, initial latents and
    noise, and stored the requested positions.

    tensors: of the answer, latents in the trainer's layout. start: initial latents [B, ...]. dtype: of the engine's
    model, to which it may round latents; the returned start must equal `start` exactly or after that rounding.
    """
    latents, sigmas = tensors[LATENTS].float(), tensors[ECHOED_SIGMAS].float()
    expected = (call.num_samples, len(call.positions), *call.noise_shape)
    if tuple(latents.shape) != expected:
        raise ContractError(f"the engine gave latents {tuple(latents.shape)}, expected [B, K, ...] = {expected}")
    if not any(torch.equal(latents[:, 0], given) for given in (start, start.to(dtype).float())):
        gap = float((latents[:, 0] - start).abs().max())
        raise ContractError(f"the engine began from other initial latents than it was given (off by up to {gap:.3g})")
    logp = tensors[LOG_PROBS].float()[:, call.sde_indices] if call.sde_indices else None
    if logp is not None:
        _check_noise(logp, call)
    positions = stored_positions(params, call.sde_indices)
    segment = LatentSegment(
        modality=modality,
        latents=latents[:, [call.positions.index(position) for position in positions]],
        sigmas=sigmas,
        indices=positions,
        sde_indices=call.sde_indices,
        sde_logp=logp,
        params=params,
    )
    verify_segment(segment, torch.tensor(call.sigmas, dtype=torch.float32), params)
    return segment


def noise_log_prob(call: SampleLatents) -> Tensor | None:
    """Log-probs [B, S] of the noise z of a call, averaged over the elements; None for an unknown kernel.

    They depend only on the noise and the standard deviation: -|z|^2 / 2 - log std - log(2 pi) / 2 for a Gaussian, and
    -|std z|^2 for CPS, see `unirl.sde.kernels`.
    """
    deviation = _DEVIATIONS.get(call.kernel)
    if deviation is None:
        return None
    columns = []
    for step in call.sde_indices:
        std = deviation(call.sigmas[step], call.sigmas[step + 1], call.eta, call.sigmas[1])
        squares = step_noise(call.noise_keys, step, call.noise_seed, call.noise_shape).flatten(1).square().mean(dim=1)
        if call.kernel == "cps":
            columns.append(-squares * std**2)
        else:
            columns.append(-squares / 2 - math.log(std) - math.log(2 * math.pi) / 2)
    return torch.stack(columns, dim=1)


def _flow_deviation(sigma: float, following: float, eta: float, sigma_max: float) -> float:
    below = sigma_max if sigma >= SIGMA_ONE else sigma
    return eta * math.sqrt(sigma / (1 - below)) * math.sqrt(sigma - following)


def _cps_deviation(sigma: float, following: float, eta: float, sigma_max: float) -> float:
    return following * math.sin(eta * math.pi / 2)


def _dance_deviation(sigma: float, following: float, eta: float, sigma_max: float) -> float:
    return eta * math.sqrt(sigma - following)


def _ddim_deviation(sigma: float, following: float, eta: float, sigma_max: float) -> float:
    rho = following * (1 - sigma) / (sigma * (1 - following))
    return eta * following * math.sqrt(1 - rho**2)


_DEVIATIONS = {
    "flow": _flow_deviation,
    "cps": _cps_deviation,
    "dance": _dance_deviation,
    "ddim": _ddim_deviation,
}
"""Kernel name -> function of (sigma, next sigma, eta, second sigma of the schedule) giving a step's standard
deviation."""


def _check_noise(logp_BS: Tensor, call: SampleLatents) -> None:
    """Raise ContractError if the engine's log-probs are not those of the requested noise."""
    expected = noise_log_prob(call)
    if expected is None:
        return
    gap_BS = (logp_BS - expected).abs()
    if not bool((gap_BS <= _NOISE_TOLERANCE).all()):
        row, column = divmod(int(gap_BS.nan_to_num(math.inf).argmax()), gap_BS.shape[1])
        raise ContractError(
            f"the engine stepped with other noise than it was given: at step {call.sde_indices[column]} sample {row} "
            f"has log-prob {float(logp_BS[row, column]):.4f}, its noise has {float(expected[row, column]):.4f}. "
            "unirl-rollout must be installed in the engine's environment, whose plugin draws the noise."
        )
