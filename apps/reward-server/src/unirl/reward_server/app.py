"""The aiohttp application: requests in, pools of replicas behind, limits around."""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from unirl.reward.wire import (
    BINARY_TYPE,
    JSON_TYPE,
    Kind,
    Limits,
    SampleAnswer,
    SchemaError,
    ScoreCall,
    decode_binary,
    decode_json,
    encode_answer,
)
from unirl.reward_server.access import is_allowed, video_reader, without_paths
from unirl.reward_server.bodies import Bodies, refused
from unirl.reward_server.connections import Connections, connection_limit
from unirl.reward_server.gpus import placed
from unirl.reward_server.memory import give_back_memory
from unirl.reward_server.metrics import Metrics
from unirl.reward_server.openapi import document
from unirl.reward_server.page import PAGE, PAGE_POLICY
from unirl.reward_server.pool import QueueFull, RewardPool
from unirl.reward_server.replica import Found, ProcessReplica, Replica
from unirl.reward_server.settings import RewardSettings, Settings
from unirl.types.errors import DataError

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MakeReplica = Callable[[RewardSettings, Sequence[str]], Replica]

OPEN_PATHS = ("/", "/ready", "/openapi.json")
"""They tell nothing about rewards, so that load balancers need no token."""

CONNECTION_OPTIONS: dict[str, Any] = {  # Any: keywords of aiohttp's runner
    "handler_cancellation": True,  # a client that leaves cancels its samples
    "auto_decompress": False,  # a compressed body could be a bomb
    "read_bufsize": 2**20,
}
"""How connections must be served."""

_DECODE_THREADS = 2
_POLL_S = 0.05


class RewardServer:
    """Handlers and pools of one server.

    token: what clients must send as bearer; None where only this machine reaches the server.
    gpus: those that replicas may have; a cluster deals out its own. make_replica: by default a process.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        token: str | None = None,
        gpus: Sequence[str] = (),
        make_replica: MakeReplica | None = None,
    ) -> None:
        server = settings.server
        self._settings = server
        self._rewards = settings.rewards
        self._token = token
        self._gpus = {reward.name: [[]] * reward.num_replicas for reward in settings.rewards}
        if settings.cluster is None:
            self._gpus = placed(settings.rewards, gpus)
        self._make_replica = make_replica or (lambda reward, gpus: ProcessReplica(reward, gpus, server.start_timeout_s))
        self._limits = Limits(
            max_samples=server.max_samples,
            max_pixels=server.max_image_pixels,
            max_frames=server.max_video_frames,
            max_media_bytes=server.max_media_bytes,
            max_video_bytes=server.max_video_bytes,
            max_sound_s=server.max_sound_s,
            max_text_chars=server.max_text_chars,
        )
        self._read_video = video_reader(server.video_roots, server.max_body_bytes)
        self._decoders = ThreadPoolExecutor(_DECODE_THREADS, thread_name_prefix="decode")
        self._num_requests = 0
        self._started = time.time()
        self.metrics = Metrics()
        self._bodies = Bodies(server, self.metrics)
        self.connections = Connections(
            connection_limit(server, sum(reward.num_replicas for reward in settings.rewards)),
            server.max_connections_per_address,
            server.header_timeout_s,
            self.metrics,
        )
        self.is_draining = False
        self.pools: dict[str, RewardPool] = {}

    def application(self) -> web.Application:
        """The routes, with every error as JSON {"detail": text}. The pools live as long as the application."""
        app = web.Application(middlewares=[self._guard], client_max_size=self._settings.max_body_bytes)
        app.add_routes(
            [
                web.get("/", self.page),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/rewards", self.rewards),
                web.get("/metrics", self.prometheus),
                web.get("/status.json", self.status),
                web.get("/openapi.json", self.openapi),
                web.post("/score", self.score),
            ]
        )
        app.cleanup_ctx.append(self._lifetime)
        return app

    @property
    def eager(self) -> list[str]:
        """Rewards that load at the start."""
        return [name for name, pool in self.pools.items() if pool.settings.load == "start"]

    async def loaded(self) -> None:
        """Return when every reward can be scored, or need not before the first request."""
        while not all(pool.is_ready for pool in self.pools.values()):
            await asyncio.sleep(_POLL_S)

    async def failed(self) -> str:
        """Return, with the reason, when a reward that loads at the start cannot be loaded at all."""
        failures = [self.pools[name].failure for name in self.eager]
        if not failures:
            await asyncio.Event().wait()
        await asyncio.wait(failures, return_when=asyncio.FIRST_COMPLETED)
        return next(failure.result() for failure in failures if failure.done())

    async def drain(self) -> None:
        """Take no new samples and wait for those in work, at most `drain_timeout_s`."""
        self.is_draining = True
        end = time.monotonic() + self._settings.drain_timeout_s
        while self._num_requests and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)
        if self._num_requests:
            logger.warning("%d requests were not answered within drain_timeout_s", self._num_requests)

    async def page(self, request: web.Request) -> web.Response:
        """GET /: the status page."""
        return web.Response(
            text=PAGE,
            content_type="text/html",
            headers={"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-store"},
        )

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: the server runs, and the state of every replica."""
        states = {
            name: [f"{name}-{i}:{slot.state}" for i, slot in enumerate(pool.slots)] for name, pool in self.pools.items()
        }
        return web.json_response({"status": "ok", "rewards": states})

    async def ready(self, request: web.Request) -> web.Response:
        """GET /ready: 200 when every reward can be scored, 503 while one is loading or the server stops."""
        missing = [name for name, pool in self.pools.items() if not pool.is_ready]
        if self.is_draining or missing:
            text = "the server is stopping" if self.is_draining else f"{len(missing)} rewards are not ready"
            return web.json_response({"status": "not ready", "detail": text}, status=503, headers={"Retry-After": "1"})
        return web.json_response({"status": "ready"})

    async def rewards(self, request: web.Request) -> web.Response:
        """GET /rewards: names, and what each scorer says about itself once it was loaded."""
        return web.json_response(
            {"rewards": list(self.pools), "scorers": {name: pool.card for name, pool in self.pools.items()}}
        )

    async def prometheus(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        for name, pool in self.pools.items():
            self.metrics.waiting.labels(name).set(pool.num_waiting)
            for state in ("starting", "ready", "waiting", "offloaded", "stopped"):
                count = sum(slot.state == state for slot in pool.slots)
                self.metrics.replicas.labels(name, state).set(count)
        self.metrics.pending_bytes.set(self._bodies.num_pending)
        self.metrics.connections.set(self.connections.num_open)
        return web.Response(body=generate_latest(self.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def openapi(self, request: web.Request) -> web.Response:
        """GET /openapi.json."""
        return web.json_response(document(self._settings, needs_token=self._token is not None))

    async def status(self, request: web.Request) -> web.Response:
        """GET /status.json: what the status page shows."""
        return web.json_response(
            {
                "now": time.time(),
                "uptime_s": time.time() - self._started,
                "is_draining": self.is_draining,
                "requests_in_work": self._num_requests,
                "pending_bytes": self._bodies.num_pending,
                "rewards": [_shown(pool) for pool in self.pools.values()],
                "problems": [
                    {"at": at, "reward": reward, "text": without_paths(text)}
                    for at, reward, text in reversed(self.metrics.problems)
                ],
            }
        )

    async def score(self, request: web.Request) -> web.Response:
        """POST /score. See the document at /openapi.json for bodies and status codes."""
        if self.is_draining:
            raise refused(web.HTTPServiceUnavailable, "the server is stopping", 1)
        if self.connections.is_reserved(request.transport):
            text = (
                f"max_connections = {self.connections.max_total} or max_connections_per_address = "
                f"{self.connections.max_per_address} connections have requests in work; try again later"
            )
            raise refused(web.HTTPTooManyRequests, text, 1)
        started = time.monotonic()
        self._num_requests += 1
        try:
            response, num_bytes = await self._scored(request)
            give_back_memory(num_bytes)  # here, where nothing holds the body and its media any more
            return response
        finally:
            self._num_requests -= 1
            self.metrics.request_seconds.observe(time.monotonic() - started)

    async def _scored(self, request: web.Request) -> tuple[web.Response, int]:
        """The answer, and the bytes that it took to hold body and media."""
        size = self._bodies.announced_size(request)
        with self._bodies.room() as take:
            body = await self._bodies.read(request, size, take)
            call = await self._call(request.content_type, body)
            num_bytes = sum(sample.num_bytes for sample in call.samples) if request.content_type == JSON_TYPE else 0
            take(num_bytes)
            answers = await self._answers(call)
            return web.Response(body=encode_answer(answers), content_type=JSON_TYPE), len(body) + num_bytes

    async def _call(self, content_type: str, body: bytearray) -> ScoreCall:
        try:
            content = memoryview(body).toreadonly()
            if content_type == BINARY_TYPE:
                return decode_binary(content, self._limits)
            # Images are decompressed here, which would hold up every other request.
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._decoders, decode_json, content, self._limits, self._read_video, self._is_scored
            )
        except SchemaError as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from error
        except DataError as error:
            raise web.HTTPBadRequest(text=str(error)) from error

    def _is_scored(self, kind: Kind, names: tuple[str, ...]) -> bool:
        """True if media are worth decoding. An unknown name is refused later, with a better message."""
        return any(name in self.pools and self.pools[name].refusal(kind) is None for name in names)

    async def _answers(self, call: ScoreCall) -> list[SampleAnswer]:
        """Ask every reward side by side and wait at most `score_timeout_s`; then what is missing is cancelled."""
        rows: dict[str, list[int]] = {}
        for i, names in enumerate(call.rewards):
            for name in names:
                rows.setdefault(name, []).append(i)
        self._check_names(rows)
        try:
            for name, indices in rows.items():
                self.pools[name].check_room(len(indices))
        except QueueFull as error:
            raise refused(web.HTTPTooManyRequests, str(error), error.retry_after_s) from error
        asked = {name: self.pools[name].submit([call.samples[i] for i in indices]) for name, indices in rows.items()}
        everything = [future for futures in asked.values() for future in futures]
        try:
            await asyncio.wait(everything, timeout=self._settings.score_timeout_s)
        finally:
            if any([future.cancel() for future in everything]):
                for name in rows:
                    self.pools[name].forget()
        answers = [SampleAnswer() for _ in call.samples]
        for name, futures in asked.items():
            for i, future in zip(rows[name], futures, strict=True):
                self._put(answers[i], name, future)
        return answers

    def _put(self, answer: SampleAnswer, name: str, future: asyncio.Future[Found]) -> None:
        if future.cancelled():
            problems = [slot.problem for slot in self.pools[name].slots if slot.problem]
            because = f"; its replicas: {problems[0]}" if problems else ""
            self.metrics.samples.labels(name, "late").inc()
            found: Found = f"not scored within score_timeout_s = {self._settings.score_timeout_s:g} s{because}"
        else:
            found = future.result()
        if isinstance(found, str):
            answer.errors[name] = without_paths(found)
        else:
            answer.results[name] = found

    def _check_names(self, rows: dict[str, list[int]]) -> None:
        for name in rows:
            if name not in self.pools:
                near = difflib.get_close_matches(name, self.pools, n=3) or list(self.pools)
                raise web.HTTPBadRequest(
                    text=f"there is no reward {name[:100]!r}; did you mean {' or '.join(near[:8])}?"
                )

    async def _lifetime(self, app: web.Application) -> AsyncIterator[None]:
        for reward in self._rewards:
            gpus = self._gpus[reward.name]
            self.pools[reward.name] = RewardPool(
                reward,
                lambda i, reward=reward, gpus=gpus: self._make_replica(reward, gpus[i]),
                self.metrics.of(reward.name),
                self._settings.score_timeout_s,
            )
        for pool in self.pools.values():
            pool.start()
        yield
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))
        self._decoders.shutdown(wait=False, cancel_futures=True)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token; make every error a short JSON; count."""
        with self.connections.serving(request.transport):
            response = await self._guarded(request, handler)
        if self.connections.is_reserved(request.transport):
            response.force_close()
        return response

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.match_info.route.resource.canonical if request.match_info.route.resource else "other"
        try:
            if path not in OPEN_PATHS:
                if not is_allowed(request.headers.get("Authorization"), self._token):
                    raise web.HTTPUnauthorized(
                        text="send the server's token: Authorization: Bearer <token>",
                        headers={"WWW-Authenticate": "Bearer"},
                    )
                self.connections.trust(request.transport)
            response = await handler(request)
        except web.HTTPException as error:
            names = ("Allow", "Connection", "Retry-After", "WWW-Authenticate")
            kept = {name: error.headers[name] for name in names if name in error.headers}
            text = without_paths(error.text or error.reason)
            response = web.json_response({"detail": text}, status=error.status, headers=kept)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            logger.exception("%s %s failed", request.method, path)
            response = web.json_response({"detail": "internal error; the server's log has it"}, status=500)
        self.metrics.requests.labels(path, str(response.status)).inc()
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response


def _shown(pool: RewardPool) -> dict[str, Any]:  # Any: JSON values
    return {
        "name": pool.settings.name,
        "summary": pool.card.get("summary", ""),
        "is_ready": pool.is_ready,
        "waiting": pool.num_waiting,
        "max_queue": pool.settings.max_queue,
        "samples": pool.metrics.num_samples,
        "failed": pool.metrics.num_failed,
        "samples_per_s": pool.metrics.samples_per_s(),
        "latency_s": pool.metrics.latency_s(),
        "replicas": [
            {
                "state": slot.state,
                "in_work": slot.in_work,
                "restarts": slot.num_restarts,
                "problem": None if slot.problem is None else without_paths(slot.problem),
                "pid": None if slot.replica is None else slot.replica.pid,
            }
            for slot in pool.slots
        ],
    }
