"""Episodes by the model that trains: it thinks for all that still run, the environment moves, until all have ended.

Legend: B episodes, b of them that still run, N decisions of all, H moves of a chunk, D numbers of a move.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.rollout.checks import step_noise_keys
from unirl.rollout.engine.trainside.base import DirectSampling
from unirl.rollout.environments.vector import Played, Seen, VectorEnvironment
from unirl.sde.noise import noise_seed
from unirl.types.actions import ActionSegment, DrawnChunks, Observations
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.episodes import EPISODE
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Videos
from unirl.types.protocols.hosting import HostingPool
from unirl.types.protocols.models import ActionPipeline
from unirl.types.protocols.training import ShardedPolicyStore
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ActionSamplingParams
from unirl.types.segments import SegmentStatus

SEED = "seed"
"""Key of a row's metadata with the seed of its start."""
SEED_RANGE = 2**31
"""Environments take seeds below it."""


def action_params(req: RolloutReq) -> ActionSamplingParams:
    """The request's sampling parameters. Raises ContractError if they are not ActionSamplingParams."""
    params = req.sampling_params
    if not isinstance(params, ActionSamplingParams):
        raise ContractError(f"this engine needs ActionSamplingParams, the request has {type(params).__name__}")
    return params


def start_seeds(req: RolloutReq, params: ActionSamplingParams) -> list[int]:
    """The seed of each episode's start: `metadata.seed` of its row, else one that follows from its group. So the
    episodes of a group start alike. Raises ConfigError for a seed that is no number that environments take."""
    seeds = []
    for name, row, group in zip(req.sample_ids, req.rows, req.group_ids or req.sample_ids, strict=True):
        seed = row.get(SEED, noise_seed(params.seed, group) % SEED_RANGE)
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < SEED_RANGE:
            raise ConfigError(f"{name}: metadata.{SEED} = {seed!r} must be a whole number of 0 to {SEED_RANGE - 1}.")
        seeds.append(seed)
    return seeds


@dataclass
class EpisodesLog:
    """What is kept of the episodes of a batch while they are played."""

    num: int
    rows: list[Tensor] = field(default_factory=list)
    """Episode of each decision, a tensor per time step."""
    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    """Field of the segment -> values, a tensor per time step."""
    frames: list[list[Tensor]] = field(default_factory=list)
    """Frames of each episode, in order."""
    returns: list[float] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)
    decisions: list[int] = field(default_factory=list)
    successes: list[float | None] = field(default_factory=list)
    errors: list[str | None] = field(default_factory=list)
    status: list[int] = field(default_factory=list)
    environment_s: float = 0.0
    """Seconds that the environment took, of all."""
    final: dict[str, Tensor] = field(default_factory=dict)
    """Last observation of each episode and what it was told, by field of the segment."""

    def __post_init__(self) -> None:
        self.frames = [[] for _ in range(self.num)]
        self.returns, self.moves, self.decisions = [0.0] * self.num, [0] * self.num, [0] * self.num
        self.successes, self.errors = [None] * self.num, [None] * self.num
        self.status = [int(SegmentStatus.COMPLETED)] * self.num

    def add(self, rows: Sequence[int], **values: Tensor | None) -> None:
        """Values of one decision of each of `rows`."""
        self.rows.append(torch.tensor(rows))
        for name, value in values.items():
            if value is not None:
                self.columns.setdefault(name, []).append(value)

    def show(self, rows: Sequence[int], seen: Seen) -> None:
        """Keep what `rows` show as the next frame of their videos, and as their last observation."""
        shown = seen.to_show()
        for place, row in enumerate(rows):
            if shown is not None:
                self.frames[row].append(torch.from_numpy(shown[place]))
        for name, part in (("final_images", seen.images), ("final_states", seen.states)):
            if part is not None:
                value = torch.from_numpy(part)
                last = self.final.setdefault(name, torch.zeros(self.num, *value.shape[1:], dtype=value.dtype))
                last[torch.tensor(rows)] = value

    def end(self, rows: Sequence[int], played: Played) -> list[int]:
        """Count what was played; the rows that go on."""
        going = []
        for place, row in enumerate(rows):
            self.returns[row] += float(played.rewards[place])
            self.moves[row] += int(played.num_moves[place])
            self.decisions[row] += 1
            if played.successes[place] == played.successes[place]:  # not NaN
                self.successes[row] = float(played.successes[place])
            self.errors[row] = played.errors[place]
            if self.errors[row] is not None:
                self.status[row] = int(SegmentStatus.FAILED)
            elif played.truncated[place]:
                self.status[row] = int(SegmentStatus.TRUNCATED)
            elif not played.terminated[place]:
                going.append(row)
        return going

    def packed(self) -> tuple[dict[str, list[Tensor]], list[int]]:
        """Fields by episode, each in order of time; and the number of decisions of each."""
        row_N = torch.cat(self.rows)
        order, lengths = row_N.argsort(stable=True), torch.bincount(row_N, minlength=self.num).tolist()
        joined = {name: torch.cat(parts)[order.to(parts[0].device)] for name, parts in self.columns.items()}
        return {name: list(value.split(lengths)) for name, value in joined.items()}, lengths

    def said(self, row: int) -> dict[str, Any]:  # Any: plain values
        """What scorers and people learn of an episode."""
        found = {"reward": self.returns[row], "moves": self.moves[row], "decisions": self.decisions[row]}
        success, error = self.successes[row], self.errors[row]
        return {
            **found,
            "end": SegmentStatus(self.status[row]).name.lower(),
            **({} if success is None else {"success": success}),
            **({} if error is None else {"reason": error}),
        }


@bounded("engine")
class EpisodesEngine(DirectSampling):
    """Plays episodes with the policy that trains, `forward_batch_size` at a time.

    environment: what they are played in. A row's `metadata.seed` is the seed of its start; without one it follows from
        the row's group, so that the episodes of a group start alike in any case.
    forward_batch_size: episodes side by side.
    policies, dump_dir: see `DirectSampling`.
    Raises ConfigError if the policy sees or gives something else than the environment.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.engine.episodes.rules"
    plays_episodes: ClassVar[bool] = True
    announces_chunks: ClassVar[bool] = True

    def __init__(
        self,
        pipeline: ActionPipeline,
        policies: ShardedPolicyStore | None = None,
        *,
        environment: VectorEnvironment,
        forward_batch_size: PositiveInt,
        device: str = "cpu",
        rank: int = 0,
        dump_dir: str | None = None,
        track: str = "action",
    ) -> None:
        super().__init__(policies, forward_batch_size=forward_batch_size, rank=rank, dump_dir=dump_dir)
        self._pipeline = pipeline
        self._any_rank = None if policies is None else policies.any_rank
        self._environment = environment
        self._device = torch.device(device)
        self._track = track
        spaces = environment.spaces
        for what, policy, found in (
            ("action_size", pipeline.chunk_shape[1], spaces.action_size),
            ("image_shape", pipeline.image_shape, spaces.image_shape),
            ("state_size", pipeline.state_size, spaces.state_size),
        ):
            if policy != found:
                raise ConfigError(
                    f"the policy has {what} = {policy}, its environment {found}. Give engine.environment a policy that "
                    "was made for it."
                )

    def play_in(self, pool: HostingPool) -> None:
        """Let the processes of a pool play. Called once, before the first episode."""
        self._environment.play_in(pool)

    def shutdown(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _check(self, req: RolloutReq) -> None:
        start_seeds(req, action_params(req))

    def _evaluating(self) -> AbstractContextManager[None]:
        return self._pipeline.evaluating()

    def _generate_chunk(self, req: RolloutReq) -> RolloutResp:
        params = action_params(req)
        log = self._played(req, params)
        fields, lengths = log.packed()
        segment = ActionSegment.pack(
            **fields,
            **log.final,
            **self._pipeline.segment_fields(params),
            status=torch.tensor(log.status),
            params=params,
        )
        verify_action_segment(segment)
        track = req.make_root_track(conditions={}, segment=segment, decoded=self._videos(log))
        track.metadata = [{**own, EPISODE: log.said(row)} for row, own in enumerate(req.rows)]
        track.counts = {
            "decisions": torch.tensor(lengths, dtype=torch.float32),
            "moves": torch.tensor(log.moves, dtype=torch.float32),
            "environment_s": torch.full((req.batch_size,), log.environment_s / req.batch_size),
        }
        track.policy_versions = self._versions(req.batch_size)
        return RolloutResp(tracks={self._track: track})

    def _played(self, req: RolloutReq, params: ActionSamplingParams) -> EpisodesLog:
        keys = step_noise_keys(req)
        log, going = EpisodesLog(req.batch_size), list(range(req.batch_size))
        given = self._given(req)
        began = time.perf_counter()
        seen = self._environment.start(start_seeds(req, params))
        log.environment_s += time.perf_counter() - began
        log.show(going, seen)
        prompts = self._pipeline.encode_prompts(req.texts)
        if prompts is not None:
            log.final["prompts"] = prompts
        observed = _tensors(seen, prompts)
        decision = 0
        while going if given else self._is_needed(going):
            if not going:  # ranks that still play gather the shards of this one
                self._pipeline.draw(observed.to(self._device), params, noise_keys=[""] * len(observed))
                continue
            observed = _tensors(seen, None if prompts is None else prompts[going])
            if given:
                drawn = self._shown(given, going, decision, params)
            else:
                drawn = self._pipeline.draw(
                    observed.to(self._device), params, noise_keys=[f"{keys[row]}::{decision}" for row in going]
                )
            moves = drawn.moves.cpu().numpy()
            began = time.perf_counter()
            played = self._environment.play(going, moves)
            log.environment_s += time.perf_counter() - began
            if given:
                played = self._of_shown(given, going, decision, played)
            self._keep(log, going, observed, drawn, played)
            log.show(going, played.seen)
            before, going = going, log.end(going, played)
            still = set(going)
            seen = played.seen.select([place for place, row in enumerate(before) if row in still])
            decision += 1
        return log

    def _given(self, req: RolloutReq) -> list[Tensor]:
        """Moves [T, D] that the rows of a request bring for each episode, instead of a policy; empty if they do not."""
        return []

    def _shown(
        self, given: Sequence[Tensor], rows: Sequence[int], decision: int, params: ActionSamplingParams
    ) -> DrawnChunks:
        """The chunk of this decision of each of `rows`."""
        raise ContractError(f"{type(self).__name__} plays no given moves")

    def _of_shown(self, given: Sequence[Tensor], rows: Sequence[int], decision: int, played: Played) -> Played:
        """What was played, without moves that were not given, and ended where they end."""
        raise ContractError(f"{type(self).__name__} plays no given moves")

    def _is_needed(self, going: Sequence[int]) -> bool:
        """True while a rank that shares the model's shards has episodes that run: all draw equally often."""
        return bool(going) if self._any_rank is None else self._any_rank(bool(going))

    def _keep(
        self, log: EpisodesLog, rows: Sequence[int], observed: Observations, drawn: DrawnChunks, played: Played
    ) -> None:
        num_moves = torch.from_numpy(played.num_moves)
        log_probs = None
        if drawn.densities is not None:
            log_probs = self._pipeline.log_probs(drawn.densities, num_moves.to(drawn.densities.device)).cpu()
        log.add(
            rows,
            images=observed.images,
            states=observed.states,
            chains=None if drawn.chains is None else drawn.chains.cpu(),
            tokens=None if drawn.tokens is None else drawn.tokens.cpu(),
            log_probs=log_probs,
            rewards=torch.from_numpy(played.rewards).float(),
            num_moves=num_moves,
        )

    def _videos(self, log: EpisodesLog) -> Videos | None:
        """The frames before each decision and after the last; None of an environment that shows none."""
        if not log.frames[0]:
            return None
        fps = self._environment.spaces.moves_per_second / self._pipeline.chunk_shape[0]
        return Videos.pack(frames=[torch.stack(frames) for frames in log.frames], fps=fps)


def verify_action_segment(segment: ActionSegment) -> None:
    """Raise ContractError unless every episode that was not lost has a decision, and log-probs are finite."""
    lost = segment.status == SegmentStatus.FAILED if segment.status is not None else torch.zeros(segment.batch_size)
    empty = [row for row, length in enumerate(segment.lengths.tolist()) if length == 0 and not bool(lost[row])]
    if empty:
        raise ContractError(f"episodes {empty[:4]} ended before their first decision")
    if segment.log_probs is not None and not bool(segment.log_probs.isfinite().all()):
        wrong = (~segment.log_probs.isfinite().all(dim=1)).nonzero().flatten().tolist()
        raise ContractError(f"log-probs of decisions {wrong[:4]} are not finite: {segment.log_probs[wrong[:1]]}")


def _tensors(seen: Seen, prompts: Tensor | None) -> Observations:
    parts = (None if part is None else torch.from_numpy(part) for part in (seen.images, seen.states))
    return Observations(*parts, prompts)
