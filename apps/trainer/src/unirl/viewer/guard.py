"""Who may ask, and what a page may do."""

from __future__ import annotations

import hmac
import ipaddress

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from unirl.types.errors import UniRLError
from unirl.viewer.run_files import NotFoundError

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """True for names and addresses of this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _cookie(request: web.Request) -> str:
    """Name of the cookie with the token; browsers give a server those of its host's other ports too."""
    return f"unirl_viewer_{request.url.port}"


def guarding(token: str | None) -> list[Middleware]:
    """Middlewares: security headers, errors as one message, and the token.

    Without a token only requests to a name of this machine are answered: a page elsewhere whose name was made to
    lead here (DNS rebinding) is not.
    """

    @web.middleware
    async def headers(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(HEADERS)
            raise
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    @web.middleware
    async def messages(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except UniRLError as error:
            status = 404 if isinstance(error, NotFoundError) else 400
            return web.json_response({"error": str(error)}, status=status)

    @web.middleware
    async def admission(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is None:
            if not is_loopback((request.url.host or "").strip("[]")):
                raise web.HTTPForbidden(text="This viewer answers on localhost alone.")
            return await handler(request)
        given = request.query.get("token")
        if given is not None and hmac.compare_digest(given.encode(), token.encode()):
            response = web.HTTPFound(request.path)
            response.set_cookie(_cookie(request), token, httponly=True, samesite="Strict")
            raise response
        if not hmac.compare_digest(request.cookies.get(_cookie(request), "").encode(), token.encode()):
            raise web.HTTPForbidden(text="A token is needed: open the address that `trainer view` printed.")
        return await handler(request)

    return [headers, admission, messages]
