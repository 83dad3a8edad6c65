"""An engine: what samples, with weights that the policy is pushed to."""

from __future__ import annotations

from typing import ClassVar

import torch

from unirl.rollout.checks import (
    diffusion_params,
    noise_recipe,
    pinned_sigmas,
    same_kernel,
    starting_latents,
    step_noise_keys,
    verify_segment,
)
from unirl.rollout.engine.base import PipelineEngine
from unirl.rollout.engine.replica.base import PushedWeights
from unirl.rollout.engine.replica.weights import ReplicaWeights
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.loop import sample
from unirl.sde.noise import step_noise
from unirl.types.precision import dtype_named
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutResp
from unirl.types.segments import LatentSegment


class MyEngine(PushedWeights, PipelineEngine):
    """Samples images with a separate copy of the model, which the policy is pushed to."""

    recipe_rules: ClassVar[str] = "my_engine_rules"
    has_own_weights: ClassVar[bool] = True
    has_own_model: ClassVar[bool] = True
    can_sleep: ClassVar[bool] = True

    def __init__(self, pipeline, policies=None, *, bundle, forward_batch_size: int, dtype="bf16", device="cpu"):
        self._pipeline, self._size, self._device = pipeline, forward_batch_size, torch.device(device)
        self._drops_text_encoders = False
        version = 0 if policies is None else policies.policy_version
        self._weights = ReplicaWeights(
            bundle.trainable_modules(), dtype_named(dtype, "engine.dtype"), self._device, version
        )

    def _velocity(self, conditions, params):
        """Calls your program: latents x [B, ...] and noise levels sigma_B [B] in, velocity [B, ...] out."""
        return lambda x, sigma_B, step_B: self._pipeline.velocity(conditions, x, sigma_B, step_B, params)

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req, policy=None):
        self._weights.pushes.require(policy)  # its weights are whole, and of the policy that is asked for
        self._weights.require_awake()
        same_kernel(diffusion_params(req), self._pipeline.strategy_name)
        starts = range(0, req.batch_size, self._size)
        with self._pipeline.evaluating():
            return RolloutResp.concat([self._sampled(req.slice(start, start + self._size)) for start in starts])

    def _sampled(self, req):
        params = diffusion_params(req)
        sigmas, keys = pinned_sigmas(req, params), step_noise_keys(req)
        conditions = self._pipeline.encode(req.primitives, params)
        start = starting_latents(noise_recipe(req, params)).to(self._device)
        path = sample(
            self._velocity(conditions, params),
            start,
            sigmas,
            strategy=FlowSDEStrategy(),
            eta=params.eta,
            sde_indices=params.sde_indices or [],
            step_noise=lambda step: step_noise(keys, step, params.seed, start.shape[1:]),
            keep=params.keep_latents,
        )
        segment = LatentSegment(
            latents=path.latents,
            sigmas=sigmas,
            indices=path.indices,
            sde_indices=path.sde_indices,
            sde_logp=path.sde_logp,
            params=params,
        )
        verify_segment(segment, sigmas, params)
        decoded = self._pipeline.decode(segment.clean_latents, params)
        track = req.make_root_track(conditions=conditions, segment=segment, decoded=decoded)
        track.policy_versions = torch.full((req.batch_size,), self.policy_version, dtype=torch.long)
        return RolloutResp(tracks={"image": track})
