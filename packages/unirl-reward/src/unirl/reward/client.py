"""The client of reward servers (`unirl-reward-server`, or any that speaks its `POST /score`)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

import torch

from unirl.reward.endpoints import Endpoint, Endpoints, RetryPolicy, Unanswered
from unirl.reward.grouping import whole_groups
from unirl.reward.wire import (
    BINARY_TYPE,
    JSON_TYPE,
    Pixels,
    decode_answer,
    encode_binary,
    encode_json,
    samples_of,
)
from unirl.types.bounds import NonNegative, NonNegativeInt, Positive, PositiveInt, bounded
from unirl.types.errors import ConfigError, ContractError, DataError, RewardError, as_sentence
from unirl.types.reward import RewardRequest, RewardResponse
from unirl.types.urls import without_credentials

Transport = Literal["binary", "json"]
ResultT = TypeVar("ResultT")

_CLOSE_TIMEOUT_S = 5.0


@bounded("client")
class RewardClient:
    """Asks one or several reward servers that answer alike.

    base_url: "http://host:8080", or a list of such; each request goes to the least busy server. A user and a password
    ("http://user:password@host") are sent and never shown: `urls` has none.
    token, token_file: what the servers want as bearer; the first line of the file.
    transport: `binary` sends pixels and sounds as they are, `json` as base64 PNG and WAV, which needs pixels that are
    bytes, sounds with a rate, and videos without sound.
    pixels: `lossless` sends float32 where bytes would round, `uint8` rounds as a PNG would.
    batch_size: samples of one HTTP request. max_concurrency: requests under way at a time, over all calls.
    timeout_s, max_retries, retry_delay_s, deadline_s: see `unirl.reward.endpoints.RetryPolicy`.
    trust_env: use the proxies that HTTP_PROXY, HTTPS_PROXY and NO_PROXY name.

    Safe to use from several threads. Raises ConfigError for an impossible value.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        *,
        token: str | None = None,
        token_file: str | None = None,
        transport: Transport = "binary",
        pixels: Pixels = "lossless",
        batch_size: PositiveInt = 32,
        max_concurrency: PositiveInt = 8,
        timeout_s: Positive = 300.0,
        max_retries: NonNegativeInt = 4,
        retry_delay_s: NonNegative = 1.0,
        deadline_s: Positive = 1800.0,
        trust_env: bool = False,
    ) -> None:
        if transport not in get_args(Transport) or pixels not in get_args(Pixels):
            raise ConfigError(
                f"transport = {transport!r}, pixels = {pixels!r} must be of {get_args(Transport)}, {get_args(Pixels)}"
            )
        if token is not None and token_file is not None:
            raise ConfigError("token and token_file are both given; the file keeps the token out of recipes and logs")
        self.batch_size = batch_size
        self.max_concurrency = max_concurrency
        self._transport: Transport = transport
        self._pixels: Pixels = pixels
        self._endpoints = Endpoints(
            _checked_urls(base_url),
            RetryPolicy(timeout_s, max_retries, retry_delay_s, deadline_s),
            token=_read_token(token_file) if token_file is not None else token,
            trust_env=trust_env,
        )
        self.urls = [endpoint.url for endpoint in self._endpoints.endpoints]
        self._room = asyncio.Semaphore(max_concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-client", daemon=True)
        self._thread.start()
        self._closed = weakref.finalize(self, _close, self._loop, self._thread, self._endpoints)

    def score(
        self, request: RewardRequest, rewards: Sequence[str], *, is_groupwise: bool = False
    ) -> dict[str, RewardResponse]:
        """What each of `rewards` gives the B samples, as its scorer would answer in this process, bit for bit.

        is_groupwise: one of them compares the samples of a group, so that each HTTP request has whole ones, at least
        one.
        A sample that could not be scored, or whose request no server answered, has success False, its reason, and NaN.
        Raises ConfigError for a wrong token, ContractError if a server refuses the samples or answers to others.
        """
        if not request.sample_ids or not rewards:
            raise ContractError(f"nothing to score: {len(request.sample_ids)} samples, rewards {list(rewards)}")
        if is_groupwise and not request.group_ids:
            raise ContractError("rewards that compare the samples of a group need group_ids; the request has none")
        return self._run(self._score(request, list(rewards), is_groupwise))

    def rewards(self) -> dict[str, list[str]]:
        """URL -> names of the rewards there. Raises RewardError naming the server that does not answer."""
        return self._run(self._rewards())

    def groupwise_rewards(self) -> set[str]:
        """Rewards that compare the samples of a group, as far as servers have loaded them. Raises as `rewards`."""
        cards = self._run(self._cards())
        return {name for known in cards.values() for name, card in known.items() if card.get("is_groupwise")}

    def health(self) -> dict[str, dict[str, Any]]:  # Any: JSON values
        """URL -> its GET /health, or {"status": "unreachable: reason"}."""
        return self._run(self._health())

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until every server has loaded its rewards. Raises ConfigError naming those that have not in time."""
        self._run(self._wait_until_ready(timeout_s))

    def close(self) -> None:
        """Break off what is under way and close the connections. Safe to call twice."""
        self._closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        if not self._closed.alive:
            work.close()
            raise ContractError("this reward client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise RewardError("the reward client was closed while it waited for an answer") from error
        finally:
            future.cancel()  # where the wait was interrupted

    async def _score(self, request: RewardRequest, rewards: list[str], is_groupwise: bool) -> dict[str, RewardResponse]:
        size = len(request.sample_ids)
        if is_groupwise:
            rows = whole_groups(request.group_ids, self.batch_size)
            chunks = [request.select(chosen) for chosen in rows]
        else:
            bounds = [(start, min(start + self.batch_size, size)) for start in range(0, size, self.batch_size)]
            rows = [list(range(start, stop)) for start, stop in bounds]
            chunks = [request.slice(start, stop) for start, stop in bounds]
        tasks = [asyncio.ensure_future(self._score_chunk(chunk, rewards)) for chunk in chunks]
        try:
            parts = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return {
            name: RewardResponse.concat_rows([(own, part[name]) for own, part in zip(rows, parts, strict=True)])
            for name in rewards
        }

    async def _score_chunk(self, request: RewardRequest, rewards: list[str]) -> dict[str, RewardResponse]:
        async with self._room:
            body = await asyncio.to_thread(self._encoded, request, rewards)
            kind = BINARY_TYPE if self._transport == "binary" else JSON_TYPE
            try:
                url, answer = await self._endpoints.post("/score", body, kind)
            except Unanswered as error:
                return {name: _unanswered(request.sample_ids, str(error)) for name in rewards}
        try:
            return decode_answer(answer, request.sample_ids, rewards)
        except DataError as error:
            raise ContractError(
                f"{url}/score answered what this version cannot read: {as_sentence(error)} Install the same version of "
                "unirl-reward there and here."
            ) from error

    def _encoded(self, request: RewardRequest, rewards: list[str]) -> bytes:
        samples = samples_of(request.to("cpu"), self._pixels)
        if self._transport == "json":
            return encode_json(samples, rewards)
        return b"".join(encode_binary(samples, rewards))

    async def _rewards(self) -> dict[str, list[str]]:
        return {url: names for url, (names, _) in (await self._rosters()).items()}

    async def _cards(self) -> dict[str, dict[str, dict[str, Any]]]:  # Any: JSON values
        return {url: cards for url, (_, cards) in (await self._rosters()).items()}

    async def _rosters(self) -> dict[str, tuple[list[str], dict[str, dict[str, Any]]]]:  # Any: JSON values
        """URL -> names of its rewards, and what each scorer says of itself, for servers that tell."""
        found = {}
        for endpoint in self._endpoints.endpoints:
            url = endpoint.url
            try:
                status, content = await self._endpoints.get(endpoint, "/rewards")
            except Unanswered as error:
                raise RewardError(f"{url}/rewards: {error}") from error
            names = content.get("rewards")
            if status != 200 or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ContractError(f"{url}/rewards answered {status} {str(content)[:200]}. Is it a reward server?")
            cards = content.get("scorers")
            known = cards.items() if isinstance(cards, dict) else ()
            found[url] = names, {name: card for name, card in known if isinstance(card, dict)}
        return found

    async def _health(self) -> dict[str, dict[str, Any]]:  # Any: JSON values
        found: dict[str, dict[str, Any]] = {}  # Any: JSON values
        for endpoint in self._endpoints.endpoints:
            try:
                _, found[endpoint.url] = await self._endpoints.get(endpoint, "/health")
            except Unanswered as error:
                found[endpoint.url] = {"status": f"unreachable: {error}"}
        return found

    async def _wait_until_ready(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        waiting = {endpoint.url: (endpoint, "") for endpoint in self._endpoints.endpoints}
        while True:
            for url, (endpoint, _) in list(waiting.items()):
                reason = await self._why_not_ready(endpoint)
                waiting[url] = (endpoint, reason)
                if not reason:
                    del waiting[url]
            if not waiting:
                return
            if loop.time() >= deadline:
                listed = "; ".join(f"{url}: {reason}" for url, (_, reason) in waiting.items())
                raise ConfigError(
                    f"{len(waiting)} of {len(self.urls)} reward servers are not ready after {timeout_s:g} s: {listed}. "
                    "Start them with `reward-server`, correct base_url, or raise start_timeout_s."
                )
            await asyncio.sleep(min(0.5, max(0.0, deadline - loop.time())))

    async def _why_not_ready(self, endpoint: Endpoint) -> str:
        """Empty where the server is ready. One that has no /ready is, once it answers."""
        try:
            status, content = await self._endpoints.get(endpoint, "/ready")
        except Unanswered as error:
            return str(error)
        return str(content.get("detail", content)) if status == 503 else ""


def _unanswered(sample_ids: list[str], reason: str) -> RewardResponse:
    return RewardResponse(
        sample_ids=list(sample_ids),
        rewards=torch.full((len(sample_ids),), torch.nan),
        successes=[False] * len(sample_ids),
        errors=[reason] * len(sample_ids),
    )


def _checked_urls(base_url: str | Sequence[str]) -> list[str]:
    urls = [url.rstrip("/") for url in ([base_url] if isinstance(base_url, str) else base_url)]
    wrong = [url for url in urls if not url.startswith(("http://", "https://"))]
    if not urls or wrong or len({without_credentials(url) for url in urls}) != len(urls):
        shown = without_credentials(repr(base_url))
        raise ConfigError(f"base_url = {shown} must be one or several different URLs such as http://host:8080")
    return urls


def _read_token(path: str) -> str:
    try:
        token = Path(path).read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file = {path!r} cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"token_file = {path!r} has an empty first line")
    return token


def _close(loop: asyncio.AbstractEventLoop, thread: threading.Thread, endpoints: Endpoints) -> None:
    async def end() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await endpoints.close()

    with contextlib.suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(end(), loop).result(_CLOSE_TIMEOUT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(_CLOSE_TIMEOUT_S)
    if not thread.is_alive():
        loop.close()
