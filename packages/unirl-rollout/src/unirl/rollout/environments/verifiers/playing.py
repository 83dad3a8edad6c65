"""Episodes of a task set, in the process that plays them: verifiers' agent in a thread, turns from here."""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import json
import queue
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from unirl.rollout.environments.base import Step
from unirl.rollout.environments.verifiers.endpoint import Endpoint
from unirl.rollout.environments.verifiers.exchange import Asked, NotCarriedError, Talk
from unirl.rollout.turns.calls import Turn
from unirl.types.messages import Message

_START_TIMEOUT_S = 100.0
_MODEL = "policy"
"""What harnesses and traces call the model."""


@dataclass(frozen=True)
class Options:
    """What makes a task set and its agent, in plain values."""

    taskset: str
    taskset_options: Mapping[str, Any] = field(default_factory=dict)  # Any: of the task set
    harness: Mapping[str, Any] | None = None  # Any: of the harness
    runtime: Mapping[str, Any] = field(default_factory=lambda: {"type": "subprocess"})  # Any: of the runtime
    max_turns: int | None = None
    thoughts_end: str | None = None

    @property
    def text(self) -> str:
        """The same as JSON."""
        return json.dumps(asdict(self), sort_keys=True)


class Play:
    """One episode: the agent asks in other threads, and waits for a turn of the model."""

    def __init__(self, endpoint: Endpoint, thoughts_end: str | None) -> None:
        self._endpoint = endpoint
        self._thoughts_end = thoughts_end
        self._talk = Talk()
        self._events: queue.SimpleQueue[Asked | NotCarriedError | Future[Any]] = queue.SimpleQueue()  # Any: a trace
        self._turns: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        self._asking = threading.Lock()
        self._session: str | None = None
        self._future: Future[Any] | None = None  # Any: a trace

    def opened(self, trace: Any) -> None:  # Any: a trace of the library
        """The agent has made its trace, whose id comes with every request."""
        self._session = trace.id
        self._endpoint.open(trace.id, self._ask)

    def started(self, future: Future[Any]) -> None:  # Any: a trace
        """The agent runs."""
        self._future = future
        future.add_done_callback(self._events.put)

    def act(self, turn: Turn) -> None:
        """Answer the request that waits."""
        self._turns.put(turn)

    def next(self, timeout_s: float) -> Asked | Step[tuple[Message, ...]]:
        """What the agent asks next, or how the episode has ended.

        Raises TimeoutError, RuntimeError for what is not carried or what the library calls an error.
        """
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(
                f"neither the harness nor the scoring came to an end within {timeout_s:g} s "
                "(turns.environment.timeout_s)"
            ) from None
        if isinstance(event, Asked):
            return event
        if isinstance(event, NotCarriedError):
            raise RuntimeError(f"verifiers: {event}")  # noqa: TRY004 - an event, not an argument
        return outcome(event.result())

    def close(self) -> None:
        """Cancel what still runs. Safe to call twice."""
        if self._session is not None:
            self._endpoint.close(self._session)
        self._turns.put(None)
        if self._future is not None:
            self._future.cancel()

    def _ask(self, body: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
        if not self._asking.acquire(blocking=False):
            raise self._refused(NotCarriedError("the harness asks twice at once; an episode is one conversation"))
        try:
            try:
                self._events.put(self._talk.hear(body))
            except NotCarriedError as error:
                raise self._refused(error) from None
            turn = self._turns.get()
            if turn is None:
                raise NotCarriedError("the episode is over")
            return self._talk.answer(turn, self._thoughts_end)
        finally:
            self._asking.release()

    def _refused(self, error: NotCarriedError) -> NotCarriedError:
        self._events.put(error)
        return error


class Player:
    """The task set and the agent of this process."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._vf: Any = importlib.import_module("verifiers.v1")  # Any: in another Python environment
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._endpoint = Endpoint()
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        self._refuse_others(loaders)
        config = loaders.taskset_config_type(options.taskset).model_validate(
            {**options.taskset_options, "id": options.taskset}
        )
        self._taskset = loaders.load_taskset(config)
        self._coming: Iterator[Any] = iter(self._taskset)
        self._tasks: list[Any] = []
        self._agent = self._agent_of(loaders)
        self._shared: Any = {}
        self._open_until_the_end = AsyncExitStack()
        self._done(self._open())

    def begin(self, task: int) -> Play:
        """Let the agent play a task, by its place in the set. Raises IndexError if there is none."""
        self._tasks += itertools.islice(self._coming, max(0, task + 1 - len(self._tasks)))
        if not 0 <= task < len(self._tasks):
            raise IndexError(f"the task set {self._options.taskset} has {len(self._tasks)} tasks, none at {task}")
        play = Play(self._endpoint, self._options.thoughts_end)
        run = self._agent.run(self._tasks[task], tools=self._shared, on_trace=play.opened)
        play.started(asyncio.run_coroutine_threadsafe(run, self._loop))
        return play

    def tasks(self, limit: int | None) -> Iterator[Any]:  # Any: tasks of the library
        """The first tasks of the set, in order."""
        return itertools.islice(iter(self._taskset), limit)

    def _refuse_others(self, loaders: Any) -> None:  # Any: a module of the library
        name = self._options.taskset
        kind = loaders.environment_class(name)
        if kind.__name__ != "SingleAgentEnv":
            raise ValueError(
                f"the task set {name} is played by several agents ({kind.__name__}); one policy plays here. Choose a "
                "task set without an Env class"
            )

    def _agent_of(self, loaders: Any) -> Any:  # Any: of the library
        own, options = loaders.default_harness_id(self._options.taskset), self._options
        given = options.harness or ({"id": own} if own == options.taskset else None)
        config = self._vf.AgentConfig.model_validate(
            {
                "model": _MODEL,
                "runtime": dict(options.runtime),
                "harness": dict(given or {"id": "null"}),
                "client": {"type": "eval", "base_url": self._endpoint.url, "api_key_var": "UNIRL_NO_KEY"},
                "max_turns": options.max_turns,
            }
        )
        agent = self._vf.Agent(config)
        if given is None:
            # The null harness is a program with its own dependencies, which are downloaded; the same loop runs here.
            chat = importlib.import_module("unirl.rollout.environments.verifiers.chat")
            agent.harness = chat.chat_harness()(config.harness)
        return agent

    async def _open(self) -> None:
        serve = importlib.import_module("verifiers.v1.mcp").serve_shared
        servers = type(self._taskset).toolsets(self._taskset.config)
        await self._open_until_the_end.enter_async_context(self._agent)
        self._shared = await self._open_until_the_end.enter_async_context(serve(servers))

    def _done(self, work: Coroutine[Any, Any, None]) -> None:  # Any: as asyncio has it
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_TIMEOUT_S)


@functools.cache
def player(options: str) -> Player:
    """The player of this process for these options, as JSON."""
    return Player(Options(**json.loads(options)))


def outcome(trace: Any) -> Step[tuple[Message, ...]]:  # Any: a trace of the library
    """The last step of an episode: its reward is the weighted sum of all that the task set and its judges gave.

    Raises RuntimeError if the trace has an error.
    """
    if not trace.ok:
        error = trace.errors[-1] if trace.errors else None
        said = "the run did not complete" if error is None else f"{error.type}: {error.message}"
        raise RuntimeError(f"verifiers: {said}")
    is_cut = bool(trace.is_truncated or trace.is_timeout)
    counts = {f"task_{name}": float(value) for name, value in trace.metrics.items()}
    counts |= {f"task_{name}": float(reward.score) for name, reward in trace.rewards.items()}
    return Step((), float(trace.reward), terminated=not is_cut, truncated=is_cut, counts=counts)
