"""Direct sampling of text: the training model generates. No weights move, and replay agrees to the last few bits."""

from __future__ import annotations

from contextlib import AbstractContextManager

from unirl.rollout.checks import step_noise_keys
from unirl.rollout.engine.trainside.base import DirectSampling
from unirl.rollout.engine.versions import mark_versions
from unirl.rollout.text_checks import prompt_conditions, text_params, verify_finished
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.conditions import Condition
from unirl.types.media import Primitive
from unirl.types.protocols.models import AutoregressivePipeline
from unirl.types.protocols.training import ShardedPolicyStore
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment


@bounded("engine")
class TrainsideTextEngine(DirectSampling):
    """Samples completions with the pipeline that trains.

    forward_batch_size: samples decoded together; the memory knob of the rollout (their KV cache). Results depend on it
        only by rounding.
    policies: the backend. Needed for rollouts under a named copy of the weights, for sharded models, and for policy
        versions on samples.
    dump_dir: see `DirectSampling`.
    """

    def __init__(
        self,
        pipeline: AutoregressivePipeline,
        policies: ShardedPolicyStore | None = None,
        *,
        forward_batch_size: PositiveInt,
        rank: int = 0,
        dump_dir: str | None = None,
        track: str = "text",
    ) -> None:
        super().__init__(policies, forward_batch_size=forward_batch_size, rank=rank, dump_dir=dump_dir)
        self._pipeline = pipeline
        self._any_rank = None if policies is None else policies.any_rank
        self._track = track

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError if a prompt does not fit the context."""
        self._pipeline.encode(req.primitives, text_params(req))

    def _check(self, req: RolloutReq) -> None:
        text_params(req)

    def _evaluating(self) -> AbstractContextManager[None]:
        return self._pipeline.evaluating()

    def _generate_chunk(self, req: RolloutReq) -> RolloutResp:
        params = text_params(req)
        conditions = prompt_conditions(req, self._pipeline)
        segment = self._segment(req, conditions, params)
        self._verify(segment, params)
        track = req.make_root_track(conditions=conditions, segment=segment, decoded=self._decoded(segment))
        return RolloutResp(tracks={self._track: mark_versions(track, self._version())})

    def _verify(self, segment: TextSegment, params: ARSamplingParams) -> None:
        """Raise ContractError if the segment is not what was asked for."""
        verify_finished(segment, params, self._pipeline.stop_token_ids(params))

    def _decoded(self, segment: TextSegment) -> Primitive:
        """What scorers get."""
        return self._pipeline.decode(segment)

    def _segment(self, req: RolloutReq, conditions: dict[str, Condition], params: ARSamplingParams) -> TextSegment:
        """What the model writes; may add to the conditions what replays need."""
        return self._pipeline.generate(conditions, params, noise_keys=step_noise_keys(req), any_rank=self._any_rank)
