"""Proves that an engine acts with the trainer's policy: both give the same log-probs for the decisions of episodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from unirl.distributed.weight_sync.canary import Canary
from unirl.types.actions import ActionSegment
from unirl.types.errors import ContractError
from unirl.types.media import Primitive
from unirl.types.protocols.models import ActionPipeline
from unirl.types.rollout import RolloutReq, RolloutTrack
from unirl.types.sampling import ActionSamplingParams


class ActionCanary(Canary):
    """The engine plays an episode per prompt; the trainer replays its decisions.

    sampling: the recipe's; what decides how moves are drawn is taken from it. device: of the trainer's weights.
    """

    unit = "nats"
    default_tolerance: ClassVar[float] = 0.3
    """A log-prob is a sum over the numbers of a chunk. In fp32 the gap is about 1e-5."""
    _eta: ClassVar[float] = 0.5
    """For recipes that follow the flow; likewise a temperature of 1 for the most probable tokens."""

    def __init__(
        self,
        pipeline: ActionPipeline,
        sampling: ActionSamplingParams,
        device: torch.device,
        primitives: Mapping[str, Primitive],
        tolerance: float | None,
    ) -> None:
        super().__init__(primitives, self.default_tolerance if tolerance is None else tolerance)
        self._pipeline = pipeline
        self._device = device
        self._params = dataclasses.replace(
            sampling,
            samples_per_prompt=1,
            eta=sampling.eta if sampling.eta > 0 else self._eta,
            temperature=sampling.temperature if sampling.temperature > 0 else 1.0,
        )

    def _request(self, version: int) -> RolloutReq:
        return self._plain_request(version, self._params)

    def _gaps(self, track: RolloutTrack) -> Tensor:
        segment = _decisions(track.to(self._device))
        if segment.log_probs is None:
            raise ContractError("the engine answered the canary without log-probs")
        return (self._replayed(segment) - segment.log_probs).abs().cpu()

    def _sample_of(self, track: RolloutTrack, position: int) -> int:
        segment = _decisions(track)
        return int(torch.bucketize(position // segment.num_terms, segment.cu_seqlens[1:], right=True))

    def replay_only(self) -> None:
        num_moves, size = self._pipeline.chunk_shape
        shared = self._pipeline.segment_fields(self._params)
        image, state = self._pipeline.image_shape, self._pipeline.state_size
        chain = {"chains": [torch.zeros(1, self._params.num_inference_steps + 1, num_moves, size)]}
        chunk = chain if "sigmas" in shared else {"tokens": [torch.zeros(1, num_moves, size, dtype=torch.long)]}
        seen = {} if image is None else {"images": [torch.zeros(1, *image, dtype=torch.uint8)]}
        seen |= {} if state is None else {"states": [torch.zeros(1, state)]}
        prompts = self._pipeline.encode_prompts(self._prompts[:1])
        segment = ActionSegment.pack(
            **seen,
            **chunk,
            **({} if prompts is None else {"prompts": prompts}),
            rewards=[torch.zeros(1)],
            num_moves=[torch.full((1,), num_moves)],
            **shared,
            params=self._params,
        )
        self._replayed(segment.to(self._device))

    def _replayed(self, segment: ActionSegment) -> Tensor:
        """Log-probs [N, L]."""
        with self._pipeline.evaluating():
            rows = torch.arange(len(segment.num_moves), device=self._device)
            return self._pipeline.replay(segment, rows, self._params).logp_NL.float()


def _decisions(track: RolloutTrack) -> ActionSegment:
    if not isinstance(track.segment, ActionSegment):
        raise ContractError("the engine answered the canary without decisions")
    return track.segment
