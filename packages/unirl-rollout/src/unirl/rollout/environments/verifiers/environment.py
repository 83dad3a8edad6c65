"""A task set of verifiers (0.4) as an environment of turns."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from unirl.rollout.environments.base import Step, Task
from unirl.rollout.environments.programs import end_programs, marking, new_mark
from unirl.rollout.environments.text import Introduction, TextEnvironment
from unirl.rollout.environments.verifiers.exchange import Asked
from unirl.rollout.environments.verifiers.playing import Options, Play, player
from unirl.rollout.turns.calls import MalformedCall, Turn
from unirl.types.bounds import Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.messages import Message

MODULE = "unirl.rollout.environments.verifiers"


@bounded("turns.environment")
class Verifiers(TextEnvironment):
    """Plays a task set: the library's agent runs in the processes of the environment and asks an OpenAI-shaped endpoint
    there, whose answers are turns of the model. What the model wrote is never tokenised again.

    taskset: id of an installed task set, or a module that exports one. taskset_options: its config.
    python: interpreter of a Python environment with verifiers, unirl-rollout and the task set; None: the running one.
    harness: config of the harness, with its `id`; None: that of the task set if it has one, else a chat with the task's
        tools (the loop of the library's `null` harness) in the same process. runtime: config of what programs of a
        harness run in, with its `type`.
    task_key: key of the row's metadata with the task's place in the set; the task's prompt replaces the row's.
    max_turns: after which the library ends an episode, and scores it; turns.max_turns ends it without a score.
    thoughts_end: what ends thoughts in a turn, such as "</think>"; what stands before it is no part of the content
        that harness and task set see. timeout_s: of one turn's answer, and of the start and the scoring of an episode.

    A request that is no next turn (a shortened conversation, other sampling, images), and an error of the library,
    fail the episode. A turn with a malformed call is a text without calls, and counts in `malformed_calls`.
    Raises ConfigError from `introduce` if the task set cannot be loaded, or its first task not begun.
    """

    recipe_rules: ClassVar[str] = "unirl.rollout.environments.verifiers.rules"
    starts_programs = True

    def __init__(
        self,
        taskset: str,
        *,
        taskset_options: Mapping[str, Any] | None = None,  # Any: of the task set
        python: str | None = None,
        harness: Mapping[str, Any] | None = None,  # Any: of the harness
        runtime: Mapping[str, Any] | None = None,  # Any: of the runtime
        task_key: str = "task",
        max_turns: PositiveInt | None = None,
        thoughts_end: str | None = None,
        timeout_s: Positive = 25.0,
    ) -> None:
        self.python = None if python is None else str(Path(python).expanduser().absolute())
        if self.python is not None and not Path(self.python).is_file():
            raise ConfigError(
                f"turns.environment.python = {python} is no file. Name an interpreter that has verifiers."
            )
        made = {} if runtime is None else {"runtime": dict(runtime)}
        harness = None if harness is None else dict(harness)
        self._options = Options(
            taskset, dict(taskset_options or {}), harness, max_turns=max_turns, thoughts_end=thoughts_end, **made
        )
        self._task_key = task_key
        self._timeout_s = timeout_s
        self._tools: list[Any] = []  # Any: JSON
        self._system_prompt: str | None = None
        self._play: Play | None = None

    def introduce(self) -> Introduction:
        """Begin the first task in a process, to see which tools and which message of the system it brings."""
        mark = new_mark()
        command = [*marking(mark), self.python or sys.executable, "-m", f"{MODULE}.first", self._options.text]
        # The time to import the library, besides that of an episode's start.
        timeout_s = 120.0 + self._timeout_s
        try:
            asked = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"turns.environment: the task set {self._options.taskset} was not begun within {timeout_s:g} s."
            ) from error
        finally:
            end_programs(mark)
        if asked.returncode:
            last = asked.stderr.strip().splitlines()[-1:] or [f"it ended with status {asked.returncode}"]
            raise ConfigError(
                f"turns.environment: the task set {self._options.taskset} cannot be begun in "
                f"{self.python or 'this environment'}: {last[0]}"
            )
        found = json.loads(asked.stdout.splitlines()[-1])
        self._tools, self._system_prompt = found["tools"], found["system_prompt"]
        return Introduction(self._tools, self._system_prompt)

    def prepare(self) -> None:
        """Import the library, load the task set and start its servers."""
        player(self._options.text)

    def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Let the agent begin the task, whose prompt replaces the row's."""
        if self._task_key not in task:
            raise KeyError(
                f"the row has {sorted(task)}, not {self._task_key!r}, which names the task (turns.environment.task_key)"
            )
        self._play = player(self._options.text).begin(int(task[self._task_key]))
        asked = self._play.next(self._timeout_s)
        if not isinstance(asked, Asked):
            raise RuntimeError("verifiers: the harness ended without asking the model")  # noqa: TRY004 - not a type
        if list(asked.tools) != self._tools or asked.system_prompt != self._system_prompt:
            raise RuntimeError(
                "verifiers: the task has other tools, or another message of the system, than the first of its set; "
                "prompts tell the model those of the first"
            )
        return asked.messages

    def step(self, action: Turn) -> Step[Sequence[Message]]:
        """Answer the agent's request with a turn."""
        play = self._play
        if play is None:
            raise RuntimeError("reset comes first")
        malformed = float(sum(isinstance(call, MalformedCall) for call in action.calls))
        play.act(action)
        found = play.next(self._timeout_s)
        made = {"calls": float(len(action.calls)), "malformed_calls": malformed}
        if isinstance(found, Asked):
            return Step(found.messages, counts=made)
        return Step(
            (),
            found.reward,
            terminated=found.terminated,
            truncated=found.truncated,
            counts={**found.counts, **made},
        )

    def close(self) -> None:
        """Cancel the agent's run if it has not ended."""
        if self._play is not None:
            self._play.close()
