"""Bodies of requests, with limits on each and on all that are in work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator

from aiohttp import web

from unirl.reward.wire import BINARY_TYPE, JSON_TYPE
from unirl.reward_server.metrics import Metrics
from unirl.reward_server.settings import ServerSettings

_FIRST_BYTES = 2**20
"""Size of a body's buffer before anything has arrived."""


def refused(kind: type[web.HTTPException], text: str, retry_after_s: int) -> web.HTTPException:
    """An answer to a request that may be sent again later."""
    return kind(text=text, headers={"Retry-After": str(retry_after_s)})


class Bodies:
    """Reads bodies, and counts what the requests in work hold of memory.

    Attributes:
        num_pending: bytes that they hold now.
    """

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self.num_pending = 0

    def announced_size(self, request: web.Request) -> int:
        """Bytes of a body at most, before any is read. Raises the HTTP error for one that would not be read."""
        if request.content_type not in (JSON_TYPE, BINARY_TYPE) or "Content-Encoding" in request.headers:
            raise web.HTTPUnsupportedMediaType(text=f"send {JSON_TYPE} or {BINARY_TYPE}, without Content-Encoding")
        limit = self._settings.max_body_bytes
        size = limit if request.content_length is None else request.content_length
        if size > limit:
            raise web.HTTPRequestEntityTooLarge(
                limit, size, text=f"the body has more than max_body_bytes = {limit} bytes"
            )
        # All requests without a body share one stream of aiohttp, whose chunks end for the first reader only.
        if not request.can_read_body:
            raise web.HTTPUnprocessableEntity(text="the body is empty")
        return size

    @contextlib.contextmanager
    def room(self) -> Generator[Callable[[int], None]]:
        """A function that counts bytes of a request, or refuses it, until the request is done."""
        limit, held = self._settings.max_pending_bytes, 0

        def take(num_bytes: int) -> None:
            nonlocal held
            if self.num_pending + num_bytes > limit:
                raise refused(
                    web.HTTPTooManyRequests,
                    f"the requests in work hold max_pending_bytes = {limit}; try again later",
                    1,
                )
            self.num_pending += num_bytes
            held += num_bytes

        try:
            yield take
        finally:
            self.num_pending -= held

    async def read(self, request: web.Request, size: int, take: Callable[[int], None]) -> bytearray:
        """The body, read into one buffer, which grows with what has arrived: size is only what the client announces."""
        limit = self._settings.max_body_bytes
        body, filled = bytearray(min(size, _FIRST_BYTES)), 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for chunk, _ in request.content.iter_chunks():
                    filled += len(chunk)
                    if filled > limit:
                        raise web.HTTPRequestEntityTooLarge(
                            limit, filled, text=f"the body has more than max_body_bytes = {limit} bytes"
                        )
                    take(len(chunk))
                    if filled > len(body):
                        body.extend(bytes(max(filled - len(body), min(len(body), size - len(body)))))
                    body[filled - len(chunk) : filled] = chunk
        except TimeoutError as error:
            text = f"the body was not sent within body_timeout_s = {self._settings.body_timeout_s:g} s"
            raise web.HTTPRequestTimeout(text=text, headers={"Connection": "close"}) from error
        del body[filled:]
        self._metrics.body_bytes.labels("json" if request.content_type == JSON_TYPE else "binary").inc(len(body))
        return body
