"""AnyFlow FAR: how the family answers the adapter's questions. Shape letters: see `unirl.models`; f latent frames."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from unirl.models.adapter import TIMESTEPS_PER_SIGMA, require_condition
from unirl.models.anyflow.bundle import AnyFlowFARBundle
from unirl.models.anyflow.chunks import Resolution, cut, ranges
from unirl.models.wan.adapter import WanAdapter
from unirl.sde.loop import Velocity
from unirl.types.conditions import Condition, ImageLatentCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

HISTORY = "history"
"""Slot of the clean latents [R, C, f, h, w] that chunks were, or are, conditioned on: those before each."""

Target = Callable[[Tensor], Tensor]
"""target(sigma_R) -> [R]: the level down to which the average velocity from sigma_R is asked for."""


class AnyFlowFARAdapter(WanAdapter[AnyFlowFARBundle]):
    """Conditions: "text", "negative_text" where guidance is on, and "history". Latents are [16, f, h, w].

    The model is a flow map u(x, t, r): the average velocity on the way from level t to r, where r = t is the velocity
    of a flow. A chunk sees the clean latents of those before it, in the same forward, so that gradients flow to what
    the model makes of them: a later chunk trains how an earlier one is read.
    """

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """Raises ConfigError also for a frame too small to be compressed, where chunks come to be."""
        shape = super().latent_shape(params)
        config = self.bundle.transformer.config
        patch, smallest = config["compressed_patch_size"][1], min(shape[-2:])
        if smallest < patch and len(self.chunks(shape[1])) > config["full_chunk_limit"]:
            side = patch * self.geometry.vae_factor
            raise ConfigError(
                f"height x width = {params.height} x {params.width}: chunks further back are read in patches of {side} "
                f"pixels. Use sides of at least {side}, or fewer frames."
            )
        return shape

    def chunks(self, num_frames: int) -> list[int]:
        """Latent frames of each chunk of a video of so many."""
        return cut(self.bundle.transformer.config["chunk_partition"], num_frames)

    def bind(self, conditions: Conditions, params: DiffusionSamplingParams) -> Velocity:
        """The velocity at a level (r = t) of every chunk, given the history of each.

        Raises ContractError for conditions without the latter.
        """
        if HISTORY not in conditions:
            raise ContractError(
                f"a velocity of {self.bundle.family} needs the clean latents of earlier chunks, in the slot "
                f'"{HISTORY}"; replays read them in the segment. Take an algorithm that replays stochastic steps, such '
                "as DiffusionGRPO."
            )
        return self.bind_to(conditions, params, lambda sigma_R: sigma_R)

    def bind_to(self, conditions: Conditions, params: DiffusionSamplingParams, target: Target) -> Velocity:
        """The average velocity down to the target, of every chunk given the history of each: one forward per chunk."""
        history = require_condition(conditions, HISTORY, ImageLatentCondition).latents
        bound = []
        cuts = ranges(self.chunks(history.shape[2]))
        for index, frames in enumerate(cuts):
            before: dict[str, Condition] = {HISTORY: ImageLatentCondition(latents=history[:, :, : frames.start])}
            bound.append(self.bind_chunk({**conditions, **before}, params, target, index))

        def velocity(x_R: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
            parts = [own(x_R[:, :, frames], sigma_R, step_R) for own, frames in zip(bound, cuts, strict=True)]
            return torch.cat(parts, dim=2)

        return velocity

    def bind_chunk(
        self, conditions: Conditions, params: DiffusionSamplingParams, target: Target, index: int
    ) -> Velocity:
        """The same of one chunk alone, whose frames x_R holds, and whose history `conditions` ends with."""
        sizes = tuple(self.chunks(self.latent_shape(params)[1])[: index + 1])
        return self.guided(partial(self._predict_chunk, params, target, sizes), conditions, params)

    def _predict_chunk(
        self,
        params: DiffusionSamplingParams,
        target: Target,
        sizes: tuple[int, ...],
        x_R: Tensor,
        sigma_R: Tensor,
        conditions: Conditions,
    ) -> Tensor:
        """[R, C, f, h, w] without guidance, of the last of `sizes`: the earlier frames are at level 0."""
        transformer = self.bundle.transformer
        # Not the first weight: see `WanAdapter.predict_by`.
        dtype = transformer.patch_embedding.weight.dtype
        history = require_condition(conditions, HISTORY, ImageLatentCondition).latents
        prefix = torch.cat([history.to(x_R), x_R], dim=2).transpose(1, 2).contiguous()
        clean = x_R.new_zeros(len(x_R), sum(sizes[:-1]))

        def by_frame(level_R: Tensor) -> Tensor:
            return torch.cat([clean, (level_R * TIMESTEPS_PER_SIGMA)[:, None].expand(-1, sizes[-1])], dim=1)

        out = transformer(
            hidden_states=prefix.to(dtype),
            timestep=by_frame(sigma_R),
            r_timestep=by_frame(target(sigma_R)),
            encoder_hidden_states=self.padded_text(conditions, params).to(x_R.device, dtype),
            chunk_partition=list(sizes),
            attention_mask=self._resolution(x_R).spans(sizes),
            return_dict=False,
        )[0]
        return out[:, -sizes[-1] :].transpose(1, 2).contiguous()

    def _resolution(self, x_R: Tensor) -> Resolution:
        config = self.bundle.transformer.config
        height, width = x_R.shape[-2:]
        whole, compressed = (
            (height // patch[1]) * (width // patch[2])
            for patch in (config["patch_size"], config["compressed_patch_size"])
        )
        return Resolution(whole=whole, compressed=compressed, num_whole=config["full_chunk_limit"])
