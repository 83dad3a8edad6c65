"""Base of direct sampling: chunks, named policies, versions and dumps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar

import torch

from unirl.rollout.engine.base import BaseRolloutEngine
from unirl.types.errors import ConfigError
from unirl.types.protocols.engines import ChunkListener
from unirl.types.protocols.training import PolicyStore
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.storage import save_rollout


class DirectSampling(BaseRolloutEngine):
    """Samples with the pipeline that trains, `forward_batch_size` samples at a time.

    policies: the backend, needed for rollouts under a named copy of the weights.
    dump_dir: where requests and responses are written as safetensors, one file per rollout and rank; None writes none.
    """

    has_trainer_logp: ClassVar[bool] = True
    announces_chunks: ClassVar[bool] = True
    takes_media: ClassVar[bool] = True
    takes_audio: ClassVar[bool] = True

    def __init__(
        self, policies: PolicyStore | None, *, forward_batch_size: int, rank: int, dump_dir: str | None
    ) -> None:
        self._policies = policies
        self._forward_batch_size = forward_batch_size
        self._rank = rank
        self._dump_dir = None if dump_dir is None else Path(dump_dir)
        self._listener: ChunkListener | None = None

    @abstractmethod
    def _check(self, req: RolloutReq) -> None:
        """Raise ContractError or ConfigError if the request is incomplete or of the wrong kind."""

    @abstractmethod
    def _evaluating(self) -> AbstractContextManager[None]:
        """Context: evaluation mode without gradients."""

    def _before_chunks(self, batches: Sequence[RolloutReq]) -> None:  # noqa: B027 (most pipelines need nothing)
        """Called once per rollout, before the first chunk."""

    @abstractmethod
    def _generate_chunk(self, req: RolloutReq) -> RolloutResp:
        """Sample some rows of a checked request, and verify the result."""

    def announce_to(self, listener: ChunkListener) -> None:
        """Call `listener` with each batch of `forward_batch_size` samples once it is decoded."""
        self._listener = listener

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """Sample every row of this rank's request. Every rank calls it (FSDP gathers inside).

        policy: named copy of the weights to sample from; None is the policy being trained. Raises ContractError if the
        request is incomplete or the result does not match it.
        """
        self._check(req)
        size = self._forward_batch_size
        batches = [req.slice(start, start + size) for start in range(0, req.batch_size, size)]
        with self._evaluating(), self._policy(policy):
            self._before_chunks(batches)
            chunks = [self._announced(batch) for batch in batches]
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

    def _announced(self, req: RolloutReq) -> RolloutResp:
        resp = self._generate_chunk(req)
        if self._listener is not None:
            self._listener(resp)
        return resp

    def _version(self) -> int:
        """Version of the sampling policy."""
        return 0 if self._policies is None else self._policies.policy_version

    def _versions(self, num_samples: int) -> torch.Tensor:
        """Version of the sampling policy, int64 [B]."""
        return torch.full((num_samples,), self._version(), dtype=torch.long)
