"""The trainer's side of engines that write completions in other processes."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

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
    text_segment,
    text_track,
)
from unirl.rollout.text_checks import text_params
from unirl.types.errors import ContractError, UniRLError, WeightSyncError
from unirl.types.member_pool import MAX_AT_ONCE, Member
from unirl.types.protocols.models import TextCodec
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp


class ServedTextEngine(ChildEngine):
    """Samples completions with models in other processes, which batch the prompts that they are given continuously.

    One instance gets a request as it is. Several get it in calls of whole groups: each as many at once as it samples
    together, and the rest goes to the one that is free first. A sample's seed follows from its id, so it does not
    matter which; where one dies, the calls that it had not answered go to the others.
    """

    takes_media: ClassVar[bool] = True
    can_abort: ClassVar[bool] = True
    _pipeline: TextCodec
    _track: str
    _running: int | None = None
    """Number of the last call of the `generate` that runs."""
    _aborted: int | None = None
    """Number up to which calls end early."""

    @abstractmethod
    def _limits(self) -> Limits:
        """What the engine's model takes."""

    @abstractmethod
    def _dtype_name(self) -> str:
        """Precision of the engine's model, as torch writes it: "torch.float32"."""

    @abstractmethod
    def _max_running(self) -> int:
        """Samples that an instance writes at once; it lets more wait."""

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """One completion for every row of this rank's request.

        Raises ConfigError for a prompt that does not fit, WeightSyncError where `policy` is not the one that was pushed
        last or the samples are not of it, WorkerError where the engine dies again and again.
        """
        self._check_policy(policy)
        params = text_params(req)
        conditions = self._pipeline.encode(req.primitives, params)
        limits, stops = self._limits(), self._pipeline.stop_token_ids(params)
        call = generation(req, conditions, stops, 0, placeholder=limits.image_token)
        check_fits(call.prompts, call.max_new_tokens, limits)
        self.ready()
        answer = self._generations(call, req.group_ids)
        segment = text_segment(answer, call, params)
        track = text_track(req, conditions, segment, self._pipeline.decode(segment), answer.policy_version)
        return RolloutResp(tracks={self._track: track})

    def _generations(self, call: Generate, group_ids: list[str]) -> Generations:
        """What the instances answer, in the order of the call."""
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
            self.abort()  # what the others write is of no use
            raise
        finally:
            self._running = None
        for answer in answers.values():
            self._check_version(answer.policy_version)
        return joined([answers[number] for number in range(len(calls))])

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError where a prompt does not fit the context."""
        params = text_params(req)
        prompts = prompt_tokens(self._pipeline.encode(req.primitives, params))
        check_fits(prompts, params.max_new_tokens, self._limits())

    def abort(self) -> None:
        """End the `generate` that runs in another thread: it returns what it has, unfinished samples ABORTED."""
        running = self._running
        if running is not None:
            self._aborted = running
            self._pool.post(Abort(running))

    def _restore(self, instance: Member) -> None:
        super()._restore(instance)
        if self._aborted is not None:  # it may have come after the process that this one takes the place of
            instance.post(Abort(self._aborted))

    def _read(self, answer: Message) -> Generations:
        if not isinstance(answer, Generations):
            raise ContractError(f"{self.codec.engine} answered a request for texts with {type(answer).__name__}")
        return answer

    def _compare(self, found: Generations, expected: Generations, others: str) -> None:
        gap, dtype = largest_gap(found, expected), self._dtype_name()
        if not gap <= AGREEMENT[dtype]:
            raise WeightSyncError(
                f"an instance of {self.codec.engine} gives other samples than {others}, given the same policy and "
                f"prompts: log-probs of the most probable tokens differ by up to {gap:.3g} nats, at most "
                f"{AGREEMENT[dtype]:g} is rounding in {dtype}. Its GPU or environment is another, or it has other "
                "weights."
            )
