"""Starts the server of `trainer view`."""

from __future__ import annotations

import asyncio
import errno
import secrets
import signal
import sys
from pathlib import Path

from aiohttp import web

from unirl.app.command_line import Command
from unirl.app.without_recipe import RUNS_FOLDER
from unirl.types.errors import ConfigError
from unirl.viewer.guard import is_loopback
from unirl.viewer.server import make_app

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8317


def view_command(command: Command) -> None:
    """`trainer view [FOLDER]`, as it was typed."""
    options = command.options
    folder = Path(command.recipe).expanduser()
    if command.recipe == RUNS_FOLDER and not folder.exists():
        raise ConfigError(
            f"there is no folder {folder} here, where runs are written. Give one: uv run trainer view FOLDER."
        )
    token = options.get("token")
    host, port = str(options.get("host", DEFAULT_HOST)), int(options.get("port", DEFAULT_PORT))
    view(folder, host=host, port=port, token=None if token is None else str(token))


def view(folder: Path, *, host: str, port: int, token: str | None) -> None:
    """Serve the page until interrupted; port 0 takes a free one. Elsewhere than on loopback a token is drawn where none
    is given. Raises ConfigError for a folder that is not there, and for an address that cannot be had."""
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(16)
    app = make_app(folder, token)
    asyncio.run(_serve(app, folder, host, port, token))


async def _serve(app: web.Application, folder: Path, host: str, port: int, token: str | None) -> None:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} of {host} is in use, perhaps by another viewer. Choose another: --port {port + 1}."
                ) from error
            raise ConfigError(f"--host {host} --port {port} cannot be served: {error.strerror or error}") from error
        shown = f"[{host}]" if ":" in host else host
        port = runner.addresses[0][1]
        address = f"http://{shown}:{port}/" + ("" if token is None else f"?token={token}")
        sys.stdout.write(f"{folder} at {address}  (Ctrl-C ends)\n")
        sys.stdout.flush()
        ended = asyncio.Event()
        # A shell starts what it puts in the background with SIGINT ignored.
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, ended.set)
        await ended.wait()
    finally:
        await runner.cleanup()
