from pathlib import Path

import pytest
from my_tool import MyTool

from unirl.app.main import main
from unirl.rollout.environments.tool_use import ToolUse
from unirl.rollout.environments.tools.base import ToolError
from unirl.rollout.turns.calls import ToolCall, Turn

HERE = Path(__file__).parent


# These tests are of the tool as it was written for you: change them with it.
def test_the_answer_is_the_sum():
    assert MyTool()({"expression": "48213 + 95760+1"}, {}) == "143974"


@pytest.mark.parametrize(("expression", "reason"), [("1+x", "'x' is no whole number"), ("1+100", "more than 2 digits")])
def test_a_mistake_is_told_to_the_model(expression, reason):
    with pytest.raises(ToolError, match=reason):
        MyTool(max_digits=2)({"expression": expression}, {})


def test_a_model_calls_it_by_name():
    episode = ToolUse({"my_tool": MyTool()}).fresh()
    episode.reset({"prompt": "1+2="}, 0)
    step = episode.step(Turn("", (ToolCall("my_tool", {"expression": "1+2"}), ToolCall("my_tool", {"sum": "1+2"}))))
    assert step.observation[0].content == "3"
    assert step.observation[1].content.startswith("error: ")


def test_the_recipe_has_no_mistakes(monkeypatch):
    monkeypatch.chdir(HERE)
    assert main(["check", "my_tool.yaml"]) == 0
