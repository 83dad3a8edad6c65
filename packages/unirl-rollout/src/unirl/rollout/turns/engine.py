"""Plays episodes of several turns with any engine of texts: tokens in, tokens out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

import torch

from unirl.rollout.engine.base import BaseRolloutEngine
from unirl.rollout.environments.base import Step, Task
from unirl.rollout.environments.text import TextEnvironment
from unirl.rollout.environments.tool_use import ToolUse
from unirl.rollout.environments.workers import EnvironmentWorkers, Lost
from unirl.rollout.text_checks import prompt_conditions, text_params
from unirl.rollout.turns.calls import Turn, calls_of
from unirl.sde.noise import noise_seed
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.conditions import Condition, PromptCondition
from unirl.types.episodes import EPISODE
from unirl.types.errors import ConfigError
from unirl.types.media import Texts
from unirl.types.messages import Message, demonstration
from unirl.types.noise import noise_key
from unirl.types.protocols.engines import ChunkListener, TextRolloutEngine
from unirl.types.protocols.models import ConversationCodec
from unirl.types.protocols.training import ShardedPolicyStore
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp, RolloutTrack
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

End = Literal["answered", "length", "turns", "tokens", "environment", "failed"]
_SECONDS = "environment_s"
"""Count of the seconds that the environment took for a sample."""
_STATUS: dict[str, SegmentStatus] = {"answered": SegmentStatus.COMPLETED, "failed": SegmentStatus.FAILED}


@dataclass
class _Episode:
    """An episode as far as it has come."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    """After the prompt."""
    log_probs: list[float] = field(default_factory=list)
    is_written: list[bool] = field(default_factory=list)
    """By the model."""
    last_turn: list[int] = field(default_factory=list)
    """What the model wrote last."""
    transcript: list[dict[str, str]] = field(default_factory=list)
    num_turns: int = 0
    reward: float = 0.0
    counts: dict[str, float] = field(default_factory=dict)
    end: End | None = None
    reason: str | None = None
    versions: list[int] = field(default_factory=list)

    def write(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        self.tokens += tokens
        self.log_probs += log_probs
        self.is_written += [True] * len(tokens)
        self.last_turn = list(tokens)
        self.num_turns += 1

    def read(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.log_probs += [0.0] * len(tokens)
        self.is_written += [False] * len(tokens)

    def say(self, role: str, content: str) -> None:
        self.transcript.append({"role": role, "content": content})

    @property
    def last_text(self) -> str:
        """What the model wrote last; empty where it wrote nothing."""
        return next((said["content"] for said in reversed(self.transcript) if said["role"] == "assistant"), "")

    @property
    def summary(self) -> dict[str, Any]:  # Any: JSON
        """What scorers and records see."""
        return {
            "reward": self.reward,
            "turns": self.num_turns,
            "end": self.end,
            "transcript": self.transcript,
            **({} if self.reason is None else {"reason": self.reason}),
            **{name: value for name, value in self.counts.items() if name != _SECONDS},
        }


@dataclass
class _Part:
    """Episodes that take their turns together."""

    workers: EnvironmentWorkers
    num_turns: int = 0
    acting: dict[str, _Episode] = field(default_factory=dict)
    """Those that the environment answers, by name."""
    answer: Future[tuple[dict[str, Any], float]] | None = None  # Any: steps
    is_over: bool = False


def _timed(
    step: Callable[[Mapping[str, Turn]], dict[str, Any]], actions: Mapping[str, Turn]
) -> tuple[dict[str, Any], float]:
    """What the environment answers, and the seconds that it took."""
    started = time.perf_counter()
    return step(actions), time.perf_counter() - started


@bounded("turns")
class TurnsEngine(BaseRolloutEngine):
    """Lets an engine and an environment take turns, all episodes of a batch side by side.

    The engine gets tokens and gives tokens: what it wrote is never tokenised again. A track holds all that follows
    the prompt, with a loss mask on what the model wrote; its decoded text is the last turn, which scorers judge. What
    came of an episode is in the metadata under "episode".

    environment: a `TextEnvironment`. max_turns: of the model, after which an episode ends ("turns"). max_tokens: of an
        episode behind its prompt; it ends before a turn that could pass them ("tokens"). None: what the context allows.
    sampling.max_new_tokens is the limit of one turn; a turn cut by it ends the episode ("length").
    call_tags: tokens around a call. shows_tools: whether prompts name the tools by the chat template.
    pipeline_stages: parts of a batch that take their turns one after the other, so that the model writes for one while
        the environment answers another; 2 where the environment takes about as long as the model.
    num_workers: processes of the environment per part. step_timeout_s, memory_gb: of one call and of one process, see
        `EnvironmentWorkers`.
    Raises ConfigError if the tokenizer lacks the tags.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.turns.rules"

    def __init__(
        self,
        engine: TextRolloutEngine,
        pipeline: ConversationCodec,
        policies: ShardedPolicyStore | None = None,
        *,
        environment: TextEnvironment,
        max_turns: PositiveInt,
        max_tokens: PositiveInt | None = None,
        call_tags: tuple[str, str] = ("<tool_call>", "</tool_call>"),
        shows_tools: bool = True,
        pipeline_stages: PositiveInt = 1,
        num_workers: PositiveInt = 1,
        step_timeout_s: Positive = 30.0,
        memory_gb: Positive | None = None,
    ) -> None:
        self._engine = engine
        self._codec = pipeline
        self._any_rank = None if policies is None else policies.any_rank
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._tags: tuple[int, int] | None = None
        if isinstance(environment, ToolUse):
            self._tags = _tag_ids(pipeline, call_tags)
            if shows_tools:
                pipeline.offer_tools(environment.schemas)
        self._workers = [
            EnvironmentWorkers(environment, num_workers=num_workers, step_timeout_s=step_timeout_s, memory_gb=memory_gb)
            for _ in range(pipeline_stages)
        ]
        self._answering = ThreadPoolExecutor(pipeline_stages, "unirl-environment")
        self._listener: ChunkListener | None = None
        self._is_aborted = False

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError if a prompt does not fit the context."""
        self._engine.check_prompts(req)

    def announce_to(self, listener: ChunkListener) -> None:
        """Call `listener` with each whole response."""
        self._listener = listener

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """One episode for every row of this rank's request. Every rank calls it.

        Raises what the engine raises, and ConfigError if the environment does not start.
        """
        if self._is_given(req):
            return self._engine.generate(req, policy)
        self._is_aborted = False
        params = text_params(req)
        names = [noise_key(req.rollout_id, sample) for sample in req.sample_ids]
        try:
            req, episodes, conditions = self._begun(req, params, names)
            track_name = self._play(req, episodes, conditions, names, policy)
        finally:
            for workers in self._workers:
                workers.end(names)
        resp = RolloutResp(tracks={track_name: _track(req, params, episodes, conditions)})
        if self._listener is not None:
            self._listener(resp)
        return resp

    def _is_given(self, req: RolloutReq) -> bool:
        """True if the engine returns conversations that the rows bring, which no environment has to answer."""
        is_offline = isinstance(self._engine, BaseRolloutEngine) and self._engine.needs_texts
        return is_offline and any(demonstration("", row) for row in req.rows)

    def _begun(
        self, req: RolloutReq, params: ARSamplingParams, names: Sequence[str]
    ) -> tuple[RolloutReq, list[_Episode], dict[str, Condition]]:
        """The request with the prompts that the environment replaces, its episodes, and their conditions."""
        texts = req.texts
        started = time.perf_counter()
        tasks: list[dict[str, tuple[Task, int]]] = [{} for _ in self._workers]
        for number, (name, row, group) in enumerate(zip(names, req.rows, req.group_ids, strict=True)):
            # Episodes of a group begin equally.
            seed = noise_seed(params.seed, f"{noise_key(req.rollout_id, group)}:environment")
            tasks[number % len(tasks)][name] = {**row, "prompt": texts[number]}, seed
        opened: dict[str, Any] = {}  # Any: what each observes first
        for part in self._answering.map(EnvironmentWorkers.reset, self._workers, tasks):
            opened.update(part)
        took_s = time.perf_counter() - started
        for place, name in enumerate(names):
            first = opened[name]
            if not isinstance(first, Lost) and first:
                texts[place] = first[0].content
        req = req.replace(primitives={**req.primitives, "text": Texts(texts=texts)})
        conditions = prompt_conditions(req, self._codec)
        prompt = cast("PromptCondition", conditions["prompt"])
        episodes = [_Episode(tokens.tolist()) for tokens in prompt.unpack("tokens")]
        for episode, name, text in zip(episodes, names, texts, strict=True):
            episode.say("user", text)
            episode.counts[_SECONDS] = took_s / len(episodes)
            first = opened[name]
            if isinstance(first, Lost):
                episode.end, episode.reason = "failed", first.reason
        return req, episodes, conditions

    def _play(
        self,
        req: RolloutReq,
        episodes: Sequence[_Episode],
        conditions: Mapping[str, Condition],
        names: Sequence[str],
        policy: str | None,
    ) -> str:
        """Let all episodes come to their end. Returns the name of the engine's track."""
        parts = [_Part(workers) for workers in self._workers]
        track_name = ""
        for number, part in itertools.cycle(enumerate(parts)):
            self._settle(part, text_params(req))
            going = [row for row in range(number, len(episodes), len(parts)) if episodes[row].end is None]
            if track_name and not part.is_over:
                part.is_over = not (self._any_rank(bool(going)) if self._any_rank else going)
            if all(each.is_over for each in parts):
                return track_name
            if part.is_over:
                continue
            # Where weights are sharded, a rank whose episodes have all ended generates with the others, for nothing.
            rows = going or [0]
            resp = self._engine.generate(_asked(req, episodes, conditions, rows, part.num_turns), policy)
            track_name = resp.root_name()
            part.num_turns += 1
            if going:
                self._take(resp.root_track(), [episodes[row] for row in rows])
                part.acting = {names[row]: episodes[row] for row in rows if episodes[row].end is None}
                # Tokenizers are for one thread: only the environment works in the other.
                actions = {name: self._turn(episode) for name, episode in part.acting.items()}
                part.answer = self._answering.submit(_timed, part.workers.step, actions)
        raise AssertionError("a cycle has no end")

    def _take(self, track: RolloutTrack, episodes: Sequence[_Episode]) -> None:
        """Add what the model wrote."""
        segment = cast("TextSegment", track.segment)
        tokens = segment.unpack("tokens")
        log_probs = segment.unpack("log_probs") if segment.log_probs is not None else [torch.zeros(0)] * len(tokens)
        status = [SegmentStatus.COMPLETED] * len(tokens) if segment.status is None else segment.status.tolist()
        versions = [0] * len(tokens) if track.policy_versions is None else track.policy_versions.tolist()
        texts = cast("Texts", track.decoded).texts
        for row, episode in enumerate(episodes):
            episode.write(tokens[row].tolist(), log_probs[row].tolist())
            episode.versions.append(versions[row])
            episode.say("assistant", texts[row])
            if status[row] != SegmentStatus.COMPLETED:
                episode.end = "length"

    def _settle(self, part: _Part, params: ARSamplingParams) -> None:
        """Wait for what the environment answers to the last turns of a part, and let its episodes read it."""
        if part.answer is None:
            return
        steps, took_s = part.answer.result()
        part.answer = None
        bridges: dict[tuple[Message, ...], list[int]] = {}
        for name, episode in part.acting.items():
            episode.counts[_SECONDS] += took_s / len(part.acting)
            step = steps[name]
            if isinstance(step, Lost):
                episode.end, episode.reason = "failed", step.reason
                continue
            self._apply(step, episode)
            if episode.end is not None:
                continue
            messages = tuple(step.observation)
            for message in messages:
                episode.say(message.role, message.content)
            if messages not in bridges:
                bridges[messages] = self._codec.bridge(messages)
            episode.read(bridges[messages])
            if self._is_full(episode, params):
                episode.end = "tokens"

    def _turn(self, episode: _Episode) -> Turn:
        """The model's last turn as the environment takes it."""
        calls = () if self._tags is None else calls_of(episode.last_turn, *self._tags, self._codec.text_of)
        return Turn(episode.transcript[-1]["content"], calls)

    def _apply(self, step: Step[Sequence[Message]], episode: _Episode) -> None:
        episode.reward += step.reward
        for name, value in step.counts.items():
            episode.counts[name] = episode.counts.get(name, 0.0) + value
        if step.terminated:
            episode.end = "answered"
        elif step.truncated:
            episode.end = "environment"
        elif episode.num_turns >= self._max_turns or self._is_aborted:
            episode.end = "turns"

    def _is_full(self, episode: _Episode, params: ARSamplingParams) -> bool:
        """True if another turn could pass a limit."""
        own = len(episode.tokens) + params.max_new_tokens
        is_long = self._max_tokens is not None and own > self._max_tokens
        return is_long or len(episode.prompt) + own > self._codec.context_length

    def abort(self) -> None:
        """End the `generate` that runs in another thread: no episode gets another turn."""
        self._is_aborted = True
        self._engine.abort()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def sleep(self) -> None:
        """The engine."""
        self._engine.sleep()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def wake_up(self) -> None:
        """The engine."""
        self._engine.wake_up()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def shutdown(self) -> None:
        """The engine, and the processes of the environment."""
        self._answering.shutdown()
        for workers in self._workers:
            workers.close()
        self._engine.shutdown()


def _tag_ids(codec: ConversationCodec, tags: Sequence[str]) -> tuple[int, int]:
    missing = [tag for tag in tags if tag not in codec.vocabulary]
    if missing:
        raise ConfigError(
            f"turns.call_tags: the tokenizer has no token {', '.join(missing)}, so calls cannot be found. Name the "
            "tags that this model writes around calls, or take a model that was trained with tools."
        )
    begin, end = (codec.vocabulary[tag] for tag in tags)
    return begin, end


def _asked(
    req: RolloutReq,
    episodes: Sequence[_Episode],
    conditions: Mapping[str, Condition],
    rows: Sequence[int],
    turn: int,
) -> RolloutReq:
    """The request for the next turn of some episodes. Each turn draws other numbers; the first those of a sample
    without turns."""
    asked = req.select(list(rows))
    given = {name: condition.select(list(rows)) for name, condition in conditions.items()}
    device = cast("PromptCondition", conditions["prompt"]).tokens.device
    given["prompt"] = PromptCondition.pack(
        tokens=[torch.tensor(episodes[row].prompt + episodes[row].tokens, device=device) for row in rows]
    )
    names = asked.sample_ids if turn == 0 else [f"{name}:turn:{turn}" for name in asked.sample_ids]
    return asked.replace(sample_ids=names, request_conditions=given)


def _track(
    req: RolloutReq,
    params: ARSamplingParams,
    episodes: Sequence[_Episode],
    conditions: Mapping[str, Condition],
) -> RolloutTrack:
    device = cast("PromptCondition", conditions["prompt"]).tokens.device
    ends = [_STATUS.get(str(episode.end), SegmentStatus.TRUNCATED) for episode in episodes]
    segment = TextSegment.pack(
        tokens=[torch.tensor(episode.tokens, dtype=torch.long, device=device) for episode in episodes],
        log_probs=None
        if params.is_greedy
        else [torch.tensor(episode.log_probs, dtype=torch.float32, device=device) for episode in episodes],
        loss_mask=[torch.tensor(episode.is_written, dtype=torch.bool, device=device) for episode in episodes],
        status=torch.tensor(ends, dtype=torch.long, device=device),
        params=params,
    )
    texts = [episode.last_text for episode in episodes]
    track = req.make_root_track(conditions=conditions, segment=segment, decoded=Texts(texts=texts))
    names = sorted({name for episode in episodes for name in episode.counts})
    counts = {name: torch.tensor([episode.counts.get(name, 0.0) for episode in episodes]) for name in names}
    counts["turns"] = torch.tensor([float(episode.num_turns) for episode in episodes])
    counts["written_tokens"] = torch.tensor([float(sum(episode.is_written)) for episode in episodes])
    return track.replace(
        metadata=[{**row, EPISODE: episode.summary} for row, episode in zip(req.rows, episodes, strict=True)],
        counts=counts,
        policy_versions=torch.tensor([min(episode.versions, default=0) for episode in episodes]),
    )
