"""The trainer's side of diffusion engines that sample latents in another process."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from unirl.rollout.engine.base import PipelineEngine
from unirl.rollout.engine.child.engine import ChildEngine
from unirl.rollout.engine.child.messages import Message
from unirl.rollout.engine.served_latents.call import (
    LATENTS,
    SampledLatents,
    SampleLatents,
    latent_segment,
    latents_call,
    sampling_of,
)
from unirl.types.conditions import Condition
from unirl.types.errors import ContractError, WeightSyncError
from unirl.types.media import Modality
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import DiffusionSamplingParams

_AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest difference between latents of two instances that counts as rounding: about 1e3 units in the last place for
latents of magnitude 1 to 5, since each process may tune its kernels. Other weights usually differ by more; small steps
are detected by versions and checksums."""

_Answer = tuple[SampledLatents, dict[str, Tensor]]
"""An answer and the tensors of its file."""


@dataclass(frozen=True, eq=False)
class _Call:
    """A call for some rows, and what is needed to turn its answer into a response."""

    req: RolloutReq
    params: DiffusionSamplingParams
    conditions: dict[str, Condition]
    start: Tensor
    own: SampleLatents
    """The call under our names; the message has the engine's."""
    message: SampleLatents
    path: Path


class ServedLatentsEngine(ChildEngine, PipelineEngine):
    """Samples latents with models in other processes, `forward_batch_size` at a time; encodes and decodes in this
    process.

    Each batch goes to the first free instance, and to another one if that dies. Noise is keyed by sample, so the
    samples are the same.
    Subclasses define the names and layouts of tensors in `_inputs` and `_latents`.
    """

    kernels: ClassVar[dict[str, str]] = {}
    """Our kernel name -> the engine's."""
    _forward_batch_size: int
    _track: str
    _dtype: torch.dtype
    """Dtype of the engine's model."""
    _modality: Modality
    _settings: frozenset[str] = frozenset()
    """Keys of `sampler_kwargs` that the engine knows."""
    _served: frozenset[str] = frozenset()
    """Sampling settings of the engine's model that others have not: `distilled_guidance_scale`, `guidance_scale_2`."""

    @abstractmethod
    def _inputs(
        self, conditions: dict[str, Condition], start: Tensor, params: DiffusionSamplingParams
    ) -> dict[str, Tensor]:
        """The tensors of a request under the engine's names and layout. start: initial latents [B, ...]."""

    def _guidance_scale(self, params: DiffusionSamplingParams) -> float:
        """Guidance scale in the engine's convention."""
        return params.guidance_scale

    @abstractmethod
    def _latents(self, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Stored latents [B, K, *shape] from the engine's layout."""

    @abstractmethod
    def _layout(self, params: DiffusionSamplingParams) -> dict[str, Any]:  # Any: JSON
        """Further facts about the tensors that the engine needs."""

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """Sample every row of this rank's request.

        Raises ConfigError for unsupported parameters, WeightSyncError if `policy` is not the last pushed one,
        ContractError if the engine did not use the given inputs, WorkerError if its processes die.
        """
        self._check_policy(policy)
        self.ready()
        size = self._forward_batch_size
        batches = [req.slice(row, row + size) for row in range(0, req.batch_size, size)]
        self._encode_first(batches)
        calls: dict[int, _Call] = {}

        def prepare(number: int) -> SampleLatents:
            calls[number] = self._prepared(batches[number])
            return calls[number].message

        made: dict[int, RolloutResp] = {}
        try:
            if self._proof is None:
                answer = self._proved(prepare(0))
                made[0] = self._response(calls[0], *answer)
            for number, answer in self._pool.answers(range(len(made), len(batches)), prepare, self._read):
                call = calls.pop(number)
                made[number] = self._response(call, *answer)
                call.path.unlink()
        finally:
            for call in calls.values():
                if self._proof is None or call.message != self._proof[0]:
                    call.path.unlink(missing_ok=True)
        return RolloutResp.concat([made[number] for number in range(len(batches))])

    def _prepared(self, req: RolloutReq) -> _Call:
        """The call for some rows, with its tensors written to a file."""
        kernel = self._pipeline.strategy_name
        params = sampling_of(
            req,
            kernel,
            self.kernels,
            self.codec.engine,
            self._settings,
            served=self._served,
        )
        with torch.no_grad():
            conditions = self._pipeline.encode(req.primitives, params)
        path = self._folder / f"request-{next(self._calls)}.safetensors"
        own, start = latents_call(req, params, kernel, str(path))
        inputs = self._inputs(conditions, start, params)
        save_file({name: tensor.contiguous() for name, tensor in inputs.items()}, path)
        message = replace(
            own,
            kernel=self.kernels.get(kernel, kernel),
            guidance_scale=self._guidance_scale(params),
            layout=self._layout(params),
        )
        return _Call(req, params, conditions, start, own, message, path)

    def _response(self, call: _Call, answer: SampledLatents, tensors: dict[str, Tensor]) -> RolloutResp:
        """The verified samples of an answer."""
        self._check_version(answer.policy_version)
        stored = {**tensors, LATENTS: self._latents(tensors[LATENTS], tuple(call.own.noise_shape))}
        segment = latent_segment(stored, call.own, call.params, call.start, dtype=self._dtype, modality=self._modality)
        with torch.no_grad():
            decoded = self._kept(self._pipeline.decode(segment.clean_latents, call.params))
        track = call.req.make_root_track(conditions=call.conditions, segment=segment, decoded=decoded)
        track.policy_versions = torch.full((call.req.batch_size,), answer.policy_version, dtype=torch.long)
        return RolloutResp(tracks={self._track: track})

    def _forget_proof(self) -> None:
        if self._proof is not None:
            Path(self._proof[0].path).unlink()
        super()._forget_proof()

    def _compare(self, found: _Answer, expected: _Answer, others: str) -> None:
        gap = float((found[1][LATENTS].float() - expected[1][LATENTS].float()).abs().max())
        if not gap <= _AGREEMENT[self._dtype]:
            raise WeightSyncError(
                f"an instance of {self.codec.engine} gives other samples than {others}, given the same policy, noise "
                f"and prompts: latents differ by up to {gap:.3g}, at most {_AGREEMENT[self._dtype]:g} is rounding in "
                f"{self._dtype}. Its GPU or environment is another, or it has other weights."
            )

    def _read(self, answer: Message) -> _Answer:
        """An answer and its tensors; the file is deleted."""
        if not isinstance(answer, SampledLatents):
            raise ContractError(f"a request for latents was answered with {type(answer).__name__}")
        tensors = load_file(answer.path)
        Path(answer.path).unlink()
        return answer, tensors
