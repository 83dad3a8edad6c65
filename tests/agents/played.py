"""Plays episodes with the real libraries, in the environment of environments/agents; prints JSON."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time

import skyrl_gym
import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from unirl.rollout.environments.openenv import OpenEnv
from unirl.rollout.environments.skyrl_gym import SkyRLGym
from unirl.rollout.environments.verifiers.environment import Verifiers
from unirl.rollout.environments.workers import EnvironmentWorkers
from unirl.rollout.turns.calls import MalformedCall, ToolCall, Turn
from unirl.types.errors import ConfigError


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Counter(Environment[Say, Heard, State]):
    """Counts characters up to ten, from the seed on."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **given):
        self.total = seed or 0
        return Heard(text=f"{given.get('category', '')} from {self.total}", done=False, reward=None)

    def step(self, action, timeout_s=None, **given):
        if action.message == "break":
            raise ValueError("the counter broke")
        self.total += len(action.message)
        done = self.total >= 10
        return Heard(text=str(self.total), done=done, reward=1.0 if done else None)

    @property
    def state(self):
        return self._state


class Sum(BaseTextEnv):
    """Asks again until the answer is right; shouts down a whisper."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.answer, self.max_turns = extras["reward_spec"]["ground_truth"], extras["max_turns"]

    def step(self, action):
        self.turns += 1
        is_right = action == self.answer
        again = [] if is_right else [{"role": "user", "content": "again"}]
        rewritten = {"postprocessed_action": action.upper()} if action == "whisper" else {}
        done = is_right or self.turns >= self.max_turns
        return BaseTextEnvStepOutput(observations=again, reward=float(is_right), done=done, metadata={}, **rewritten)


skyrl_gym.register(id="sum", entry_point=Sum)


def serve():
    app = create_app(Counter, Say, Heard, env_name="counter", max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    return server.servers[0].sockets[0].getsockname()[1]


def said(messages):
    return [{"role": each.role, "content": each.content} for each in messages]


def plain(value):
    if not dataclasses.is_dataclass(value):
        return said(value)
    whole = dataclasses.asdict(value)
    return {**whole, "observation": said(value.observation)} if "observation" in whole else whole


def play(environment, task, *texts):
    """What each step of an episode answers."""
    workers = EnvironmentWorkers(environment, num_workers=1, step_timeout_s=60.0)
    try:
        return episode(workers, task, *map(Turn, texts))
    finally:
        workers.close()


def episode(workers, task, *turns):
    answers = [plain(workers.reset({"e": (task, 3)})["e"])]
    answers += [plain(workers.step({"e": turn})["e"]) for turn in turns]
    workers.end(["e"])
    return answers


def verifiers():
    environment = Verifiers("adding", max_turns=3, thoughts_end="</think>", timeout_s=20.0)
    introduced = dataclasses.asdict(environment.introduce())
    call = Turn("<call>", (ToolCall("add", {"expression": "1+2"}),), "I count.")
    workers = EnvironmentWorkers(environment, num_workers=1, step_timeout_s=60.0)
    try:
        found = {
            "right": episode(workers, {"task": 1}, call, Turn("so</think>134030")),
            "malformed": episode(workers, {"task": 1}, Turn("<call", (MalformedCall("no JSON"),))),
            "unknown": episode(workers, {"task": 1}, Turn("", (ToolCall("search", {}),)), Turn("5")),
            "cut": episode(workers, {"task": 0}, call, call, call),
            "stopped": episode(workers, {"task": 9}, call),
            "given up": episode(workers, {"task": 0}, call),
            "side by side": side_by_side(workers),
            "broken": episode(workers, {"task": 8}, Turn("1")),
            "system": episode(workers, {"task": 10}),
            "messages": episode(workers, {"task": 11}),
            "nameless": episode(workers, {"prompt": "p"}),
            "absent": episode(workers, {"task": 99}),
        }
        before = programs()
    finally:
        workers.close()
    return {"introduced": introduced, **found, "programs": [before, programs()]}


def side_by_side(workers):
    """Two episodes in one process, whose turns come one after the other."""
    begun = workers.reset({"a": ({"task": 0}, 3), "b": ({"task": 1}, 3)})
    ended = workers.step({"a": Turn("13597"), "b": Turn("13597")})
    workers.end(["a", "b"])
    return [begun["a"][0].content, begun["b"][0].content, ended["a"].reward, ended["b"].reward]


def odd():
    workers = EnvironmentWorkers(Verifiers("adding_oddly", timeout_s=10.0), num_workers=1, step_timeout_s=60.0)
    told = {"stream": ("streamed", "b"), "nothing": ("a", "b"), "twice": ("a", "b")}
    try:
        names = ("nothing", "stream", "sampling", "shorten", "image", "twice", "hang")
        return {
            name: episode(workers, {"task": task}, *map(Turn, told.get(name, ("a",))))
            for task, name in enumerate(names)
        } | {"refused": refused()}
    finally:
        workers.close()


def refused():
    try:
        Verifiers("no_such_set").introduce()
    except ConfigError as error:
        return str(error)


def programs():
    """How many tool servers run."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return sum("-m adding_tools" in line for line in listed.splitlines())


def openenv():
    url = f"http://127.0.0.1:{serve()}"
    options = {"observation": "text", "begins_with_observation": True, "task_keys": ["category"]}
    task = {"prompt": "count", "category": "up"}
    return {
        "texts": play(OpenEnv(url, **options), task, "abc", "abcd"),
        "objects": play(OpenEnv(url, parses_actions=True), task, '{"message": "ab"}', "no object"),
        "broken": play(OpenEnv(url, **options), task, "break"),
        "unreachable": play(OpenEnv("http://127.0.0.1:9", timeout_s=2), task),
        "unknown": play(OpenEnv(url, observation="picture"), task, "a"),
    }


def skyrl():
    own = {"module": "played", "max_turns": 2}
    task = {"prompt": "2+3", "answer": "5"}
    published = SkyRLGym("gsm8k_multi_turn", max_turns=3)
    return {
        "right": play(SkyRLGym("sum", **own), task, "4", "5"),
        "cut": play(SkyRLGym("sum", **own), task, "4", "4"),
        "rewritten": play(SkyRLGym("sum", **own), task, "whisper"),
        "published": play(published, {"prompt": "2+3", "answer": "5"}, "#### 4"),
    }


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))
    print(json.dumps({"openenv": openenv, "skyrl": skyrl, "verifiers": verifiers, "odd": odd}[sys.argv[1]]()))
