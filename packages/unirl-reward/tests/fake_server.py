"""A reward server of one thread on a free port: real HTTP and real scoring, and faults on demand."""

import asyncio
import base64
import threading

from aiohttp import web

from unirl.reward.asking import ask_scorer
from unirl.reward.grouping import compares_groups
from unirl.reward.wire import (
    BINARY_TYPE,
    Limits,
    SampleAnswer,
    decode_binary,
    decode_json,
    encode_answer,
    request_of,
    sub_metrics,
)


class FakeServer:
    """Answers /score with `scorers`. faults: taken one per request, first to last; then all goes well.

    A fault is a response, "cut" (the connection closes without an answer) or "hang" (until the server stops).
    """

    def __init__(self, scorers, *, token=None, password=None, faults=(), port=0, ready=None):
        self.scorers = scorers
        self.token = token
        self.password = password
        """Password of the user "me"."""
        self.faults = list(faults)
        self.ready = list(ready or [])
        self.asked: list[list[str]] = []
        """Sample ids of every body that was read, faults included."""
        self.types: list[str] = []
        self.connections: set[object] = set()
        self.port = port
        self.was_asked = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *error):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self):
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=2**30, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/ready", self._ready),
                web.get("/health", self._health),
                web.get("/rewards", self._rewards),
                web.post("/score", self._score),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = runner.addresses[0][1]
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    @web.middleware
    async def _guard(self, request, handler):
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"detail": "send the server's token"}, status=401)
        if self.password is not None and request.headers.get("Authorization") != _basic("me", self.password):
            return web.json_response({"detail": "who are you?"}, status=401)
        return await handler(request)

    async def _ready(self, request):
        return web.json_response({"detail": "still loading"}, status=self.ready.pop(0) if self.ready else 200)

    async def _health(self, request):
        return web.json_response({"status": "ok", "rewards": {name: [f"{name}-0:ready"] for name in self.scorers}})

    async def _rewards(self, request):
        cards = {name: {"is_groupwise": compares_groups(scorer)} for name, scorer in self.scorers.items()}
        return web.json_response({"rewards": list(self.scorers), "scorers": cards})

    async def _score(self, request):
        body = await request.read()
        self.connections.add(request.transport)
        self.types.append(request.content_type)
        decode = decode_binary if request.content_type == BINARY_TYPE else decode_json
        call = decode(body, Limits())
        self.asked.append([sample.id for sample in call.samples])
        self.was_asked.set()
        fault = self.faults.pop(0) if self.faults else None
        if fault == "cut":
            request.transport.abort()
            return web.Response()
        if fault == "hang":
            await self._stop.wait()
        if isinstance(fault, web.Response):
            return fault
        answers = [SampleAnswer() for _ in call.samples]
        for name in call.rewards[0]:
            response = ask_scorer(name, self.scorers[name], request_of(call.samples), "drop_group")
            for answer, found in zip(answers, sub_metrics(response), strict=True):
                if isinstance(found, str):
                    answer.errors[name] = found
                else:
                    answer.results[name] = found
        return web.Response(body=encode_answer(answers), content_type="application/json")


def _basic(user, password):
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def problem(status, detail, **headers):
    """An error response as the server's."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.json_response({"detail": detail}, status=status, headers=named)
