"""Scores rollouts: several scorers, one reward, and a policy for samples that cannot be scored.

Legend: B samples.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.reward.asking import FailurePolicy, ask_again, ask_scorer
from unirl.reward.base import LocalScorer, device_of
from unirl.reward.compose import Aggregation, checked_weights, composed
from unirl.reward.grouping import compares_groups
from unirl.reward.joining import completed, first_errors, joined, without_failed_episodes
from unirl.reward.scorer_queues import ScorerQueues, Stream, Ticket, gauges
from unirl.reward.shaping import LengthShaping, TruncatedReward
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.closing import Closeable
from unirl.types.protocols.rewards import ConcurrentScorer, Scorer
from unirl.types.reward import RewardRequest, RewardResponse, reward_request, reward_requests
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import Credit, RolloutResp
from unirl.types.segments import TextSegment

logger = logging.getLogger(__name__)


@bounded("reward")
class RewardService:
    """Scores requests with every scorer and joins the results.

    scorers: name -> scorer, or a list of scorers under their own names.
    weights: scorer -> weight; None means 1 each. The reward is the plain weighted sum of the scorers' raw rewards
    (`weighted_mean`: divided by the sum of the weights), so scales are the caller's affair.
    on_failure: what happens when a sample has no finite reward. `raise`: RewardError at once. `retry`: only the
    failed samples again, up to max_retries times, then RewardError. `drop_group`: every sample of its group gets
    success False and reward NaN, counted, for the trainer to leave out and refill.
    device: moves every local scorer with modules there; None leaves each where its own `device` says.
    truncated_reward, overlong_buffer_len, overlong_penalty_factor: what the length of generated texts does to the
    rewards of training, see `unirl.reward.shaping.LengthShaping`; images and videos have none.
    is_async: the engine hands its samples over as they are made, and they are scored meanwhile (`take`). The rewards
    are the same, bit for bit.
    credit: how samples from which the scored ones grew are rewarded by them: "mean", "max", "sum" or "best_of" of the
    children's rewards, see `unirl.types.rollout.RolloutResp.propagate_rewards`.
    elsewhere: scorers that other services have, which have scored a track in part (`score_part`) when this one
    completes it; `weights` names them too.
    Raises ConfigError for an impossible value.
    """

    recipe_rules: ClassVar[str] = "unirl.reward.rules"
    """Module with the rules of recipes, see `unirl.types.recipe`."""

    def __init__(
        self,
        scorers: Mapping[str, Scorer] | Sequence[Scorer],
        weights: Mapping[str, float] | None = None,
        on_failure: FailurePolicy = "raise",
        max_retries: PositiveInt = 2,
        aggregation: Aggregation = "weighted_sum",
        device: str | None = None,
        truncated_reward: TruncatedReward = "zero",
        overlong_buffer_len: PositiveInt | None = None,
        overlong_penalty_factor: Positive | None = None,
        is_async: bool = False,
        credit: Credit = "mean",
        elsewhere: Sequence[str] = (),
    ) -> None:
        self.scorers = _by_name(scorers)
        self._elsewhere = list(elsewhere)
        names = [*self.scorers, *self._elsewhere]
        if weights is not None:  # its order is that of the components
            names.sort(key=lambda name: list(weights).index(name) if name in weights else len(weights))
        self._all_weights = checked_weights(names, weights, aggregation)
        self.weights = {name: self._all_weights[name] for name in self.scorers}
        self.on_failure: FailurePolicy = on_failure
        self.max_retries = max_retries
        self.aggregation: Aggregation = aggregation
        self._shaping = LengthShaping(truncated_reward, overlong_buffer_len, overlong_penalty_factor)
        self.is_async = is_async
        self.credit: Credit = credit
        # A scorer with buffers or its own device is asked by one thread at a time.
        self._locks = {
            name: nullcontext() if isinstance(scorer, ConcurrentScorer) else threading.Lock()
            for name, scorer in self.scorers.items()
        }
        self._queues: ScorerQueues | None = None
        self._numbers = itertools.count()
        self._open: dict[Ticket, tuple[list[RewardRequest], dict[str, Stream]]] = {}
        self._taken: Ticket | None = None
        if device is not None:
            for scorer in self._local_scorers():
                scorer.move_to(device)

    @distributed(Dispatch.DP_SCATTER, Collect.CONCAT)
    def score(self, request: RewardRequest) -> RewardResponse:
        """Rewards of B samples. component_rewards has each scorer's reward under its name, and
        `scorer/component` for a scorer with several. Raises RewardError as `on_failure` says."""
        return self._answer(request, list(self.scorers))

    @distributed(Dispatch.DP_SCATTER, Collect.ALL)
    def score_track(self, resp: RolloutResp, track: str, *, is_training: bool = True) -> dict[str, float]:
        """Score the decoded media of a track, and write rewards, component rewards and errors into it where it lies;
        the tracks that it grew from are credited as `credit` says. Changes `resp` in place.

        is_training: the length of texts changes their rewards; component rewards stay as the scorers gave them. An
        evaluation leaves that out, and scorers that compare samples of a group, since it has one sample per prompt;
        where no other scorer has a weight, its reward is the plain sum of the others.
        Returns how scoring kept up with an engine that hands its samples over; nothing where it does not.
        Raises ContractError if the track already has rewards or no media, and what `score` raises.
        """
        own = resp.track(track)
        if own.rewards is not None:
            raise ContractError(f"track {track} already has rewards; score each rollout once")
        scored = self._scored_by_size(reward_requests(resp, track), _asked(self.scorers, is_training))
        scored = without_failed_episodes(own, scored, self.on_failure)
        if self._elsewhere:
            known = {**own.component_rewards, **scored.component_rewards}
            weights = self._all_weights if is_training else _of_some(self._all_weights, known)
            scored = completed(own, scored, weights, self.aggregation)
        if is_training and isinstance(own.segment, TextSegment):
            params = own.segment.params
            max_len = None if params is None else params.max_new_tokens
            scored = scored.replace(rewards=self._shaping(scored.rewards, own.segment, max_len))
        resp.tracks[track] = own.replace(
            rewards=scored.rewards,
            component_rewards=dict(scored.component_rewards),
            reward_errors=list(scored.errors),
        )
        resp.reward_compute_s += scored.compute_s
        while (parent := resp.tracks[track].parent_track) is not None:
            resp.tracks[parent] = resp.propagate_rewards(track, parent, self.credit).tracks[parent]
            track = parent
        return scored.gauges or {}

    @distributed(Dispatch.DP_SCATTER, Collect.ALL)
    def score_part(self, resp: RolloutResp, track: str, *, is_training: bool = True) -> None:
        """Write the component rewards and errors of these scorers into a track, whose reward another service composes
        (`elsewhere`) with `score_track`. Changes `resp` in place. Raises as `score_track`."""
        if not (names := _asked(self.scorers, is_training, may_be_none=True)):
            return
        own = resp.track(track)
        if own.rewards is not None:
            raise ContractError(f"track {track} already has rewards; score each rollout once")
        scored = self._scored_by_size(reward_requests(resp, track), names)
        scored = without_failed_episodes(own, scored, self.on_failure)
        resp.tracks[track] = own.replace(
            component_rewards={**own.component_rewards, **scored.component_rewards},
            reward_errors=first_errors(own.reward_errors, scored.errors),
        )
        resp.reward_compute_s += scored.compute_s

    def _scored_by_size(self, parts: list[tuple[list[int], RewardRequest]], names: Sequence[str]) -> RewardResponse:
        """The answer of some scorers to requests about images of one size each, in the order of the rows that they ask
        about."""
        if len(parts) == 1:
            return self._scored(parts[0][1], names)
        groups = [group for _, request in parts for group in set(request.group_ids)]
        for name in names:
            if len(set(groups)) < len(groups) and compares_groups(self.scorers[name]):
                raise ContractError(f"scorer {name} compares samples of a group, whose images have several sizes here")
        answers = [(rows, self._answer(request, names)) for rows, request in parts]
        seconds = sum(answer.compute_s for _, answer in answers)
        return RewardResponse.concat_rows(answers).replace(compute_s=seconds)

    def _answer(self, request: RewardRequest, names: Sequence[str]) -> RewardResponse:
        started = time.perf_counter()
        scored = self._composed(request, names, lambda name: self._ask(name, request))
        return scored.replace(compute_s=time.perf_counter() - started)

    def _scored(self, request: RewardRequest, names: Sequence[str]) -> RewardResponse:
        """The answer to a request, taken from the background where the engine has handed these samples over."""
        taken, self._taken = self._taken, None
        if taken is None:
            return self._answer(request, names)
        ids = [name for part in self._open[taken][0] for name in part.sample_ids]
        if ids != request.sample_ids:
            self._discard(taken)
            raise ContractError(
                f"the engine handed over samples {ids[:3]}... ({len(ids)}) but {request.sample_ids[:3]}... "
                f"({len(request.sample_ids)}) are to be scored; score every response before the next is generated"
            )
        return self._collected(taken, names)

    # Rewards as futures -----------------------------------------------------------------------------------------

    def submit(self, request: RewardRequest) -> Ticket:
        """Begin to score B samples in the background, each scorer in its own threads; `collect` has the rewards."""
        ticket = self.submit_part(request)
        for stream in self._open[ticket][1].values():
            stream.finish()
        return ticket

    def submit_part(self, request: RewardRequest, ticket: Ticket | None = None) -> Ticket:
        """Begin to score samples to which more may come; `ticket` adds them to those that it stands for.

        `collect` then answers as `score` does on all of them in the order of submission, bit for bit: batches are cut
        as there. A scorer that is no LocalScorer sees the parts as they were submitted.
        """
        if not request.sample_ids:
            raise ContractError("a request without sample_ids was submitted")
        if self._queues is None:
            self._queues = ScorerQueues(
                self.scorers, functools.partial(_asked_alone, self.scorers, self._locks, self.on_failure)
            )
            weakref.finalize(self, self._queues.close)
        if ticket is None:
            ticket = Ticket(next(self._numbers))
            self._open[ticket] = ([], self._queues.open())
        requests, streams = self._of(ticket)
        requests.append(request)
        for stream in streams.values():
            stream.add(request)
        return ticket

    def collect(self, ticket: Ticket) -> RewardResponse:
        """The rewards of a ticket's samples; waits until all are scored. A ticket is collected once.

        Failed samples are asked again here, as `on_failure` says. compute_s is the time that scorers worked, gauges
        say how scoring kept up. Raises what `score` would; ContractError for a ticket that is not open.
        """
        return self._collected(ticket, list(self.scorers))

    def _collected(self, ticket: Ticket, names: Sequence[str]) -> RewardResponse:
        requests, all_streams = self._of(ticket)
        streams = {name: all_streams[name] for name in names}
        try:
            for stream in streams.values():
                stream.finish()
            began = time.perf_counter()
            scored = self._composed(RewardRequest.concat(requests), names, lambda name: streams[name].answer())
            measured = gauges(streams, began)
        finally:
            self._discard(ticket)
        busy_s = sum(stream.busy_s() for stream in streams.values())
        return scored.replace(compute_s=busy_s, gauges=measured)

    def take(self, resp: RolloutResp) -> None:
        """What an engine calls with every chunk of a response that it has made; `score_track` of the root track of the
        whole response then collects them."""
        self._taken = self.submit_part(reward_request(resp, resp.root_name()), self._taken)

    def close(self) -> None:
        """End the background threads and close scorers that hold connections. Samples not collected are given up."""
        if self._open:
            logger.warning("closed with %d tickets whose samples were not collected", len(self._open))
        for ticket in list(self._open):
            self._discard(ticket)
        for scorer in self.scorers.values():
            if isinstance(scorer, Closeable):
                scorer.close()
        if self._queues is not None:
            self._queues.close()

    def _of(self, ticket: Ticket) -> tuple[list[RewardRequest], dict[str, Stream]]:
        if ticket not in self._open:
            raise ContractError(f"{ticket} is not open: it was collected before, or given by another service")
        return self._open[ticket]

    def _discard(self, ticket: Ticket) -> None:
        _, streams = self._open.pop(ticket)
        for stream in streams.values():
            stream.cancel()

    def score_with_gradient(self, request: RewardRequest) -> Tensor:
        """The reward float32 [B] as `score` composes it, with gradients to the pixels of the media.

        Scorers of weight 0 are left out: they add nothing. Called in the process that trains, not over the runtime.
        Raises ConfigError naming the scorers with a weight that are not differentiable, and RewardError whatever
        `on_failure` says: a loss has no samples to drop.
        """
        used = {name: scorer for name, scorer in self.scorers.items() if self.weights[name]}
        wrong = [
            f"{name} ({type(scorer).__name__})"
            for name, scorer in used.items()
            if not (isinstance(scorer, LocalScorer) and scorer.is_differentiable)
        ]
        if wrong:
            raise ConfigError(
                f"scorers {', '.join(wrong)} are not differentiable, so this reward has no gradient. Use "
                "differentiable scorers, or give these the weight 0 in reward.weights, so that they only report."
            )
        zero_B = torch.zeros(len(request.sample_ids), device=device_of(request))
        rewards = {
            name: scorer.score_with_gradient(request) if name in used and isinstance(scorer, LocalScorer) else zero_B
            for name, scorer in self.scorers.items()
        }
        return composed(rewards, self.weights, self.aggregation)

    @distributed(Dispatch.BROADCAST)
    def offload(self) -> None:
        """Move every local scorer's modules to host memory."""
        for scorer in self._local_scorers():
            scorer.offload()

    @distributed(Dispatch.BROADCAST)
    def onload(self) -> None:
        """Move every local scorer's modules back to its device."""
        for scorer in self._local_scorers():
            scorer.onload()

    def _local_scorers(self) -> list[LocalScorer]:
        return [scorer for scorer in self.scorers.values() if isinstance(scorer, LocalScorer)]

    def _ask(self, name: str, request: RewardRequest) -> RewardResponse:
        return _asked_alone(self.scorers, self._locks, self.on_failure, name, request)

    def _composed(
        self, request: RewardRequest, names: Sequence[str], first: Callable[[str], RewardResponse]
    ) -> RewardResponse:
        """One response of some scorers, failures treated as the policy says. first: scorer's name -> first answer."""
        final: dict[str, RewardResponse] = {}
        num_retried = 0
        for name in names:
            ask = functools.partial(self._ask, name)
            final[name], retried = ask_again(name, ask, request, first(name), self.on_failure, self.max_retries)
            num_retried += retried
        # Those elsewhere are still missing, so what is composed here is replaced: a mean might divide by 0.
        aggregation = "weighted_sum" if self._elsewhere else self.aggregation
        weights = self.weights if len(names) == len(self.scorers) else _of_some(self.weights, names)
        return joined(final, request, weights, aggregation, num_retried)


def _asked(scorers: Mapping[str, Scorer], is_training: bool, *, may_be_none: bool = False) -> list[str]:
    """The scorers that are asked. Raises ConfigError if an evaluation has none."""
    names = [name for name, scorer in scorers.items() if is_training or not compares_groups(scorer)]
    if not names and not may_be_none:
        raise ConfigError(
            f"an evaluation has one sample per prompt, and {', '.join(scorers)} compare samples of a prompt. Add "
            "a scorer of single samples to reward.scorers, with the weight 0 if it shall only report, or set eval to "
            "null."
        )
    return names


def _of_some(weights: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """The weights of some scorers; 1 each where none of them has a weight."""
    some = {name: weight for name, weight in weights.items() if name in names}
    return some if any(some.values()) else dict.fromkeys(some, 1.0)


def _asked_alone(
    scorers: Mapping[str, Scorer],
    locks: Mapping[str, AbstractContextManager[Any]],
    on_failure: FailurePolicy,
    name: str,
    request: RewardRequest,
) -> RewardResponse:
    with locks[name]:
        return ask_scorer(name, scorers[name], request, on_failure)


def _by_name(scorers: Mapping[str, Scorer] | Sequence[Scorer]) -> dict[str, Scorer]:
    named = list(scorers.items()) if isinstance(scorers, Mapping) else [(each.name, each) for each in scorers]
    names = [str(name) for name, _ in named]
    if not names:
        raise ConfigError("a reward service needs at least one scorer")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"two scorers are called {twice}; give them names, or pass a mapping")
    wrong = [name for name in names if not name or "/" in name]
    if wrong:
        raise ConfigError(f"scorers cannot be called {wrong}; '/' separates scorer and component")
    for name, scorer in named:
        if not isinstance(scorer, Scorer):
            raise ConfigError(f"{name} is a {type(scorer).__name__}, which is no scorer: it needs `name` and `score`")
    return {str(name): scorer for name, scorer in named}
