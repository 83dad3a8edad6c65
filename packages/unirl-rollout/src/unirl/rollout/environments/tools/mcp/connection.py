"""A session with a server of the Model Context Protocol, begun again where it ends.

The library's client is asynchronous and runs in a thread of this process; who calls waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client, types
from mcp.client.streamable_http import streamable_http_client

from unirl.rollout.environments.programs import MARK
from unirl.rollout.environments.tools.mcp.address import Address

logger = logging.getLogger(__name__)
# It writes a stack per line that is no message; `_Session` says it once.
logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)

ResultT = TypeVar("ResultT")
START_TIMEOUT_S = 60.0
"""Longest time in which a server starts and says what it is."""
_CHECK_TIMEOUT_S = 2.0
"""Longest time in which a server that owed an answer says that it lives."""
_CLOSE_TIMEOUT_S = 10.0
_LAST_WORDS_S = 1.0
_MAX_PAGES = 100


class NoServerError(RuntimeError):
    """A server does not start or cannot be reached."""


class ServerLostError(RuntimeError):
    """A server ended while it owed an answer."""


CANNOT_BE_ASKED = (TimeoutError, MCPError, NoServerError, ServerLostError, ValueError)
"""What `Connection.tools` raises."""


class Connection:
    """Asks a server. A session that ends or hangs is replaced by another one when something is asked, and what it owed
    is asked once more.

    mark: of the programs that it starts (`unirl.rollout.environments.programs`).
    """

    def __init__(self, address: Address, mark: str | None) -> None:
        self._address, self._mark = address, mark
        self._session: _Session | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="unirl-mcp", daemon=True).start()

    def tools(self) -> list[types.Tool]:
        """What the server has now. Raises one of CANNOT_BE_ASKED."""
        return self._ask(_listed, START_TIMEOUT_S)

    def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> types.CallToolResult:  # Any: JSON
        """What a tool answers. timeout_s: of all that it takes, the start of another session included.

        Raises TimeoutError, MCPError for what the server refuses, ServerLostError if it ends twice, NoServerError if it
        cannot be started again, and ValueError or RuntimeError for an answer that breaks the protocol.
        """
        return self._ask(lambda client: client.call_tool(name, arguments), timeout_s)

    def close(self) -> None:
        """End the session and its server. Safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            self._run(session.ended())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:  # Any: as asyncio has it
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _ask(self, question: Callable[[Client], Awaitable[ResultT]], timeout_s: float) -> ResultT:
        return self._run(self._asked(question, timeout_s))

    async def _asked(self, question: Callable[[Client], Awaitable[ResultT]], timeout_s: float) -> ResultT:
        async with asyncio.timeout(timeout_s):
            try:
                return await (await self._living()).answer(question)
            except ServerLostError as error:
                logger.warning("%s; it is asked again", error)
                return await (await self._living()).answer(question)

    async def _living(self) -> _Session:
        """The session, or another one if it has ended or does not answer."""
        if self._session is None or not await self._session.lives():
            self._session = _Session(self._address, self._mark)
        return self._session


class _Session:
    """One connection of the client, with the process of the server where it has a command."""

    def __init__(self, address: Address, mark: str | None) -> None:
        self._address, self._mark = address, mark
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._check: asyncio.Task[None] | None = None
        self._has_warned = False
        self._said: deque[str] = deque(maxlen=1)
        self._reading: threading.Thread | None = None
        self._serving = asyncio.create_task(self._serve())
        # What it raises is told to those who ask.
        self._serving.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def lives(self) -> bool:
        """True if it has not ended, once a server that did not answer before was asked whether it does now."""
        if self._check is not None:
            await asyncio.shield(self._check)
        return not (self._stop.is_set() or self._serving.done())

    async def answer(self, question: Callable[[Client], Awaitable[ResultT]]) -> ResultT:
        """Raises what `Connection.call` says."""
        work = asyncio.ensure_future(self._answer(question))
        try:
            await asyncio.wait({work, self._serving}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
        except MCPError as error:
            if error.code != types.CONNECTION_CLOSED:
                self._doubt()
                raise
            self._stop.set()
        except asyncio.CancelledError:
            self._doubt()
            raise
        finally:
            work.cancel()
        if self._ready.done():
            raise ServerLostError(f"{self._address} ended while it owed an answer")
        if self._reading is not None:
            await asyncio.to_thread(self._reading.join, _LAST_WORDS_S)
        does_not = "cannot be reached" if self._address.url else "does not start"
        raise NoServerError(f"{self._address} {does_not}: {self._reason()}")

    def _doubt(self) -> None:
        """Ask whether the server still answers, in its own time: who calls next may have less."""
        if self._ready.done() and (self._check is None or self._check.done()):
            self._check = asyncio.create_task(self._end_if_silent())

    async def _end_if_silent(self) -> None:
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                await self._answer(_listed)
        except (TimeoutError, MCPError, ValueError):
            logger.warning("%s does not answer; it is ended", self._address)
            self._stop.set()

    async def ended(self) -> None:
        """End it, and the server that it started."""
        self._stop.set()
        await asyncio.wait({self._serving}, timeout=_CLOSE_TIMEOUT_S)

    async def _answer(self, question: Callable[[Client], Awaitable[ResultT]]) -> ResultT:
        return await question(await asyncio.shield(self._ready))

    async def _serve(self) -> None:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(START_TIMEOUT_S):
                transport = await self._transport(stack)
                client = Client(transport, message_handler=self._heard, cache=None)
                await stack.enter_async_context(client)
            self._ready.set_result(client)
            await self._stop.wait()

    async def _transport(self, stack: AsyncExitStack) -> Any:  # Any: a context manager of the library
        if self._address.url:
            # Calls have their own limits.
            http = httpx2.AsyncClient(headers=dict(self._address.headers), timeout=httpx2.Timeout(30.0, read=None))
            return streamable_http_client(self._address.url, http_client=await stack.enter_async_context(http))
        program, *arguments = self._address.command
        env = dict(self._address.env) | ({} if self._mark is None else {MARK: self._mark})
        reading, writing = os.pipe()
        self._reading = threading.Thread(target=_keep_last, args=(reading, self._said), daemon=True)
        self._reading.start()
        errors = stack.enter_context(os.fdopen(writing, "w"))
        program = sys.executable if program == "python" else program
        return stdio_client(StdioServerParameters(command=program, args=arguments, env=env), errlog=errors)

    async def _heard(self, message: object) -> None:
        """Notifications, and what is no message."""
        if isinstance(message, types.ToolListChangedNotification):
            logger.warning("%s has other tools now; prompts name those of the beginning", self._address)
        elif isinstance(message, Exception) and not self._has_warned:
            self._has_warned = True
            logger.warning("%s writes what is no message of the protocol: %s", self._address, _first_line(message))

    def _reason(self) -> str:
        """Why the session ended before it began."""
        error = self._serving.exception()
        if isinstance(error, TimeoutError):
            return f"it says nothing for {START_TIMEOUT_S:.0f} s"
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        said = f"; it last wrote: {self._said[-1]}" if self._said else ""
        return f"{type(error).__name__}: {_first_line(error)}{said}"


async def _listed(client: Client) -> list[types.Tool]:
    found: list[types.Tool] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise ValueError(f"its list of tools has more than {_MAX_PAGES} pages")


def _keep_last(reading: int, lines: deque[str]) -> None:
    """Read what a server writes to its standard error, of which the last line that says something is kept."""
    with os.fdopen(reading, errors="replace") as errors:
        for line in errors:
            if any(char.isalnum() for char in line):
                lines.append(line.strip())


def _first_line(error: object) -> str:
    return (str(error).splitlines() or [""])[0]
