"""The stacks of several policies as one: each trains its own tracks of a response, one policy after the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from unirl.algorithms.traces import Trace
from unirl.train.names import below, joined
from unirl.train.stack import TrainStack, TrainStepResult
from unirl.types.copies import Copies
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutResp

GRAD_NORM = "train/grad_norm"
SKIPPED = "train/skipped_steps"


class PolicyStacks:
    """Several policies that learn from one rollout, with the methods of a `TrainStack`.

    stacks: by policy. Metrics and state are called `<policy>/...`; train/grad_norm is the largest of them and
        train/skipped_steps their sum. sampled: the policy whose named copy rollouts are sampled from; None: all are
        sampled, each from its own.
    """

    def __init__(self, stacks: Mapping[str, TrainStack], sampled: str | None = None) -> None:
        self._stacks = dict(stacks)
        self._sampled = sampled

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def prepare(self) -> None:
        for stack in self._stacks.values():
            stack.prepare()

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def trained_tracks(self) -> list[str]:
        """See `TrainStack.trained_tracks`; of all policies."""
        return [track for stack in self._stacks.values() for track in stack.trained_tracks()]

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def rollout_policy(self) -> Copies:
        """See `TrainStack.rollout_policy`; of the policy that is sampled from, or of all by policy and track."""
        if self._sampled is not None:
            return self._stacks[self._sampled].rollout_policy()
        copies: dict[str, str] = {}
        for name, stack in self._stacks.items():
            own = stack.rollout_policy()
            copies.update({name: own} if isinstance(own, str) else own or {})
        return copies or None

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def old_logp(self) -> str | None:
        said = {name: stack.old_logp() for name, stack in self._stacks.items()}
        return "; ".join(f"{name}: {words}" for name, words in said.items() if words) or None

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def exact_ratios(self) -> list[str]:
        """See `TrainStack.exact_ratios`; of all policies."""
        return [f"{policy}/{name}" for policy, stack in self._stacks.items() for name in stack.exact_ratios()]

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def samples_per_unit(self) -> int:
        """See `TrainStack.samples_per_unit`; a number that serves all."""
        return math.lcm(*(stack.samples_per_unit() for stack in self._stacks.values()))

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def state_dict(self) -> dict[str, float]:
        return joined({name: stack.state_dict() for name, stack in self._stacks.items()})

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def load_state_dict(self, state: dict[str, float]) -> None:
        for name, stack in self._stacks.items():
            stack.load_state_dict(below(state, f"{name}/"))

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def trace(self, samples: list[str]) -> None:
        for stack in self._stacks.values():
            stack.trace(samples)

    @distributed(Dispatch.BROADCAST, Collect.ALL)
    def take_traces(self) -> list[Trace]:
        return [trace for stack in self._stacks.values() for trace in stack.take_traces()]

    @distributed(Dispatch.DP_SCATTER, Collect.FIRST)
    def train(self, resp: RolloutResp, *, progress: float) -> TrainStepResult:
        """See `TrainStack.train`; every policy trains its tracks on this rank's shard."""
        return _joined_results({name: stack.train(resp, progress=progress) for name, stack in self._stacks.items()})

    @distributed(Dispatch.DP_SCATTER, Collect.FIRST)
    def train_part(self, resp: RolloutResp, *, progress: float, num_parts: int) -> TrainStepResult | None:
        """See `TrainStack.train_part`; every policy trains its track."""
        found = {
            name: stack.train_part(resp, progress=progress, num_parts=num_parts) for name, stack in self._stacks.items()
        }
        results = {name: result for name, result in found.items() if result is not None}
        return _joined_results(results) if results else None


def _joined_results(results: Mapping[str, TrainStepResult]) -> TrainStepResult:
    """The results of all policies, by policy."""
    updates = [
        joined(dict(zip(results, each, strict=True)))
        for each in itertools.zip_longest(*(result.updates for result in results.values()), fillvalue={})
    ]
    metrics = joined({name: result.metrics for name, result in results.items()})
    metrics[GRAD_NORM] = max(result.metrics[GRAD_NORM] for result in results.values())
    metrics[SKIPPED] = sum(result.metrics[SKIPPED] for result in results.values())
    return TrainStepResult(metrics, updates)
