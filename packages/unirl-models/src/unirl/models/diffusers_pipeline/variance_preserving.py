"""The adapter of families of the variance-preserving process, which know integer timesteps: SDXL, CogVideoX.

Latents, sigmas and velocities are those of flow matching, so that every kernel and algorithm serves these families too;
z and timesteps exist within `predict` alone. Why: docs/design/variance-preserving.md. Shape letters: see
`unirl.models`.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any, TypeVar, cast, get_args

import torch
from torch import Tensor

from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.sde.schedule import Convention
from unirl.sde.timesteps import Spacing, TimestepSchedule
from unirl.sde.variance_preserving import PredictionType, flow_velocity, from_flow, to_flow
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

BundleT = TypeVar("BundleT", bound=DiffusersBundle)


class VariancePreservingAdapter(TextConditionedAdapter[BundleT]):
    """A family answers `model_output` instead of `predict`; the scheduler's configuration says what that is.

    Raises ConfigError for a scheduler whose levels are not reproduced, and for a prediction that is not known or says
    nothing at pure noise.
    """

    # Any: the keywords of TextConditionedAdapter.
    def __init__(self, bundle: BundleT, **options: Any) -> None:
        super().__init__(bundle, **options)
        self.levels = _levels(bundle)
        """The noise levels of this checkpoint. Trajectories end without noise, as its stock pipeline's do."""
        self.prediction_type = _prediction_type(bundle, self.levels)

    @abstractmethod
    def model_output(
        self, z_R: Tensor, timestep_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams
    ) -> Tensor:
        """What the model predicts at z [R, ...] and its timesteps [R] int64, without guidance."""

    def schedule(self, convention: Convention | None) -> TimestepSchedule:
        """The checkpoint's own levels. Raises ConfigError for a convention of flow matching."""
        if convention is None:
            return self.levels
        raise ConfigError(
            f"schedule = {convention!r} is of flow matching; {self.bundle.family} knows integer timesteps. Use one of "
            f"{get_args(Spacing)}, or null for the checkpoint's own."
        )

    def spaced(self, spacing: Spacing) -> TimestepSchedule:
        """The checkpoint's own levels, other timesteps of them."""
        return dataclasses.replace(self.levels, timestep_spacing=spacing)

    def starting_latents(self, latents: Tensor, sigma: float, conditions: Conditions) -> Tensor:
        del conditions
        return to_flow(latents, torch.full(latents.shape[:1], sigma, device=latents.device))

    def predict(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions, params: DiffusionSamplingParams) -> Tensor:
        """Velocity [R, ...] float32. Raises ValueError for a sigma that is no level of a timestep."""
        timestep_R = self.levels.timestep_of(sigma_R)
        output = self.model_output(from_flow(x_R, sigma_R), timestep_R, conditions, params)
        return flow_velocity(output.float(), x_R, sigma_R, self.prediction_type)


def _levels(bundle: DiffusersBundle) -> TimestepSchedule:
    try:
        return TimestepSchedule.from_scheduler_config(bundle.scheduler_config, set_alpha_to_one=True)
    except ValueError as error:
        raise ConfigError(f"{bundle.pretrained_model}, scheduler_config.json: {error}") from error


def _prediction_type(bundle: DiffusersBundle, levels: TimestepSchedule) -> PredictionType:
    name, where = bundle.scheduler_config.get("prediction_type"), f"{bundle.pretrained_model}, scheduler_config.json"
    if name not in get_args(PredictionType):
        raise ConfigError(f"{where}: prediction_type = {name!r} is not one of {get_args(PredictionType)}.")
    if name == "epsilon" and levels.rescale_betas_zero_snr:
        raise ConfigError(
            f"{where}: rescale_betas_zero_snr starts from pure noise, of which prediction_type = 'epsilon' says "
            "nothing. Use a checkpoint with v_prediction."
        )
    return cast(PredictionType, name)
