"""Requests to reward servers that answer alike: which one is asked, what is asked again, and when."""

from __future__ import annotations

import asyncio
import base64
import email.utils
import io
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unirl.types.bounds import NonNegative, NonNegativeInt, Positive, bounded
from unirl.types.errors import ConfigError, ContractError, as_sentence
from unirl.types.urls import split_credentials

try:
    import aiohttp
except ImportError as missing:
    raise ImportError(
        "a reward server's client needs aiohttp. Install it with: pip install 'unirl-reward[remote]'"
    ) from missing

logger = logging.getLogger(__name__)

MAX_DELAY_S = 30.0
"""Longest pause before a failed request is sent again."""

_CONNECT_TIMEOUT_S = 10.0
_TOO_MANY_REQUESTS, _UNAVAILABLE = 429, 503


class Unanswered(Exception):
    """No server has answered a request; the text says what the last one did."""


@bounded("client")
@dataclass(frozen=True)
class RetryPolicy:
    """How long a request is tried.

    timeout_s: one attempt. max_retries: failed attempts (5xx, cut or refused connections, timeouts) after the first.
    retry_delay_s: the k-th pause is drawn from 0 to retry_delay_s * 2^k, at most MAX_DELAY_S ("full jitter").
    deadline_s: all attempts and pauses. Where a server asks for a pause itself, this alone is the limit.
    """

    timeout_s: Positive = 300.0
    max_retries: NonNegativeInt = 4
    retry_delay_s: NonNegative = 1.0
    deadline_s: Positive = 1800.0


@dataclass(eq=False)
class Endpoint:
    """One server."""

    url: str
    """Without user and password: messages name it."""
    headers: dict[str, str]
    """What it wants to know who asks by."""
    num_in_work: int = 0
    wakes_at: float = 0.0
    """Time of the loop before which others are preferred, because it failed or asked for a pause."""


@dataclass(frozen=True)
class Failure:
    """How one attempt failed."""

    reason: str
    pause_s: float | None = None
    """What the server asked for."""
    counts: bool = True
    """True if it uses up a retry."""


class Endpoints:
    """Sends requests to the least busy server, and elsewhere or again what failed. Lives in one event loop.

    Connections are kept alive; redirects are not followed, since they would carry the token elsewhere.
    urls: with user and password where a server wants them. Raises ConfigError for these with a token.
    """

    def __init__(self, urls: Sequence[str], retry_policy: RetryPolicy, *, token: str | None, trust_env: bool) -> None:
        self.endpoints = [_endpoint(url, token) for url in urls]
        self._retry_policy = retry_policy
        self._trust_env = trust_env
        self._session: aiohttp.ClientSession | None = None
        # Its own generator: pauses must not move the seeded one of a run.
        self._random = random.Random()

    async def get(self, endpoint: Endpoint, path: str) -> tuple[int, dict[str, Any]]:  # Any: JSON values
        """Status and JSON object of a GET at one server, tried once.

        Raises ConfigError for a wrong token, ContractError for an answer that is no JSON object, Unanswered otherwise.
        """
        timeout_s = min(self._retry_policy.timeout_s, _CONNECT_TIMEOUT_S)
        url = endpoint.url
        try:
            async with self._opened().get(
                url + path, headers=endpoint.headers, timeout=_timeout(timeout_s), allow_redirects=False
            ) as response:
                text = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unanswered(_described(error, timeout_s)) from error
        _check_token(url, response.status, text)
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ContractError(
                f"{url}{path} answered {response.status} {_shown(text)!r}, no JSON object. Is it a reward server?"
            )
        return response.status, found

    async def post(self, path: str, body: bytes, content_type: str) -> tuple[str, bytes]:
        """The URL of the server that answered, and its answer.

        Raises Unanswered when the retries or the deadline are used up; ConfigError and ContractError at once where
        the server refuses the token or the body, which it would again.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._retry_policy.deadline_s
        failures: Counter[str] = Counter()
        num_failures = 0
        endpoint = self._chosen(loop.time(), failures)
        while True:
            timeout_s = min(self._retry_policy.timeout_s, deadline - loop.time())
            outcome = await self._attempt(endpoint, path, body, content_type, timeout_s)
            if isinstance(outcome, bytes):
                endpoint.wakes_at = 0.0
                return endpoint.url, outcome
            failures[endpoint.url] += 1
            num_failures += outcome.counts
            what = f"{endpoint.url}: {outcome.reason}"
            if num_failures > self._retry_policy.max_retries:
                raise Unanswered(f"{what} (attempt {num_failures} of {num_failures})")
            now = loop.time()
            endpoint.wakes_at = now + self._pause_s(outcome, num_failures)
            endpoint = self._chosen(now, failures)
            wait_s = max(0.0, endpoint.wakes_at - now)
            if now + wait_s >= deadline:
                raise Unanswered(f"{what} (deadline_s = {self._retry_policy.deadline_s:g} is used up)")
            logger.warning("%s; asking %s in %.1f s", what, endpoint.url, wait_s)
            await asyncio.sleep(wait_s)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _attempt(
        self, endpoint: Endpoint, path: str, body: bytes, content_type: str, timeout_s: float
    ) -> bytes | Failure:
        endpoint.num_in_work += 1
        try:
            async with self._opened().post(
                endpoint.url + path,
                data=io.BytesIO(body),
                headers={"Content-Type": content_type, **endpoint.headers},
                timeout=_timeout(timeout_s),
                allow_redirects=False,
            ) as response:
                text = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return Failure(_described(error, timeout_s))
        finally:
            endpoint.num_in_work -= 1
        if response.status == 200:
            return text
        _check_token(endpoint.url, response.status, text)
        reason = f"{response.status} {_shown(text)}"
        if response.status in (_TOO_MANY_REQUESTS, _UNAVAILABLE):
            pause_s = retry_after_s(response.headers)
            return Failure(reason, pause_s, counts=response.status == _UNAVAILABLE and pause_s is None)
        if response.status >= 500:
            return Failure(reason)
        raise ContractError(
            f"{endpoint.url}{path} refuses the samples: {as_sentence(reason)}{_advice(response.status)}"
        )

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                trust_env=self._trust_env,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _chosen(self, now: float, failures: Mapping[str, int]) -> Endpoint:
        """The server that wakes first; of those awake, one that failed this request least often and is least busy."""
        return min(
            self.endpoints,
            key=lambda each: (max(0.0, each.wakes_at - now), failures.get(each.url, 0), each.num_in_work),
        )

    def _pause_s(self, failure: Failure, num_failures: int) -> float:
        if failure.pause_s is not None:
            return failure.pause_s
        longest = min(MAX_DELAY_S, self._retry_policy.retry_delay_s * 2.0 ** min(num_failures, 16))
        return self._random.uniform(0.0, longest)


def _endpoint(url: str, token: str | None) -> Endpoint:
    shown, credentials = split_credentials(url)
    if credentials is None:
        return Endpoint(shown, {} if token is None else {"Authorization": f"Bearer {token}"})
    if token is not None:
        raise ConfigError(f"base_url of {shown} has a user and a password, and there is a token; a request carries one")
    return Endpoint(shown, {"Authorization": f"Basic {base64.b64encode(':'.join(credentials).encode()).decode()}"})


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a Retry-After header (seconds, or a date) asks for; None without one that can be read."""
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None


def _timeout(total_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=total_s, sock_connect=min(total_s, _CONNECT_TIMEOUT_S))


def _described(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:.3g} s"
    return f"{type(error).__name__}: {error}"


def _check_token(url: str, status: int, text: bytes) -> None:
    if status in (401, 403):
        raise ConfigError(
            f"{url} refuses the token: {status} {_shown(text)}. Set token_file (or token) to the server's own."
        )


def _advice(status: int) -> str:
    if status == 413:
        return " Lower batch_size, or raise server.max_body_bytes there."
    if status in (415, 422):
        return (
            " If it does not speak this version's binary body, set transport: json, or install the same version there. "
            "JSON carries no sound of videos."
        )
    if status == 404 or 300 <= status < 400:
        return " Is base_url that of a reward server?"
    return ""


def _shown(text: bytes) -> str:
    """The reason in an error's body, at most a line."""
    shown = text.decode("utf-8", "replace")
    try:
        content = json.loads(shown)
    except ValueError:
        content = None
    if isinstance(content, dict) and ("detail" in content or "error" in content):
        shown = str(content.get("detail", content.get("error")))
    return " ".join(shown.split())[:400]
