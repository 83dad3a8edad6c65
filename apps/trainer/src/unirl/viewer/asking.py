"""What requests ask for, and how they are answered."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web

from unirl.types.errors import DataError

MAX_RUNS = 200


def answer(value: object) -> web.Response:
    """JSON, never kept by the browser: files change."""
    return web.Response(
        body=msgspec.json.encode(value), content_type="application/json", headers={"Cache-Control": "no-store"}
    )


def names(request: web.Request) -> list[str]:
    """The runs that a request names. Raises DataError for too many."""
    found = request.query.getall("run", [])
    if len(found) > MAX_RUNS:
        raise DataError(f"{len(found)} runs at once; {MAX_RUNS} are the most.")
    return found


def number(query: Mapping[str, str], name: str, default: float, least: float, most: float) -> float:
    """A number of the query, within bounds. Raises DataError for what is no number."""
    try:
        value = float(query.get(name, default))
    except ValueError as error:
        raise DataError(f"{name} = {query[name]!r} is no number.") from error
    return min(max(value, least), most) if value == value else default
