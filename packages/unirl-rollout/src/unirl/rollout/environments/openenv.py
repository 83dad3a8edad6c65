"""Episodes of an OpenEnv server, over its WebSocket: one connection per episode.

The protocol of openenv-core 0.3, without its client: {"type": "reset" | "step" | "close", "data": {...}} is answered by
{"type": "observation", "data": {"observation", "reward", "done"}} or {"type": "error", "data": {"message", "code"}}.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from unirl.rollout.environments.base import Step, Task
from unirl.rollout.environments.text import TextEnvironment
from unirl.rollout.turns.calls import Turn
from unirl.types.bounds import Positive, bounded
from unirl.types.errors import ConfigError
from unirl.types.messages import Message


@bounded("turns.environment")
class OpenEnv(TextEnvironment):
    """Lets the text of a turn be an action of an OpenEnv environment, and a text of its observation the answer.

    url: of the server, "http://host:8000" or "ws://...". action: name of the action's field that gets the text; a turn
        that is JSON of an object may be the whole action with `parses_actions`.
    observation: name of the observation's field that is told to the model; None tells the whole observation as JSON.
    begins_with_observation: whether what `reset` observes replaces the row's prompt. task_keys: keys of the row's
        metadata that `reset` gets. timeout_s: of connecting and of one answer.
    A reward of None counts as 0, and in `unrewarded_steps`.
    """

    def __init__(
        self,
        url: str,
        *,
        action: str = "message",
        observation: str | None = None,
        parses_actions: bool = False,
        begins_with_observation: bool = False,
        task_keys: Sequence[str] = (),
        timeout_s: Positive = 30.0,
    ) -> None:
        scheme, mark, rest = url.partition("://")
        if not mark or scheme not in ("http", "https", "ws", "wss"):
            raise ConfigError(f"turns.environment.url = {url!r} must begin with http://, https://, ws:// or wss://")
        self._url = f"{scheme.replace('http', 'ws')}://{rest.rstrip('/').removesuffix('/ws')}/ws"
        self._action = action
        self._observation = observation
        self._parses_actions = parses_actions
        self._begins_with_observation = begins_with_observation
        self._task_keys = tuple(task_keys)
        self._timeout_s = timeout_s
        self._connection: Any = None  # Any: websockets' connection, imported where an episode begins

    def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Connect and begin. Raises ConnectionError if the server refuses or cannot be reached."""
        try:
            connect = importlib.import_module("websockets.sync.client").connect
        except ImportError as error:
            raise ImportError("OpenEnv servers need websockets: pip install 'unirl-rollout[openenv]'") from error
        try:
            self._connection = connect(self._url, open_timeout=self._timeout_s, max_size=2**26)
        except OSError as error:
            raise ConnectionError(f"no OpenEnv server answers at {self._url}: {error}") from error
        given = {key: task[key] for key in self._task_keys if key in task}
        data = self._asked("reset", {**given, "seed": seed % 2**31})
        return (Message("user", self._told(data)),) if self._begins_with_observation else ()

    def step(self, action: Turn) -> Step[Sequence[Message]]:
        """Send the text of a turn. Raises RuntimeError with what the server says of an error."""
        if (payload := self._payload(action.text)) is None:
            return Step((Message("user", "error: write one JSON object"),), counts={"malformed_calls": 1.0})
        data = self._asked("step", payload)
        reward, done = data.get("reward"), bool(data.get("done"))
        return Step(
            () if done else (Message("user", self._told(data)),),
            reward=0.0 if reward is None else float(reward),
            terminated=done,
            counts={"unrewarded_steps": float(reward is None)},
        )

    def close(self) -> None:
        """End the session."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _payload(self, text: str) -> dict[str, Any] | None:  # Any: JSON
        if not self._parses_actions:
            return {self._action: text}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def _asked(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
        self._connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._connection.recv(timeout=self._timeout_s))
        if answer["type"] == "error":
            error = answer["data"]
            raise RuntimeError(f"the OpenEnv server says {error.get('code')}: {error.get('message')}")
        return answer["data"]

    def _told(self, data: Mapping[str, Any]) -> str:  # Any: JSON
        seen = data.get("observation") or {}
        if self._observation is None:
            return json.dumps(seen, ensure_ascii=False)
        if self._observation not in seen:
            raise KeyError(
                f"the observation has {sorted(seen)}, not {self._observation!r} (turns.environment.observation)"
            )
        return str(seen[self._observation])
