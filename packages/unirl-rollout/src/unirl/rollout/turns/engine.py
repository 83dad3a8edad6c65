"""Plays episodes of several turns with any engine of texts: tokens in, tokens out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

import torch

from unirl.rollout.checks import step_noise_keys
from unirl.rollout.engine.base import BaseRolloutEngine
from unirl.rollout.environments.begun import BegunEpisode, Lost
from unirl.rollout.environments.playing import ProcessLimits
from unirl.rollout.environments.text import TextEnvironment
from unirl.rollout.text_checks import text_params
from unirl.rollout.turns.calls import Turn, calls_of, outside_calls
from unirl.rollout.turns.episodes import SECONDS, Episode, Written, next_request, track_of
from unirl.rollout.turns.opening import Opening
from unirl.rollout.turns.parts import Part, Parts
from unirl.rollout.turns.prompt_images import UNDECLARED
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.conditions import Bridge, Condition
from unirl.types.episodes import EPISODE
from unirl.types.errors import ConfigError, DataError, RefusedError
from unirl.types.media import Texts
from unirl.types.messages import Message, brings_conversation
from unirl.types.protocols.engines import ChunkListener, TextRolloutEngine
from unirl.types.protocols.hosting import HostingPool
from unirl.types.protocols.models import ConversationCodec
from unirl.types.protocols.training import ShardedPolicyStore
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp, RolloutTrack
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment


@bounded("turns")
class TurnsEngine(BaseRolloutEngine):
    """Lets an engine and an environment take turns, all episodes of a batch side by side.

    The engine gets tokens and gives tokens: what it wrote is never tokenised again. A track holds all that follows
    the prompt, with a loss mask on what the model wrote; its decoded text is the last turn, which scorers judge. What
    came of an episode is in the metadata under "episode".

    environment: a `TextEnvironment`. max_turns: of the model, after which an episode ends ("turns"). max_tokens: of an
        episode behind its prompt; it ends before a turn that could pass them ("tokens"). None: what the context allows.
    sampling.max_new_tokens is the limit of one turn; a turn cut by it ends the episode ("length").
    Images of messages, and those of the prompt, are among the track's conditions with their places; its primitives have
    all that an episode was shown, in order. An episode in which the model writes a token that stands for media gets no
    other turn ("media").

    call_tags: tokens around a call. shows_tools: whether prompts name the tools by the chat template.
    pipeline_stages: parts of a batch that take their turns one after the other, so that the model writes for one while
        the environment answers another; 2 where the environment takes about as long as the model.
    num_workers: processes of the environment per part, next to the engine; by default one. pool: the pool of kind env
        whose processes play instead. step_timeout_s, memory_gb: of one call and of one process, see
        `EnvironmentWorkers`.
    Raises ConfigError if the tokenizer lacks the tags, or the model reads no images that the environment shows.
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
        num_workers: PositiveInt | None = None,
        step_timeout_s: Positive = 30.0,
        memory_gb: Positive | None = None,
        pool: str | None = None,
    ) -> None:
        self._engine = engine
        self._codec = pipeline
        self._any_rank = None if policies is None else policies.any_rank
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._tags: tuple[int, int] | None = None
        self._shows_images = environment.shows_images
        if self._shows_images and not pipeline.reads_images_in_turns:
            raise ConfigError(
                f"turns.environment shows images, and {type(pipeline).__name__} reads none between turns. Take a "
                "model that does (Qwen2.5-VL, Qwen3-VL, Qwen3.5), or an environment of texts."
            )
        introduction = environment.introduce()
        if introduction.tools:
            self._tags = _tag_ids(pipeline, call_tags)
            if shows_tools:
                pipeline.offer_tools(introduction.tools)
        if introduction.system_prompt is not None:
            pipeline.set_system_prompt(introduction.system_prompt)
        self._parts = Parts(
            environment,
            ProcessLimits(step_timeout_s, memory_gb),
            num_parts=pipeline_stages,
            num_workers=num_workers or 1,
            waits_for_pool=pool is not None,
        )
        self._opening = Opening(pipeline, self._parts, shows_images=environment.shows_images)
        self._listener: ChunkListener | None = None
        self._is_aborted = False

    def play_in(self, pool: HostingPool) -> None:
        """Let the processes of a pool play. Called once, before the first episode."""
        self._parts.play_in(pool)

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError if a prompt does not fit the context."""
        self._engine.check_prompts(req)

    def announce_to(self, listener: ChunkListener) -> None:
        """Call `listener` with each whole response."""
        self._listener = listener

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None, begun: RolloutResp | None = None) -> RolloutResp:
        """One episode for every row of this rank's request. Every rank calls it.

        begun: what an earlier call made of them before it was ended early (`ResumingEngine`); an episode that the
        environment can neither continue nor restore begins again. One whose next turn the engine refuses has failed.
        Raises what the engine raises, RefusedError if it refuses all first turns,
        and ConfigError if the environment does not start.
        """
        if self._is_given(req):
            return self._engine.generate(req, policy)
        self._parts.require_players()
        self._is_aborted = False
        params = text_params(req)
        names = step_noise_keys(req)
        kept: dict[int, BegunEpisode] = {}
        try:
            if begun is None:
                track_name = ""
                req, episodes, conditions = self._opening.begun(req, params, dict(enumerate(names)))
            else:
                track_name = begun.root_name()
                req, episodes, conditions = self._opening.resumed(req, params, begun.root_track(), names)
            track_name = self._play(req, episodes, conditions, names, policy, track_name)
            left = {row: name for row, name in enumerate(names) if episodes[row].end is None}
            kept = self._parts.keep(left) if left else {}
        finally:
            self._parts.end([name for row, name in enumerate(names) if row not in kept])
        played = [kept.get(row) for row in range(len(names))]
        resp = RolloutResp(tracks={track_name: track_of(req, params, episodes, conditions, played)})
        if self._listener is not None and not kept:
            self._listener(resp)
        return resp

    def _is_given(self, req: RolloutReq) -> bool:
        """True if the engine returns conversations that the rows bring, which no environment has to answer."""
        is_offline = isinstance(self._engine, BaseRolloutEngine) and self._engine.needs_texts
        return is_offline and any(map(brings_conversation, req.rows))

    def _play(
        self,
        req: RolloutReq,
        episodes: Sequence[Episode],
        conditions: Mapping[str, Condition],
        names: Sequence[str],
        policy: str | None,
        track_name: str,
    ) -> str:
        """Let all episodes come to their end, or until `abort`. Returns the name of the engine's track."""
        parts = self._parts.fresh()
        for part in itertools.cycle(parts):
            self._settle(part, text_params(req))
            own = range(part.number, len(episodes), len(parts))
            is_cut = self._is_aborted and bool(track_name)
            going = [] if is_cut else [row for row in own if episodes[row].end is None]
            if track_name and not part.is_over:
                part.is_over = not (self._any_rank(bool(going)) if self._any_rank else going)
            if all(each.is_over for each in parts):
                return track_name
            if part.is_over:
                continue
            # Where weights are sharded, a rank whose episodes have all ended generates with the others, for nothing.
            rows = going or [0]
            asked = next_request(req, episodes, conditions, rows)
            try:
                resp = self._engine.generate(asked, policy)
            except RefusedError as error:
                if not any(episodes[row].num_turns for row in rows):
                    raise
                for row in rows:
                    episodes[row].fail(str(error))
                part.acting = {}
                continue
            track_name = resp.root_name()
            if going:
                self._take(resp.root_track(), [episodes[row] for row in rows])
                part.acting = {names[row]: episodes[row] for row in rows if episodes[row].waits_for_an_answer}
                # Tokenizers are for one thread: only the environment works in the other.
                self._parts.step(part, {name: self._turn(episode) for name, episode in part.acting.items()})
        raise AssertionError("a cycle has no end")

    def _take(self, track: RolloutTrack, episodes: Sequence[Episode]) -> None:
        """Add what the model wrote."""
        # One transfer: row by row, each would wait for the device.
        segment = cast("TextSegment", track.segment).to("cpu")
        tokens = segment.unpack("tokens")
        log_probs = segment.unpack("log_probs") if segment.log_probs is not None else [torch.zeros(0)] * len(tokens)
        status = [SegmentStatus.COMPLETED] * len(tokens) if segment.status is None else segment.status.tolist()
        versions_B = (
            torch.zeros(len(tokens), dtype=torch.long) if track.policy_versions is None else track.policy_versions.cpu()
        )
        versions = segment.versions_by_token(versions_B).split(segment.lengths.tolist())
        texts = cast("Texts", track.decoded).texts
        for row, episode in enumerate(episodes):
            if status[row] == SegmentStatus.FAILED:
                episode.fail(str((track.metadata[row] or {})[EPISODE]["reason"]))
                continue
            turn = Written(tokens[row].tolist(), log_probs[row].tolist(), versions[row].tolist())
            if status[row] == SegmentStatus.ABORTED:
                episode.begun_turn = turn
                continue
            episode.write(turn)
            episode.say("assistant", texts[row])
            if status[row] != SegmentStatus.COMPLETED:
                episode.end = "length"

    def _settle(self, part: Part, params: ARSamplingParams) -> None:
        """Wait for what the environment answers to the last turns of a part, and let its episodes read it."""
        if part.answer is None:
            return
        steps, took_s = part.answer.result()
        part.answer = None
        bridges: dict[tuple[Message, ...], Bridge] = {}
        for name, episode in part.acting.items():
            episode.counts[SECONDS] += took_s / len(part.acting)
            step = steps[name]
            if isinstance(step, Lost):
                episode.fail(step.reason)
                continue
            episode.take(step)
            if episode.end is None and episode.num_turns >= self._max_turns:
                episode.end = "turns"
            if episode.end is not None:
                continue
            if not self._codec.media_tokens.isdisjoint(episode.last_turn):
                episode.end = "media"
                continue
            try:
                messages = tuple(step.observation)
                if messages not in bridges:
                    bridges[messages] = self._bridge(messages)
            except DataError as error:
                episode.fail(str(error))
                continue
            episode.read(messages, bridges[messages])
            if self._is_full(episode, params):
                episode.end = "tokens"

    def _bridge(self, messages: Sequence[Message]) -> Bridge:
        """Raises ConfigError for an image of an environment that declares none, DataError for one without tokens."""
        if not self._shows_images and any(message.images for message in messages):
            raise ConfigError(UNDECLARED)
        return self._codec.bridge(messages)

    def _turn(self, episode: Episode) -> Turn:
        """The model's last turn as the environment takes it."""
        text = episode.transcript[-1]["content"]
        if self._tags is None:
            return Turn(text, prose=text)
        calls = calls_of(episode.last_turn, *self._tags, self._codec.text_of)
        return Turn(text, calls, self._codec.text_of(outside_calls(episode.last_turn, *self._tags)))

    def _is_full(self, episode: Episode, params: ARSamplingParams) -> bool:
        """True if another turn could pass a limit."""
        own = len(episode.tokens) + params.max_new_tokens
        is_long = self._max_tokens is not None and own > self._max_tokens
        return is_long or len(episode.prompt) + own > self._codec.context_length

    def abort(self) -> None:
        """End the `generate` that runs in another thread: no episode gets another turn, and a later call continues
        them."""
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
        self._parts.shutdown()
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
