"""Which connections are open: who waits too long for its own request, or takes the place of others, is closed.

aiohttp limits neither the number of connections nor the time of unfinished headers, and asyncio logs a traceback for
every connection that it has no descriptor for. Here a limit is kept before a connection is accepted: the one that has
rested longest makes room. So a new connection is always heard, and one that sends its request at once is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import resource
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator

from unirl.reward_server.metrics import Metrics
from unirl.reward_server.settings import ServerSettings
from unirl.types.errors import ConfigError

logger = logging.getLogger(__name__)

NUM_RESERVED = 16
"""Connections beyond the limit, for all requests but POST /score: a busy server still says how it is."""
_BACKLOG = 2048
_OTHER_DESCRIPTORS = 48
"""File descriptors of this process without connections and replicas: 12 to 20, and files that are read."""
_DESCRIPTORS_PER_REPLICA = 4
_MIN_CONNECTIONS = 16
_PAUSE_S = 0.05
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def connection_limit(settings: ServerSettings, num_replicas: int) -> int:
    """`max_connections`, or fewer where this process may not open as many files.

    Raises ConfigError if there is hardly room for any.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return settings.max_connections
    kept = _OTHER_DESCRIPTORS + _DESCRIPTORS_PER_REPLICA * num_replicas + NUM_RESERVED
    if soft - kept < _MIN_CONNECTIONS:
        raise ConfigError(
            f"this process may open {soft} files (ulimit -n) and needs {kept} of them besides its connections. "
            "Raise the limit to 1024 or more."
        )
    return min(settings.max_connections, soft - kept)


class Connections:
    """The open connections of one server.

    max_total, max_per_address: those besides NUM_RESERVED. header_timeout_s: time for the headers of a request, from
    the connection's start or from the first byte after the last request.
    """

    def __init__(self, max_total: int, max_per_address: int, header_timeout_s: float, metrics: Metrics) -> None:
        self.max_total = max_total
        self.max_per_address = min(max_per_address, max_total)
        self.header_timeout_s = header_timeout_s
        self._metrics = metrics
        self._open: dict[asyncio.BaseTransport, _Connection] = {}
        # Connections without a request in work, longest at rest first. Those that have shown the token go last.
        self._strangers: dict[_Connection, None] = {}
        self._known: dict[_Connection, None] = {}
        self._num_of: Counter[str] = Counter()
        self._num_ordinary = 0
        self._num_reserved = 0

    @property
    def num_open(self) -> int:
        """All of them."""
        return self._num_ordinary + self._num_reserved

    @contextlib.asynccontextmanager
    async def listening(
        self, host: str, port: int, make_protocol: Callable[[], asyncio.Protocol]
    ) -> AsyncGenerator[list[asyncio.Task[None]]]:
        """Accept connections on every address of the host, in tasks that end only by an error.

        Raises ConfigError if an address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as opened:
            try:
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
                listeners = [
                    opened.enter_context(socket.create_server(address[:2], family=family, backlog=_BACKLOG))
                    for family, _, _, _, address in dict.fromkeys(found)
                ]
            except OSError as error:
                raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
            for listener in listeners:
                listener.setblocking(False)
            tasks = [loop.create_task(self._accept_all(listener, make_protocol)) for listener in listeners]
            try:
                yield tasks
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    @contextlib.contextmanager
    def serving(self, transport: asyncio.BaseTransport | None) -> Generator[None]:
        """A request of this connection is in work; until its end the connection is not closed for others."""
        connection = None if transport is None else self._open.get(transport)
        if connection is None:  # accepted elsewhere, such as by aiohttp's test server
            yield
            return
        connection.begin()
        try:
            yield
        finally:
            connection.end()

    def trust(self, transport: asyncio.BaseTransport | None) -> None:
        """The connection has shown the token: strangers are closed before it."""
        if transport is not None and transport in self._open:
            self._open[transport].is_known = True

    def is_reserved(self, transport: asyncio.BaseTransport | None) -> bool:
        """True if it was accepted beyond the limit and so may not score."""
        return transport is not None and transport in self._open and self._open[transport].is_reserved

    async def _accept_all(self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("a connection cannot be accepted: %s", error.strerror)
                if error.errno in _FULL:
                    self._close_oldest(None)
                await asyncio.sleep(_PAUSE_S)
                continue
            group = _group(address[0])
            connection = _Connection(self, group, await self._is_beyond(group), make_protocol())
            self._count(connection, 1)
            try:
                await loop.connect_accepted_socket(lambda connection=connection: connection, accepted)
            except OSError:  # the other side has gone
                accepted.close()
                self.left(connection)

    async def _is_beyond(self, group: str) -> bool:
        """Make room for one more of this address. True: all are in work, and it takes a reserved place."""
        if self._num_of[group] >= self.max_per_address:
            if self._close_oldest(group):
                return False
        elif self._num_ordinary < self.max_total or self._close_oldest(None):
            return False
        while self._num_reserved >= NUM_RESERVED and not self._close_oldest(None, is_reserved=True):
            await asyncio.sleep(_PAUSE_S)
        return True

    def _close_oldest(self, group: str | None, *, is_reserved: bool = False) -> bool:
        """Close the connection that has rested longest, of an address or of all. False where each has a request."""
        for resting in (self._strangers, self._known):
            for connection in resting:
                if connection.is_reserved == is_reserved and group in (None, connection.group):
                    logger.warning(
                        "%d connections are open, %d of %s; one without a request in work was closed for another",
                        self.num_open,
                        self._num_of[connection.group],
                        connection.group,
                    )
                    self._metrics.closed_connections.labels("limit").inc()
                    self.left(connection)
                    connection.abort()
                    return True
        return False

    def entered(self, connection: _Connection, transport: asyncio.BaseTransport) -> None:
        """The transport exists."""
        self._open[transport] = connection
        self.rests(connection)

    def left(self, connection: _Connection) -> None:
        """It is closed, or about to be."""
        if not connection.has_left:
            connection.has_left = True
            self._count(connection, -1)
            self.works(connection)
            if connection.transport is not None:
                self._open.pop(connection.transport, None)

    def rests(self, connection: _Connection) -> None:
        """No request of it is in work."""
        if not connection.has_left:
            (self._known if connection.is_known else self._strangers)[connection] = None

    def works(self, connection: _Connection) -> None:
        """A request of it is in work."""
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)

    def is_late(self, connection: _Connection) -> None:
        """Its headers did not arrive in time."""
        logger.info("%s did not send the headers of a request within %g s", connection.group, self.header_timeout_s)
        self._metrics.closed_connections.labels("header_timeout").inc()
        self.left(connection)

    def _count(self, connection: _Connection, change: int) -> None:
        if connection.is_reserved:
            self._num_reserved += change
        else:
            self._num_ordinary += change
            self._num_of[connection.group] += change
            if not self._num_of[connection.group]:
                del self._num_of[connection.group]


class _Connection(asyncio.Protocol):
    """Stands between a transport and aiohttp's protocol, and watches the time until a request is whole."""

    def __init__(self, owner: Connections, group: str, is_reserved: bool, inner: asyncio.Protocol) -> None:
        self.group = group
        self.is_reserved = is_reserved
        self.is_known = False
        self.has_left = False
        self.transport: asyncio.Transport | None = None
        self._owner = owner
        self._inner = inner
        self._num_in_work = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"a stream was expected, not {transport!r}")
        self.transport = transport
        self._inner.connection_made(transport)
        self._owner.entered(self, transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._owner.left(self)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._num_in_work and self._deadline is None:
            self._expect_headers()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def begin(self) -> None:
        """Its request is whole but for the body."""
        self._num_in_work += 1
        self._stop_waiting()
        self._owner.works(self)

    def end(self) -> None:
        """Its request is answered."""
        self._num_in_work -= 1
        if not self._num_in_work:
            self._owner.rests(self)

    def abort(self) -> None:
        """Close it without regard to what was not sent yet."""
        if self.transport is not None:
            self.transport.abort()

    def _expect_headers(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(self._owner.header_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._owner.is_late(self)
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(_TOO_SLOW)
            self.transport.close()


def _group(address: str) -> str:
    """What counts as one address: of IPv6 its network of 64 bits, which one host may have to itself."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return str(ipaddress.ip_network((parsed, 64), strict=False)) if parsed.version == 6 else address
