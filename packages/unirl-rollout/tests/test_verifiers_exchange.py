"""Requests of a harness as turns of one conversation, without the library; with it: tests/agents."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from unirl.rollout.environments.base import Step
from unirl.rollout.environments.text import TextEnvironment
from unirl.rollout.environments.verifiers.exchange import NotCarriedError, Talk, completion, events
from unirl.rollout.environments.workers import EnvironmentWorkers
from unirl.rollout.turns.calls import MalformedCall, ToolCall, Turn

SYSTEM, ASKED = {"role": "system", "content": "be brief"}, {"role": "user", "content": "1+2?"}
CALL = Turn("I count. <call>", (ToolCall("add", {"a": 1}),), "I count. ")


def body(*messages: dict[str, Any], **given: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [*messages], **given}


def test_each_request_adds_to_the_conversation():
    talk = Talk()
    asked = talk.hear(body(SYSTEM, ASKED, tools=[{"type": "function"}], stream=False, tool_choice="auto"))
    assert asked.system_prompt == "be brief" and [each.content for each in asked.messages] == ["1+2?"]
    answer = talk.answer(CALL, None)
    assert answer["content"] == "I count." and json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    heard = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": [{"type": "text", "text": "3"}]}
    again = talk.hear(body(SYSTEM, ASKED, answer | {"reasoning_content": "kept by some"}, heard))
    assert [(each.role, each.content) for each in again.messages] == [("tool", "3")]
    talk.answer(Turn("so</think>3"), "</think>")
    assert talk.said[-1].text == "3", "thoughts are told apart"


def test_a_turn_with_a_malformed_call_is_a_text():
    talk = Talk()
    talk.hear(body(ASKED))
    turn = Turn("<call>{", (ToolCall("add", {}), MalformedCall("no JSON")), "")
    assert talk.answer(turn, None) == {"role": "assistant", "content": "<call>{"}


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (body(ASKED, {"role": "assistant", "content": "3"}), "do not continue"),
        (body({"role": "user", "content": "other"}, {"role": "user", "content": "x"}), "do not continue the 2 before"),
        (body(ASKED, {"role": "assistant", "content": "3!"}, ASKED), "do not continue"),
        (body(ASKED, {"role": "assistant", "content": "3"}, SYSTEM), "adds messages of system"),
        (body(ASKED, {"role": "assistant", "content": "3"}, ASKED, temperature=0.5, n=2), "asks for n, temperature"),
        (body(ASKED, {"role": "assistant", "content": "3"}, ASKED, tool_choice="required"), "asks for tool_choice"),
    ],
)
def test_what_is_no_next_turn_is_refused_by_name(second, reason):
    talk = Talk()
    talk.hear(body(ASKED))
    talk.answer(Turn("3"), None)
    with pytest.raises(NotCarriedError, match=reason):
        talk.hear(second)


def test_a_stream_says_what_the_answer_says():
    talk = Talk()
    talk.hear(body(ASKED))
    whole = completion(talk.answer(CALL, None), "policy")
    first, done = events(whole).decode().removeprefix("data: ").split("\n\ndata: ")
    (choice,) = json.loads(first)["choices"]
    assert choice["delta"]["tool_calls"][0] == {"index": 0, **whole["choices"][0]["message"]["tool_calls"][0]}
    assert choice["finish_reason"] == "tool_calls" and done.strip() == "[DONE]"


class Starter(TextEnvironment):
    """Starts a program in its own process group, as libraries do."""

    starts_programs = True
    python = sys.executable

    def prepare(self):
        self.program = subprocess.Popen(["sleep", "60"], start_new_session=True)

    def reset(self, task, seed):
        return ()

    def step(self, action):
        return Step((), counts={"pid": float(self.program.pid)})


@pytest.mark.parametrize("is_killed", [False, True])
def test_programs_of_episodes_end_with_their_process(is_killed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # another interpreter has its own import path
    workers = EnvironmentWorkers(Starter(), num_workers=1, step_timeout_s=20.0)
    try:
        workers.reset({"e": ({}, 1)})
        step: Any = workers.step({"e": Turn("")})["e"]
        pid = int(step.counts["pid"])
        assert is_running(pid)
        if is_killed:
            subprocess.run(["kill", f"-{int(signal.SIGKILL)}", str(workers.pids[0])], check=True)
            workers.step({"e": Turn("")})
            assert ends(pid), "it went when its process was replaced"
    finally:
        workers.close()
    assert ends(pid)


def ends(pid, within_s=20.0):
    """True when the killed process is gone."""
    until = time.monotonic() + within_s
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not is_running(pid)


def is_running(pid):
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(listed.stdout.strip()) and not listed.stdout.startswith("Z")
