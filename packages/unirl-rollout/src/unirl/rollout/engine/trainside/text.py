"""Direct sampling of text: the training model generates. No weights move, and replay agrees to the last few bits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from unirl.rollout.engine.base import BaseRolloutEngine
from unirl.rollout.text_checks import text_params, verify_text_segment
from unirl.types.errors import ConfigError
from unirl.types.noise import noise_key
from unirl.types.protocols import AutoregressivePipeline, ShardedPolicyStore
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.storage import save_rollout


class TrainsideTextEngine(BaseRolloutEngine):
    """Samples completions with the pipeline that trains.

    forward_batch_size: samples decoded together; the memory knob of the rollout (their KV cache). No result depends on
        it beyond rounding.
    policies: the backend. Needed where rollouts may be asked for under a named copy of the weights, where the model is
        sharded, and for versions on the samples.
    dump_dir: where requests and responses are written as safetensors, one file a rollout and rank; None writes none.
    """

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: ShardedPolicyStore | None = None,
        *,
        forward_batch_size: int,
        rank: int = 0,
        dump_dir: str | None = None,
        track: str = "text",
    ) -> None:
        if forward_batch_size < 1:
            raise ConfigError(f"engine.forward_batch_size = {forward_batch_size} must be at least 1")
        self._pipeline = pipeline
        self._policies = policies
        self._forward_batch_size = forward_batch_size
        self._rank = rank
        self._dump_dir = None if dump_dir is None else Path(dump_dir)
        self._track = track

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """Sample every row of this rank's request. Every rank calls it (FSDP gathers inside).

        policy: named copy of the weights to sample from; None is the policy being trained. Raises ConfigError for
        prompts that do not fit the context, ContractError where the result is not what was asked for.
        """
        params = text_params(req)
        with self._pipeline.evaluating(), self._policy(policy):
            chunks = [
                self._generate_chunk(req.slice(start, start + self._forward_batch_size), params)
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

    def _generate_chunk(self, req: RolloutReq, params: ARSamplingParams) -> RolloutResp:
        conditions = self._pipeline.encode(req.primitives, params)
        segment = self._pipeline.generate(
            conditions,
            params,
            noise_keys=[noise_key(req.rollout_id, sample) for sample in req.sample_ids],
            any_rank=None if self._policies is None else self._policies.any_rank,
        )
        verify_text_segment(segment, params, self._pipeline.stop_token_ids(params))
        decoded = self._pipeline.decode(segment)
        version = 0 if self._policies is None else self._policies.num_optimizer_steps
        track = req.make_root_track(conditions=conditions, segment=segment, decoded=decoded)
        track.policy_versions = torch.full((req.batch_size,), version, dtype=torch.long)
        return RolloutResp(tracks={self._track: track})
