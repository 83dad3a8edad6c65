"""The trainer's side of engines that sample text in other processes."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from unirl.rollout.engine.begun_texts import BegunTexts
from unirl.rollout.engine.child.engine import ChildEngine
from unirl.rollout.engine.child.messages import Abort, Message
from unirl.rollout.engine.served_text.call import (
    AGREEMENT,
    Generate,
    Generations,
    Limits,
    check_fits,
    generation,
    joined,
    largest_gap,
    part_of,
    parts,
    prompt_tokens,
    proof_of,
    refuse_all,
    text_segment,
    text_track,
)
from unirl.rollout.text_checks import prompt_conditions, text_params
from unirl.types.errors import ContractError, UniRLError, WeightSyncError
from unirl.types.member_pool import MAX_AT_ONCE, Member
from unirl.types.protocols.models import TextCodec
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp


class ServedTextEngine(ChildEngine):
    """Samples completions with models in other processes, which batch prompts continuously.

    A single instance gets the whole request. Several get it in calls of whole groups: each instance gets as many at
    once as it samples together, and the rest go to the first free one. A sample's seed depends only on its id, so any
    instance gives the same sample. If one dies, its unanswered calls go to the others.
    """

    takes_media: ClassVar[bool] = True
    can_abort: ClassVar[bool] = True
    can_resume: ClassVar[bool] = True
    _pipeline: TextCodec
    _track: str
    _running: int | None = None
    """Number of the last call of the running `generate`."""
    _keeps_cache = False
    """True if the engine keeps keys and values of what `abort` ended."""
    _aborted: int | None = None
    """Calls up to this number end early."""

    @abstractmethod
    def _limits(self) -> Limits:
        """Input limits of the engine's model."""

    @abstractmethod
    def _dtype_name(self) -> str:
        """Dtype of the engine's model, such as "torch.float32"."""

    @abstractmethod
    def _max_running(self) -> int:
        """Samples that an instance generates at once; further ones wait."""

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None, begun: RolloutResp | None = None) -> RolloutResp:
        """One completion for every row of this rank's request, see `ResumingEngine` of unirl.types.protocols.engines.

        Prompts that the engine refuses, such as turns with tokens that stand for media, are episodes that failed.
        Raises ConfigError if a prompt does not fit, RefusedError if the engine refuses all of them, WeightSyncError if
        `policy` is not the last pushed one or the samples come from another version, WorkerError if the engine dies
        repeatedly.
        """
        self._check_policy(policy)
        req = req.continuing(begun)
        params = text_params(req)
        conditions = prompt_conditions(req, self._pipeline)
        limits, stops = self._limits(), self._pipeline.stop_token_ids(params)
        own = BegunTexts.of(req, self._pipeline.media_tokens)
        in_place: list[int] = []
        if own.rows:
            call = generation(
                req,
                conditions,
                stops,
                0,
                placeholder=limits.image_token,
                sound_placeholder=limits.audio_token,
                begun=own,
                keeps_cache=self._keeps_cache,
            )
            check_fits(call.prompts, call.max_new_tokens, limits, call.num_begun)
            self.ready()
            answer = self._generations(call, [req.group_ids[row] for row in own.rows])
            refuse_all(answer, self.codec.engine)
            segment = text_segment(answer, call, params, own)
            in_place = [own.rows[number] for number in answer.in_place]
            refusals = {row: said for row, said in zip(own.rows, answer.refusals, strict=False) if said}
        else:
            segment, refusals = own.whole(None, self.policy_version), {}
        track = text_track(req, conditions, segment, self._pipeline.decode(segment), self.policy_version, refusals)
        if self._keeps_cache:
            track.counts = own.continued(req.batch_size, in_place)
        return RolloutResp(tracks={self._track: track})

    def _generations(self, call: Generate, group_ids: list[str]) -> Generations:
        """The instances' answers, in the order of the call."""
        calls = [part_of(call, rows, next(self._calls)) for rows in parts(group_ids, len(self.pids))]
        self._running = calls[-1].number
        try:
            if self._proof is None:
                self._proved(proof_of(call))
            at_once = max(1, self._max_running() // max(len(part.prompts) for part in calls))
            answers = dict(
                self._pool.answers(range(len(calls)), calls.__getitem__, self._read, min(at_once, MAX_AT_ONCE))
            )
        except UniRLError:
            self.abort()  # the other answers are not needed
            raise
        finally:
            self._running = None
        for answer in answers.values():
            self._check_version(answer.policy_version)
        return joined([answers[number] for number in range(len(calls))])

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError if a prompt does not fit the context."""
        params = text_params(req)
        prompts = prompt_tokens(self._pipeline.encode(req.primitives, params))
        check_fits(prompts, params.max_new_tokens, self._limits())

    def abort(self) -> None:
        """End the `generate` that runs in another thread: it returns what it has, with unfinished samples marked
        ABORTED."""
        running = self._running
        if running is not None:
            self._aborted = running
            self._pool.post(Abort(running))

    def _restore(self, instance: Member) -> None:
        super()._restore(instance)
        if self._aborted is not None:  # the process that this one replaces may have missed it
            instance.post(Abort(self._aborted))

    def _read(self, answer: Message) -> Generations:
        if not isinstance(answer, Generations):
            raise ContractError(f"{self.codec.engine} answered a request for texts with {type(answer).__name__}")
        return answer

    def _compare(self, found: Generations, expected: Generations, others: str) -> None:
        refuse_all(expected, self.codec.engine)
        gap, dtype = largest_gap(found, expected), self._dtype_name()
        if not gap <= AGREEMENT[dtype]:
            raise WeightSyncError(
                f"an instance of {self.codec.engine} gives other samples than {others}, given the same policy and "
                f"prompts: log-probs of the most probable tokens differ by up to {gap:.3g} nats, at most "
                f"{AGREEMENT[dtype]:g} is rounding in {dtype}. Its GPU or environment is another, or it has other "
                "weights."
            )
