"""Turns of a model and an environment: tokens in, tokens out, each end told apart."""

import time
from contextlib import contextmanager
from typing import Any

import pytest
from text_fakes import request
from turn_fakes import PARAMS, SAYS, STOP, Script, ScriptedEngine, TalkingCodec, rows

from unirl.rollout.environments.base import Step
from unirl.rollout.environments.text import TextEnvironment
from unirl.rollout.environments.tool_use import ToolUse
from unirl.rollout.environments.tools.calculator import Calculator
from unirl.rollout.turns.engine import TurnsEngine
from unirl.types.episodes import EPISODE
from unirl.types.errors import ConfigError, RefusedError
from unirl.types.messages import Message
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus


class Echo(TextEnvironment):
    """Answers a turn with its first number, until that is 0; with 5 it fails, with 4 it stops the episode."""

    deterministic = True

    def reset(self, task, seed):
        if task["prompt"] == "1 1":
            raise OSError("no board")
        return (Message("user", "2 2"),) if task["prompt"] == "3" else ()

    def step(self, action):
        first = int(action.text.split()[0])
        if first == 5:
            raise OSError("the board broke")
        message = Message("user", str(first))
        return Step((message,), reward=float(first), terminated=first == 0, truncated=first == 4, counts={"moves": 1.0})


@pytest.fixture
def play():
    made = []

    def run(texts, script, *, environment=None, params=PARAMS, **options):
        codec = TalkingCodec()
        inner = ScriptedEngine(codec, script)
        given: dict[str, Any] = {"max_turns": 4} | options
        engine = TurnsEngine(inner, codec, environment=environment or Echo(), **given)
        made.append(engine)
        return engine.generate(request(texts, params)).root_track(), inner

    yield run
    for engine in made:
        engine.shutdown()


def test_a_track_holds_all_turns_and_trains_what_the_model_wrote(play):
    track, inner = play(["1 2", "7"], {(1, 2): [3, STOP], (7,): [0, STOP], (1, 2, 3, STOP, SAYS, 3): [0, 1, STOP]})
    assert rows(track, "tokens") == [[3, STOP, SAYS, 3, 0, 1, STOP], [0, STOP]]
    assert rows(track, "log_probs") == [[-1, -2, 0, 0, -1, -2, -3], [-1, -2]]
    assert rows(track, "loss_mask") == [[True, True, False, False, True, True, True], [True, True]]
    assert rows(track, "rewards") == [[0, 3, 0, 0, 0, 0, 0], [0, 0]], "at the last token of the turn that earned it"
    assert [row[EPISODE]["turn_rewards"] for row in track.metadata] == [[3.0, 0.0], [0.0]]
    assert track.segment.status.tolist() == [SegmentStatus.COMPLETED] * 2 and track.segment.params == PARAMS
    assert track.decoded.texts == ["0 1 9", "0 9"], "scorers judge the last turn"
    assert [row[EPISODE]["reward"] for row in track.metadata] == [3.0, 0.0]
    assert track.metadata[0][EPISODE]["transcript"] == [
        {"role": "user", "content": "1 2"},
        {"role": "assistant", "content": "3 9"},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "0 1 9"},
    ]
    assert track.counts["turns"].tolist() == [2, 1] and track.counts["moves"].tolist() == [2, 1]
    assert track.counts["written_tokens"].tolist() == [5, 2] and track.policy_versions.tolist() == [4, 4]
    prompts = [row.tolist() for row in track.conditions["prompt"].unpack("tokens")]
    assert prompts == [[1, 2], [7]], "the prompt is the first one"


REFUSED = {(1, 2): [3, STOP], (7,): [6, STOP], (7, 6, STOP, SAYS, 6): []}


def test_an_episode_whose_next_turn_the_engine_refuses_fails_alone(play):
    script = {**REFUSED, (1, 2, 3, STOP, SAYS, 3): [0, STOP]}
    track, _ = play(["1 2", "7"], script)
    assert track.segment.status.tolist() == [SegmentStatus.COMPLETED, SegmentStatus.FAILED]
    assert rows(track, "tokens")[0] == [3, STOP, SAYS, 3, 0, STOP]
    episode = track.metadata[1][EPISODE]
    assert (episode["end"], episode["reason"], episode["turns"]) == ("failed", "no media", 1)


def test_an_episode_that_is_refused_when_no_other_is_left_fails_too(play):
    track, _ = play(["1 2", "7"], REFUSED | {(1, 2): [0, STOP]})
    assert track.segment.status.tolist() == [SegmentStatus.COMPLETED, SegmentStatus.FAILED]
    assert track.metadata[1][EPISODE]["reason"] == "no media for any"


def test_first_turns_that_are_all_refused_end_the_run(play):
    with pytest.raises(RefusedError, match="no media for any"):
        play(["1 2", "7"], {(1, 2): [], (7,): []})


def test_every_request_continues_the_tokens_so_far_and_draws_other_numbers(play):
    script = {(1, 2): [3, STOP], (1, 2, 3, STOP, SAYS, 3): [4, STOP]}
    track, inner = play(["1 2"], script)
    stream = [1, 2, *rows(track, "tokens")[0]]
    for req in inner.asked:
        given = req.request_conditions["prompt"].unpack("tokens")[0].tolist()
        assert stream[: len(given)] == given
    assert [req.sample_ids for req in inner.asked] == [["s0"], ["s0:turn:1"]], "the first turn is that of any sample"


@pytest.mark.parametrize(
    ("script", "options", "end", "status"),
    [
        ({(1,): [0, STOP]}, {}, "answered", SegmentStatus.COMPLETED),
        ({(1,): [4, STOP]}, {}, "environment", SegmentStatus.TRUNCATED),
        ({(1,): [3, 3, 3]}, {}, "length", SegmentStatus.TRUNCATED),
        ({(1,): [3, STOP]}, {"max_turns": 1}, "turns", SegmentStatus.TRUNCATED),
        ({(1,): [3, STOP]}, {"max_tokens": 6}, "tokens", SegmentStatus.TRUNCATED),
        ({(1,): [5, STOP]}, {}, "failed", SegmentStatus.FAILED),
    ],
)
def test_each_end_is_told_apart(play, script, options, end, status):
    track, _ = play(["1"], script, **options)
    assert track.metadata[0][EPISODE]["end"] == end and track.segment.status.tolist() == [status]
    assert ("reason" in track.metadata[0][EPISODE]) == (end == "failed")


def test_an_episode_may_grow_up_to_its_limit(play):
    script = {(1,): [3, STOP], (1, 3, STOP, SAYS, 3): [0, 0, STOP]}
    track, _ = play(["1"], script, max_tokens=7)
    assert track.metadata[0][EPISODE]["end"] == "answered" and len(rows(track, "tokens")[0]) == 7


def test_an_environment_that_fails_costs_its_own_episode_alone(play):
    track, _ = play(["1 1", "2"], {(1, 1): [0, STOP], (2,): [0, STOP]})
    assert [row[EPISODE]["end"] for row in track.metadata] == ["failed", "answered"]
    assert "OSError: no board" in track.metadata[0][EPISODE]["reason"]


def test_an_environment_may_begin_with_another_prompt(play):
    track, _ = play(["3"], {(2, 2): [0, STOP]})
    assert track.primitives["text"].texts == ["2 2"]
    assert track.conditions["prompt"].tokens.tolist() == [2, 2]


def test_greedy_episodes_have_no_log_probs(play):
    track, _ = play(["1"], {(1,): [0, STOP]}, params=ARSamplingParams(temperature=0.0, max_new_tokens=3))
    assert track.segment.log_probs is None


def test_tools_are_offered_by_the_prompts_and_called_by_their_tokens(play):
    tools = ToolUse({"calculator": Calculator()})
    script = {(1,): [6, 1, 7], (2,): [6, 7, STOP], (2, 6, 7, STOP, SAYS, 0): [0, STOP]}
    track, inner = play(["1"], script, environment=tools)
    assert inner.codec.tools == tools.schemas
    assert track.metadata[0][EPISODE]["end"] == "length", "a turn that is cut calls nothing"
    _, inner = play(["1"], script, environment=tools, shows_tools=False)
    assert inner.codec.tools is None


def test_a_tokenizer_without_tags_is_refused(play):
    with pytest.raises(ConfigError, match="the tokenizer has no token <call>, </call>"):
        play([], {}, environment=ToolUse({"calculator": Calculator()}), call_tags=("<call>", "</call>"))


class Ranks:
    """A rank among others of a sharded model, which have `extra` turns of work after this one."""

    policy_version = 0

    def __init__(self, extra):
        self.extra, self.asked = extra, []

    def any_rank(self, value):
        self.asked.append(value)
        if value:
            return True
        self.extra -= 1
        return self.extra >= 0


def test_a_rank_whose_episodes_have_ended_generates_with_the_others(play):
    codec = TalkingCodec()
    inner = ScriptedEngine(codec, {(1,): [0, STOP], (1, 0, STOP): [0, STOP]})
    ranks = Ranks(extra=2)
    given: Any = ranks  # the part of a store that turns ask
    engine = TurnsEngine(inner, codec, given, environment=Echo(), max_turns=4)
    track = engine.generate(request(["1"], PARAMS)).root_track()
    engine.shutdown()
    assert rows(track, "tokens") == [[0, STOP]]
    assert len(inner.asked) == 3 and ranks.asked == [False, False, False], "the first turn is taken unasked"


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_parts_of_a_batch_take_their_turns_one_after_the_other(play, stages):
    script: Script = {(7, row): [3, STOP] for row in range(5)}
    script |= {(7, row, 3, STOP, SAYS, 3): [row, STOP] for row in range(5)}
    script |= {(7, row, 3, STOP, SAYS, 3, row, STOP, SAYS, row): [4 * (row == 1), STOP] for row in (1, 2, 3)}
    track, inner = play([f"7 {row}" for row in range(5)], script, pipeline_stages=stages)
    ends = [row[EPISODE]["end"] for row in track.metadata]
    assert ends == ["answered", "environment", "answered", "answered", "environment"]
    assert [row[EPISODE]["turns"] for row in track.metadata] == [2, 3, 3, 3, 2]
    alone, _ = play(["7 2"], script)
    assert rows(track, "tokens")[2] == rows(alone, "tokens")[0]
    assert max(req.batch_size for req in inner.asked) == -(-5 // stages)


class TimedEngine(ScriptedEngine):
    """Takes a moment, and notes when."""

    def __init__(self, codec, script, noted):
        super().__init__(codec, script)
        self.noted = noted

    def generate(self, req, policy=None):
        with self.noted("engine"):
            time.sleep(0.1)
            return super().generate(req, policy)


@pytest.mark.parametrize("stages", [1, 2])
def test_the_model_writes_for_one_part_while_the_environment_answers_another(stages, monkeypatch):
    script: Script = {(7, row): [3, STOP] for row in range(4)}
    script |= {(*key, 3, STOP, SAYS, 3): [0, STOP] for key in script}
    spans: dict[str, list[tuple[float, float]]] = {"engine": [], "environment": []}

    @contextmanager
    def noted(who):
        begun = time.monotonic()
        yield
        spans[who].append((begun, time.monotonic()))

    codec = TalkingCodec()
    engine = TurnsEngine(
        TimedEngine(codec, script, noted), codec, environment=Echo(), max_turns=4, pipeline_stages=stages
    )
    for workers in engine._parts._workers:
        monkeypatch.setattr(workers, "step", slowly(workers.step, noted))
    engine.generate(request([f"7 {row}" for row in range(4)], PARAMS))
    engine.shutdown()
    together = [a for a in spans["engine"] for b in spans["environment"] if a[0] < b[1] and b[0] < a[1]]
    assert bool(together) == (stages > 1)


def slowly(step, noted):
    def stepped(actions):
        with noted("environment"):
            time.sleep(0.1)
            return step(actions)

    return stepped
