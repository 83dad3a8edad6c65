"""The aiohttp application: three endpoints in front of one RewardService."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from unirl.reward.base import LocalScorer
from unirl.reward.service import RewardService
from unirl.reward_server.config import ServerConfig
from unirl.reward_server.payload import as_json, parsed_request
from unirl.types.errors import DataError, UniRLError

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
"""What a full queue tells clients to wait."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RewardServer:
    """Handlers of one service. Scoring runs in one thread, so requests never share the device."""

    def __init__(self, service: RewardService, config: ServerConfig) -> None:
        self._service = service
        self._config = config
        self._slots = threading.BoundedSemaphore(config.max_queued)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")

    def application(self) -> web.Application:
        """The routes, with every error as JSON {"error": text}. Its cleanup stops the scoring thread."""
        app = web.Application(middlewares=[_errors_as_json], client_max_size=self._config.max_body_bytes)
        app.add_routes(
            [web.get("/health", self.health), web.get("/rewards", self.rewards), web.post("/score", self.score)]
        )
        app.cleanup_ctx.append(self._lifetime)
        return app

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: the server runs, and which rewards it has."""
        return web.json_response({"status": "ok", "rewards": list(self._service.scorers)})

    async def rewards(self, request: web.Request) -> web.Response:
        """GET /rewards: weight and components of each scorer."""
        found = {}
        for name, scorer in self._service.scorers.items():
            parts = list(scorer.component_weights) if isinstance(scorer, LocalScorer) else []
            found[name] = {
                "weight": self._service.weights[name],
                "components": [f"{name}/{part}" for part in parts],
            }
        return web.json_response({"rewards": found, "aggregation": self._service.aggregation})

    async def score(self, request: web.Request) -> web.Response:
        """POST /score: rewards of a batch. 400 bad body, 413 too large, 500 scorer bug, 503 queue full, 504 slow."""
        if not self._slots.acquire(blocking=False):
            raise web.HTTPServiceUnavailable(
                text=f"{self._config.max_queued} requests are waiting; try again later",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        with contextlib.ExitStack() as slot:
            slot.callback(self._slots.release)
            body = await request.read()
            work = self._thread.submit(self._scored, body)
            # From here the work holds the slot, also when its client leaves or the wait below times out.
            slot.pop_all()
            work.add_done_callback(lambda _: self._slots.release())
        try:
            return web.json_response(await asyncio.wait_for(asyncio.wrap_future(work), self._config.score_timeout_s))
        except TimeoutError as error:
            raise web.HTTPGatewayTimeout(
                text=f"not scored within score_timeout_s = {self._config.score_timeout_s} s"
            ) from error
        except DataError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        except UniRLError as error:
            logger.exception("scoring failed")
            raise web.HTTPInternalServerError(text=f"{type(error).__name__}: {error}") from error

    def _scored(self, body: bytes) -> dict[str, object]:
        return as_json(self._service.score(parsed_request(body, self._config.max_image_pixels)))

    async def _lifetime(self, app: web.Application) -> AsyncIterator[None]:
        yield
        self._thread.shutdown(wait=False, cancel_futures=True)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        kept = {name: error.headers[name] for name in ("Allow", "Retry-After") if name in error.headers}
        return web.json_response({"error": error.text or error.reason}, status=error.status, headers=kept)
