"""Rehearsals of episodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from unirl.app.command_line import parse
from unirl.app.rehearsal.command import tokens_of_answers
from unirl.app.rehearsal.environment import AnsweringEnvironment
from unirl.app.rehearsal.share import share_of
from unirl.app.rehearsal.texts import Answers
from unirl.rollout.environments.tool_use import ToolUse
from unirl.rollout.environments.tools.images import Crop
from unirl.rollout.turns.calls import Turn
from unirl.types.conditions import Bridge
from unirl.types.errors import ConfigError
from unirl.types.messages import Message, ShownImage
from unirl.worlds.tools.world import Adder

from .rehearsing import checked, tflop

STAND_IN = "unirl.app.rehearsal.environment.AnsweringEnvironment"


@pytest.mark.nightly
def test_two_turns_train_on_their_tokens_and_on_the_answer() -> None:
    """As one turn of as many tokens; their rollout reads the prompt twice and decodes half of them."""
    words = ("worlds/tools/grpo", "eval=null", "batch_size=2", "stack.micro_batch_size=8", "sampling.max_new_tokens=")
    two = tflop(*words[:-1], f"{words[-1]}6", "turns.max_turns=2", "--answer-tokens", "20")
    one = tflop(*words[:-1], f"{words[-1]}32", "turns.max_turns=1")
    short = tflop(*words[:-1], f"{words[-1]}6", "turns.max_turns=1")
    assert two["train"] == pytest.approx(one["train"], rel=0.01)
    assert two["rollout"] > 2 * short["rollout"]


def test_an_environment_of_a_rehearsal_answers_every_turn(tmp_path: Path) -> None:
    run = share_of(checked("worlds/tools/grpo", "parts/environments=pool"), tmp_path, 7).run
    turns = run.resolved["turns"]
    assert turns["environment"]["_target_"] == STAND_IN
    assert turns["environment"]["environment"]["_target_"].endswith(".ToolUse")
    assert "pool" not in turns and not run.resolved["pools"]
    texts = AnsweringEnvironment(ToolUse({"add": Adder()}))
    assert [tool["function"]["name"] for tool in texts.introduce().tools] == ["add"]
    texts.reset({"prompt": "1+2"}, 0)
    assert texts.step(Turn("", ())).observation == (Message("tool", ""),)
    images = AnsweringEnvironment(ToolUse({"crop": Crop()}))
    images.introduce()
    images.reset({"prompt": "?", "images": [ShownImage(2, 3, bytes(18))]}, 0)
    [message] = images.step(Turn("", ())).observation
    assert [(image.height, image.width) for image in message.images] == [(2, 3)]


@pytest.mark.parametrize(
    ("max_tokens", "turn_tokens", "length"),
    [
        (None, 10, 20),  # (100 of context - 10 of prompt - 3 turns) / 2 answers = 30, of which 20 are asked for
        (None, 22, 12),
        (40, 10, 5),
        (30, 10, 2),  # no room: as long as the template makes it
    ],
)
def test_answers_are_as_long_as_all_turns_have_room_for(max_tokens: int | None, turn_tokens: int, length: int) -> None:
    pipeline: Any = SimpleNamespace(context_length=100, bridge=lambda messages: Bridge([1] * (1 + len(messages))))
    turns: Any = {"max_turns": 3, "max_tokens": max_tokens}
    answers = Answers(pipeline, turns, 20)
    answers.make_room(10, turn_tokens)
    tokens = answers.bridge([Message("tool", "")]).tokens
    assert tokens == [1, 1, *[0] * (length - 2)]


@pytest.mark.parametrize(("num_tokens", "length"), [(70, 70), (20, 20), (4, 5)])
def test_images_of_answers_fit_their_tokens(num_tokens: int, length: int) -> None:
    """A token for each 8 x 8 pixels, and one of the template: 65, 17 and 5 of 64, 32 and 16 pixels, no fewer."""
    shown = ShownImage(64, 64, bytes(3 * 64 * 64))
    pipeline: Any = SimpleNamespace(
        context_length=1000,
        bridge=lambda messages: Bridge([1] * (1 + messages[0].images[0].height * messages[0].images[0].width // 64)),
    )
    answers = Answers(pipeline, cast("Any", {"max_turns": 2, "max_tokens": None}), num_tokens)
    answers.make_room(10, 10)
    assert len(answers.bridge([Message("tool", "", (shown,))]).tokens) == length


def test_answers_have_no_negative_number_of_tokens() -> None:
    assert tokens_of_answers(parse(["rehearse", "worlds/tools/grpo", "--answer-tokens", "0"])) == 0
    with pytest.raises(ConfigError, match="--answer-tokens -1: what an environment answers"):
        tokens_of_answers(parse(["plan", "worlds/tools/grpo", "--answer-tokens", "-1"]))
