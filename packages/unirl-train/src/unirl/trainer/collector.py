"""Makes rollouts that are ready to train on: request, generate, score, refill, advantages, selection."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic

from unirl.algorithms.advantages import Advantages
from unirl.algorithms.selection import SampleSelection
from unirl.data.data_source import MultimodalRLDataSource, PromptRow
from unirl.distributed.dispatch import collected
from unirl.distributed.held import Held
from unirl.distributed.pools.gates import Gates
from unirl.distributed.runtime import Runtime
from unirl.trainer.asking import AskedBefore, Asking, RequestOf
from unirl.trainer.batch_selection import BatchSelection
from unirl.trainer.clock import PhaseClock
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.modality import Modality, ParamsT
from unirl.trainer.roles import EngineRole, ResumingEngineRole, RewardRole, StackRole
from unirl.trainer.scouting import Scouting
from unirl.trainer.settings import TrainerSettings
from unirl.trainer.track_advantages import TrackAdvantages
from unirl.types.copies import Copies
from unirl.types.errors import RewardError
from unirl.types.roles import Collect
from unirl.types.rollout import RolloutReq, RolloutResp, RolloutTrack

logger = logging.getLogger(__name__)

Show = Callable[[Held], None]
"""Called with a scored response, before selection."""


Rows = tuple[Held, list[int]]
"""Some samples of a held value, by their places in it."""


@dataclass(frozen=True)
class ScoredGroups:
    """Groups of one request with their rewards, complete, where they were made."""

    pieces: list[Rows]
    """The samples in order, without groups that were replaced."""
    gauges: dict[str, float]
    """Scoring metrics, the largest of all workers and refills."""

    def release(self) -> None:
        """Free the samples, replaced ones too."""
        for held, _ in self.pieces:
            held.release()


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with rewards and advantages in its tracks, held by the workers."""

    rollout_id: int
    progress: float
    """Fraction of the run done, in [0, 1]."""
    resp: Held
    """The samples to train on; the learner releases them."""
    num_samples: int
    """Generated samples of the scored track, before selection."""
    metrics: dict[str, float]


@dataclass(frozen=True)
class ScoredPart:
    """A request of a rollout with advantages, to train on before the others are there."""

    number: int
    """Its place in the rollout."""
    progress: float
    """Fraction of the run done, in [0, 1]."""
    resp: Held
    """The samples to train on; the learner releases them."""
    whole: RolloutResp
    """Metadata of all samples with their rewards, before selection."""
    gauges: dict[str, float]
    """As `ScoredGroups.gauges`."""


class Collector(Generic[ParamsT]):
    """Makes rollouts. The driver moves ids and numbers; samples stay with the workers or move between them.

    rollout_policy: named copies of the weights to sample from; None is the policy being trained.
    scored_track: the track whose media are scored; None is the root. Its ancestors get the rewards too.
    track_advantages: used instead of `advantages` for the named tracks.
    collects_ahead: samples are put where they do not wait for the workers that made them (`Held.landed`).
    scouting: chooses which samples are made; None: all are.
    keeps_groups: a request has whole groups for every worker, since a scorer compares the samples of each.
    A rollout is unfinished from its first request until `finished` is called. `state_dict` is the state before the
    oldest unfinished one, so a resumed run collects that again and loses no prompts.
    One thread may generate, another one score, a third make rollouts of what was scored (`ready`). A refill generates
    from the second; `engine_in_use` is held while the engine does, and by who pushes to it. Requests with a number are
    held up by their gates instead.
    """

    def __init__(
        self,
        runtime: Runtime,
        settings: TrainerSettings,
        *,
        modality: Modality[ParamsT],
        data: MultimodalRLDataSource,
        sampling: ParamsT,
        advantages: Advantages,
        clock: PhaseClock,
        selection: SampleSelection | None = None,
        rollout_policy: Copies = None,
        scored_track: str | None = None,
        track_advantages: Mapping[str, Advantages] | None = None,
        collects_ahead: bool = False,
        scouting: Scouting | None = None,
        keeps_groups: bool = False,
    ) -> None:
        self._runtime = runtime
        self._settings = settings
        self._modality = modality
        self._data = data
        self._sampling = sampling
        self._clock = clock
        self.rollout_policy = rollout_policy
        self._scored_track = scored_track
        self._engine = runtime.role("engine", EngineRole)
        self._reward = runtime.role("reward", RewardRole)
        stack = runtime.role("stack", StackRole)
        self._advantages = TrackAdvantages(stack, advantages, dict(track_advantages or {}))
        selection = selection if selection is not None else SampleSelection()
        self._selection = BatchSelection(runtime, settings, modality, stack, selection)
        self._collects_ahead = collects_ahead
        self._scouting = scouting
        self._keeps_groups = keeps_groups
        self._asked_sampling = sampling if scouting is None else scouting.candidates(sampling)
        """With as many samples per prompt as are asked for at first."""
        self.asking = Asking(data)
        self.engine_in_use = threading.Lock()
        self._untrained: dict[int, dict[str, Any]] = {}
        """State of the advantages before each unfinished rollout that has some."""

    def prepare(self, evaluator: Evaluator | None) -> None:
        """Prepare the engine for the run. Called once, before training or resuming."""
        self._modality.prepare(self._runtime, self._data, self._sampling, evaluator)

    def deal_by(self, gates: Gates) -> bool:
        """True if the calls of requests with a number begin as the gates say, see `Runtime.deal_by`."""
        return self._runtime.deal_by(gates)

    def collect(self, rollout_id: int, *, show: Show | None = None) -> ScoredRollout:
        """One rollout, scored and selected; raises what `sampled` raises."""
        return self.ready(rollout_id, [self.sampled(rollout_id, self._settings.batch_size)], show=show)

    def sampled(self, rollout_id: int, num_prompts: int) -> ScoredGroups:
        """Samples of the next prompts, for a rollout or a part of one, with their rewards. Raises what engine and
        scorers raise, and RewardError if groups without a score are left after `max_refills` refills."""
        return self.scored(rollout_id, self.generated(rollout_id, num_prompts))

    def generated(self, rollout_id: int, num_prompts: int) -> Held:
        """The first half of `sampled`: samples without rewards."""
        return self.made(self._scouted(self.asked(RequestOf(rollout_id, rollout_id), num_prompts)))

    def asked(self, own: RequestOf, num_prompts: int) -> RolloutReq:
        """A request for the next prompts, of a rollout or a part of one."""
        with self._clock.phase("other"):
            return self._request(self.asking.rows(own, num_prompts), own.rollout)

    def asked_again(self, own: RequestOf, before: AskedBefore) -> RolloutReq:
        """The request that an earlier run has asked for, see `Asking.again`."""
        return self._request(self.asking.again(own, before), own.rollout)

    def made(self, req: RolloutReq, begun: Held | None = None) -> Held:
        """The samples of a request. Of requests with a number (`RolloutReq.number`) several may be made at once, each
        in a thread.

        begun: what `cut_short` left of an earlier call, which is released.
        """
        with self.engine_in_use if req.number is None else nullcontext(), self._clock.phase("rollout"):
            if begun is None:
                resp = self._landed(self._engine.generate(req, policy=self.rollout_policy))
                if req.number is not None:
                    for dealt in self._runtime.dealt_requests:
                        dealt.forget(req.number)
                return resp
            engine = self._runtime.role("engine", ResumingEngineRole)
            with begun:
                return self._landed(engine.generate(req, policy=self.rollout_policy, begun=begun))

    def _scouted(self, req: RolloutReq) -> RolloutReq:
        """A request for the samples that are worth making, of those that `req` asks for."""
        if self._scouting is None:
            return req
        return self._scouting.chosen(
            req, self._sampling.samples_per_prompt, lambda cheap: self._scored(self._made_whole(cheap))
        )

    def _made_whole(self, req: RolloutReq) -> Held:
        """As `made`, again where a push cuts it short."""
        resp = self.made(req)
        while not req.is_answered_by(resp.meta):
            resp = self.made(req, resp)
        return resp

    def cut_short(self) -> None:
        """Have the engine end early what it generates in other threads: `made` returns what there is."""
        self._engine.abort()

    def scored(self, rollout_id: int, resp: Held) -> ScoredGroups:
        """The second half of `sampled`: rewards, and other groups for those without."""
        return self._refilled(*self._scored(resp), rollout_id)

    def ready(self, rollout_id: int, groups: Sequence[ScoredGroups], *, show: Show | None = None) -> ScoredRollout:
        """A rollout of some groups, which it takes over, with advantages, selected."""
        with self._clock.phase("other"):
            self._untrained[rollout_id] = self._advantages.state_dict()
            resp, gauges = self._joined(groups), largest([each.gauges for each in groups])
            progress = self._settings.progress(rollout_id)
            root = resp.meta.root_name()
            num_samples = resp.meta.track(self._scored_track or root).batch_size
            self._advantages.attach(resp, root, progress)
            metrics = self._metrics_of(resp.meta, root, progress, gauges)
            if self._scouting is not None:
                metrics |= self._scouting.metrics(rollout_id, resp.meta.root_track())
            if show is not None:
                show(resp)
            resp = self._selected(resp, root)
            metrics["group/trained_samples"] = float(resp.meta.batch_size)
        return ScoredRollout(rollout_id, progress, resp, num_samples, metrics)

    def part(self, rollout_id: int, number: int, groups: ScoredGroups, *, show: Show | None = None) -> ScoredPart:
        """One request of a rollout with advantages, selected, where these compare samples of one group alone."""
        with self._clock.phase("other"):
            self._untrained.setdefault(rollout_id, self._advantages.state_dict())
            resp = self._joined([groups])
            root, progress = resp.meta.root_name(), self._settings.progress(rollout_id)
            self._advantages.attach(resp, root, progress)
            if show is not None:
                show(resp)
            whole = resp.meta
            return ScoredPart(number, progress, self._selected(resp, root), whole, groups.gauges)

    def summed_up(self, parts: Sequence[ScoredPart]) -> tuple[dict[str, float], int]:
        """Metrics of a rollout that was trained on in parts, and the number of generated samples of the scored
        track."""
        meta, progress = collected(Collect.CONCAT, [part.whole for part in parts]), parts[0].progress
        root = meta.root_name()
        metrics = self._metrics_of(meta, root, progress, largest([part.gauges for part in parts]))
        metrics["group/trained_samples"] = float(sum(part.resp.meta.batch_size for part in parts))
        return metrics, meta.track(self._scored_track or root).batch_size

    def finished(self, rollout_id: int, requests: Sequence[int]) -> None:
        """Mark a rollout as trained on, so that its requests are not collected again."""
        self.asking.finished(requests)
        del self._untrained[rollout_id]

    def request(self, rollout_id: int, num_prompts: int) -> RolloutReq:
        """A request for the next prompts of the data, with everything pinned."""
        return self._request(self.asking.other_rows(num_prompts), rollout_id)

    def _request(self, rows: Sequence[PromptRow], rollout_id: int) -> RolloutReq:
        return self._modality.request(self._runtime, rows, self._asked_sampling, rollout_id)

    # Rewards and refills ----------------------------------------------------------------------------------------

    def _scored(self, resp: Held) -> tuple[Held, dict[str, float]]:
        """A response with rewards in the scored track and its ancestors, and the slowest worker's scoring metrics."""
        with self._clock.phase("reward"):
            gauges = self._reward.score_track(resp, self._scored_track or resp.meta.root_name())
            resp.refresh()
            return self._landed(resp), largest(gauges)

    def _landed(self, resp: Held) -> Held:
        return resp.landed() if self._collects_ahead else resp

    def _refilled(self, resp: Held, gauges: dict[str, float], rollout_id: int) -> ScoredGroups:
        """Replace groups that a scorer dropped, and with dynamic sampling groups of equal rewards, by fresh prompts
        until the batch is complete.

        After `max_refills` attempts, groups of equal rewards stay, and groups without a score raise RewardError.
        """
        groups = ScoredGroups([(resp, list(range(resp.meta.batch_size)))], gauges)
        for _ in range(self._settings.max_refills):
            held, rows = groups.pieces[-1]
            track = held.meta.root_track().select(rows)
            dropped = track.failed_groups | self._selection.uninformative_groups(track)
            if not dropped:
                return groups
            self.asking.num_dropped_groups += len(dropped)
            if failed := len(track.failed_groups):
                logger.warning("rollout %d: %d groups could not be scored and are replaced", rollout_id, failed)
            kept = [row for row, group in zip(rows, track.group_ids, strict=True) if group not in dropped]
            with self._clock.phase("other"):
                req = self._fresh_groups(rollout_id, len(dropped))
            fresh, measured = self._scored(self._made_whole(self._scouted(req)))
            if not kept:
                held.release()
            pieces = [
                *groups.pieces[:-1],
                *([(held, kept)] if kept else []),
                (fresh, list(range(len(rows) - len(kept)))),
            ]
            groups = ScoredGroups(pieces, largest([groups.gauges, measured]))
        held, rows = groups.pieces[-1]
        track = held.meta.root_track().select(rows)
        if track.failed_groups:
            groups.release()
            raise _unscored(track, self._settings.max_refills)
        return groups

    def _joined(self, groups: Sequence[ScoredGroups]) -> Held:
        """The samples of all groups as one value; those that it copies are released."""
        pieces = [piece for each in groups for piece in each.pieces]
        if len(pieces) == 1 and len(pieces[0][1]) == pieces[0][0].meta.batch_size and not self._collects_ahead:
            return pieces[0][0]
        whole = self._runtime.gather(pieces)
        for each in groups:
            each.release()
        return whole

    def _fresh_groups(self, rollout_id: int, num_groups: int) -> RolloutReq:
        """A request for at least `num_groups` new prompts that divides over the devices, with new ids."""
        whole = self._runtime.num_shards * self._sampling.samples_made_together
        counts = {params.samples_per_prompt for params in (self._sampling, self._asked_sampling)}
        shards = self._runtime.num_shards if self._keeps_groups else 1
        while num_groups % shards or any((num_groups * count) % whole for count in counts):
            num_groups += 1
        fresh = self.request(rollout_id, num_groups)
        prefix = f"refill{self.asking.num_dropped_groups}:"
        return fresh.replace(
            sample_ids=[prefix + name for name in fresh.sample_ids],
            group_ids=[prefix + name for name in fresh.group_ids],
            init_noise_group_ids=[prefix + name for name in fresh.init_noise_group_ids],
        )

    # Advantages and selection -----------------------------------------------------------------------------------

    def _metrics_of(
        self, meta: RolloutResp, root: str, progress: float, gauges: Mapping[str, float]
    ) -> dict[str, float]:
        """Metrics of rewards and advantages, which the tracks have. gauges: of scoring."""
        return {
            **self._advantages.metrics(meta, root, progress),
            **{f"reward/{name}": value for name, value in gauges.items()},
            "reward/dropped_groups": float(self.asking.num_dropped_groups),
        }

    def _selected(self, resp: Held, root: str) -> Held:
        """The samples to train on, balanced over devices."""
        self._selection.thin_children(resp)
        rows = self._selection.rows(resp, root)
        if rows is None:
            return resp
        chosen = self._runtime.gather([(resp, rows)])
        resp.release()
        return chosen

    # State ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State of collecting, as it was before the oldest unfinished rollout."""
        untrained = self._untrained
        advantages = untrained[min(untrained)] if untrained else self._advantages.state_dict()
        return {**self.asking.state_dict(), **advantages}

    def load_state_dict(self, state: Mapping[str, Any], *, changed: set[str]) -> None:
        """Restore `state_dict`; state about changed rows or rewards is reset.

        changed: sections of the recipe that differ from the saved run, and "track_advantages" if those of a stage do.
        """
        self.asking.load_state_dict(state, is_same_data=not changed & {"seed", "data"})
        self._advantages.load_state_dict(state, changed=changed)


def largest(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest value of each name over several records; names may be missing in some."""
    return {name: max(part[name] for part in parts if name in part) for name in sorted({n for p in parts for n in p})}


def _unscored(track: RolloutTrack, max_refills: int) -> RewardError:
    """The error for groups of a track that have no score after all refills."""
    return RewardError(
        f"{len(track.failed_groups)} groups still could not be scored after {max_refills} "
        f"refills: {sorted(track.failed_groups)[:4]}; "
        f"first error: {next((error for error in track.reward_errors if error), None)}"
    )
