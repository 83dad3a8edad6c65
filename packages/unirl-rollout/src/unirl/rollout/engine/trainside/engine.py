"""Direct sampling: the training model generates. No weights move, and replay is bit-exact at equal geometry."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, TypedDict

import torch
from torch import Tensor

from unirl.rollout.checks import (
    diffusion_params,
    noise_recipe,
    own_steps,
    pinned_sigmas,
    same_kernel,
    starting_latents,
    step_noise_keys,
    verify_segment,
)
from unirl.rollout.engine.base import MediaBits, PipelineEngine
from unirl.rollout.engine.trainside.base import DirectSampling
from unirl.rollout.engine.versions import mark_versions
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.conditions import Condition
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import DiffusionPipeline
from unirl.types.protocols.training import PolicyStore
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


class DiffuseArguments(TypedDict):
    """What `DiffusionPipeline.diffuse` takes besides conditions."""

    initial_latents: Tensor
    sigmas: Tensor
    params: DiffusionSamplingParams
    noise_keys: Sequence[str]
    start_keys: Sequence[str] | None
    own_steps: Sequence[int] | None


@bounded("engine")
class TrainsideRolloutEngine(DirectSampling, PipelineEngine):
    """Samples with the pipeline that trains.

    forward_batch_size: samples denoised together; the memory knob of the rollout. If it equals the training
        micro-batch, replay one step at a time is bit-exact.
    policies: the backend, needed for rollouts under a named copy of the weights.
    media_bits: of decoded media, see `MediaBits`.
    decode: decode latents to media. With false nothing is decoded, no images are saved, and no scorer may read media.
    drop_text_encoders: encode every prompt of the run before it starts, then free the encoders.
    dump_dir: where requests and responses are written as safetensors, one file per rollout and rank; None writes none.
    """

    shares_steps: ClassVar[bool] = True
    takes_own_steps: ClassVar[bool] = True
    takes_sizes: ClassVar[bool] = True
    keeps_regions: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        policies: PolicyStore | None = None,
        *,
        forward_batch_size: PositiveInt,
        device: str = "cpu",
        rank: int = 0,
        media_bits: MediaBits = 32,
        decode: bool = True,
        drop_text_encoders: bool = False,
        dump_dir: str | None = None,
        track: str = "image",
    ) -> None:
        super().__init__(policies, forward_batch_size=forward_batch_size, rank=rank, dump_dir=dump_dir)
        self._pipeline = pipeline
        self._device = torch.device(device)
        if media_bits == 8 and not decode:
            raise ConfigError("engine.media_bits = 8 does nothing with engine.decode: false. Remove one of them.")
        self._media_bits = media_bits
        self._decodes = decode
        self._drops_text_encoders = drop_text_encoders
        self._track = track

    def _check(self, req: RolloutReq) -> None:
        params = diffusion_params(req)
        pinned_sigmas(req, params)
        same_kernel(params, self._pipeline.strategy_name)

    def _evaluating(self) -> AbstractContextManager[None]:
        return self._pipeline.evaluating()

    def _before_chunks(self, batches: Sequence[RolloutReq]) -> None:
        self._encode_first(batches)

    def _generate_chunk(self, req: RolloutReq) -> RolloutResp:
        params = diffusion_params(req)
        conditions = self._conditions(req, params)
        segment = self._segment(req, conditions, params).replace(params=params)
        verify_segment(segment, pinned_sigmas(req, params), params)
        is_decoded = self._decodes and segment.unfinished is None
        decoded = self._pipeline.decode(segment.clean_latents, params) if is_decoded else None
        track = req.make_root_track(conditions=conditions, segment=segment, decoded=self._kept(decoded))
        return RolloutResp(tracks={self._track: mark_versions(track, self._version())})

    def _conditions(self, req: RolloutReq, params: DiffusionSamplingParams) -> dict[str, Condition]:
        return self._pipeline.encode(req.primitives, params)

    def _segment(
        self, req: RolloutReq, conditions: dict[str, Condition], params: DiffusionSamplingParams
    ) -> LatentSegment:
        """What the model denoises; may add to the conditions what replays need."""
        return self._pipeline.diffuse(conditions, **self._walk(req, params))

    def _walk(self, req: RolloutReq, params: DiffusionSamplingParams) -> DiffuseArguments:
        """Arguments of `diffuse`."""
        return {
            "initial_latents": starting_latents(noise_recipe(req, params)).to(self._device),
            "sigmas": pinned_sigmas(req, params),
            "params": params,
            "noise_keys": step_noise_keys(req),
            "start_keys": req.init_noise_group_ids if params.init_same_noise else None,
            "own_steps": own_steps(req, params),
        }
