"""Direct sampling: the training model generates. No weights move, and replay is bit-exact at equal geometry."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
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
from unirl.rollout.engine.base import ChunkListener, DiffusionPlan, DiffusionRolloutEngine
from unirl.types.errors import ConfigError
from unirl.types.media import Texts
from unirl.types.protocols import DiffusionPipeline, PolicyStore
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.storage import save_rollout


class TrainsideRolloutEngine(DiffusionRolloutEngine):
    """Samples with the pipeline that trains.

    forward_batch_size: samples denoised together; the memory knob of the rollout. Where it equals the training
        micro-batch, replay one step at a time is bit-exact.
    policies: the backend, when rollouts may be asked for under a named copy of the weights.
    drop_text_encoders: encode every prompt of the run before it starts, then free the encoders.
    dump_dir: where requests and responses are written as safetensors, one file a rollout and rank; None writes none.
    """

    announces_chunks: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore | None = None,
        *,
        forward_batch_size: int,
        device: str = "cpu",
        rank: int = 0,
        drop_text_encoders: bool = False,
        dump_dir: str | None = None,
        track: str = "image",
    ) -> None:
        if forward_batch_size < 1:
            raise ConfigError(f"engine.forward_batch_size = {forward_batch_size} must be at least 1")
        self._pipeline = pipeline
        self._policies = policies
        self._forward_batch_size = forward_batch_size
        self._device = torch.device(device)
        self._rank = rank
        self._drops_text_encoders = drop_text_encoders
        self._dump_dir = None if dump_dir is None else Path(dump_dir)
        self._track = track
        self._listener: ChunkListener | None = None

    def announce_to(self, listener: ChunkListener) -> None:
        """Call `listener` with every `forward_batch_size` samples once they are decoded."""
        self._listener = listener

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def plan(self, params: DiffusionSamplingParams) -> DiffusionPlan:
        """Sigmas, latent shape and kernel for these parameters."""
        return DiffusionPlan(
            self._pipeline.sigmas(params), self._pipeline.latent_shape(params), self._pipeline.strategy_name
        )

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def prepare_prompts(self, prompts: list[str], params: list[DiffusionSamplingParams]) -> None:
        """Encode every prompt of the run under each of `params` and free the text encoders, where the recipe asks for
        it; nothing otherwise."""
        if not self._drops_text_encoders:
            return
        distinct = list(dict.fromkeys(prompts))
        for each in params:
            for start in range(0, len(distinct), self._forward_batch_size):
                part = distinct[start : start + self._forward_batch_size]
                self._pipeline.encode({"text": Texts(texts=part)}, each)
        self._pipeline.drop_text_encoders()

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """Sample every row of this rank's request. Every rank calls it (FSDP gathers inside).

        policy: named copy of the weights to sample from; None is the policy being trained. Raises ContractError where
        the request is incomplete or the result does not echo it.
        """
        params = diffusion_params(req)
        pinned_sigmas(req, params)
        same_kernel(params, self._pipeline.strategy_name)
        with self._pipeline.evaluating(), self._policy(policy):
            chunks = [
                self._announced(req.slice(start, start + self._forward_batch_size), params)
                for start in range(0, req.batch_size, self._forward_batch_size)
            ]
        resp = RolloutResp.concat(chunks)
        if self._dump_dir is not None:
            self._dump_dir.mkdir(parents=True, exist_ok=True)
            save_rollout(self._dump_dir / f"rollout-{req.rollout_id:06d}-rank{self._rank}.safetensors", resp, req)
        return resp

    def _policy(self, name: str | None) -> AbstractContextManager[None]:
        if name is None:
            return nullcontext()
        if self._policies is None:
            raise ConfigError(f"a rollout under policy {name!r} needs the engine to be given the backend")
        return self._policies.using_policy(name)

    def _announced(self, req: RolloutReq, params: DiffusionSamplingParams) -> RolloutResp:
        resp = self._generate_chunk(req, params)
        if self._listener is not None:
            self._listener(resp, req)
        return resp

    def _generate_chunk(self, req: RolloutReq, params: DiffusionSamplingParams) -> RolloutResp:
        sigmas = pinned_sigmas(req, params)
        conditions = self._pipeline.encode(req.primitives, params)
        start = starting_latents(noise_recipe(req, params)).to(self._device)
        segment = self._pipeline.diffuse(
            conditions,
            start,
            sigmas,
            params,
            noise_keys=step_noise_keys(req),
            start_keys=req.init_noise_group_ids if params.init_same_noise else None,
        )
        segment = segment.replace(params=params)
        verify_segment(segment, sigmas, params)
        decoded = self._pipeline.decode(segment.clean_latents)
        version = 0 if self._policies is None else self._policies.num_optimizer_steps
        track = req.make_root_track(conditions=conditions, segment=segment, decoded=decoded)
        track.policy_versions = torch.full((req.batch_size,), version, dtype=torch.long)
        return RolloutResp(tracks={self._track: track})
