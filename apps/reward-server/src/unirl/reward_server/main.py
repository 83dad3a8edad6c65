"""The `reward-server` command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

from aiohttp import web

from unirl.reward_server.access import checked_token, read_token
from unirl.reward_server.app import CONNECTION_OPTIONS, RewardServer
from unirl.reward_server.logs import start_logging
from unirl.reward_server.memory import keep_freed_memory
from unirl.reward_server.settings import ServerSettings, Settings, read_settings
from unirl.types.device_kinds import KINDS
from unirl.types.errors import ConfigError

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "REWARD_SERVER_TOKEN"  # noqa: S105 - the name of a variable


def main(argv: Sequence[str] | None = None) -> None:
    """Load the rewards of a configuration and serve until SIGTERM or SIGINT. Exits with 2 for a wrong one."""
    parser = argparse.ArgumentParser(
        prog="reward-server",
        description="Scores images, videos and texts over HTTP. Without --config: scorers for the CPU.",
    )
    parser.add_argument("--config", help="YAML file with `server` and `rewards`")
    parser.add_argument("--host", help="address to listen on (server.host, 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (server.port, 8080)")
    options = parser.parse_args(argv)
    start_logging()
    try:
        settings = read_settings(options.config)
        given = {key: value for key, value in (("host", options.host), ("port", options.port)) if value is not None}
        settings = replace(settings, server=replace(settings.server, **given))
        keep_freed_memory()
        asyncio.run(serve(settings))
    except ConfigError as error:
        parser.exit(2, f"reward-server: {error}\n")


async def serve(settings: Settings) -> None:
    """Serve until a signal, then drain. Raises ConfigError if a reward cannot be loaded or the port is taken."""
    server = settings.server
    token = os.environ.get(TOKEN_VARIABLE) or (read_token(server.token_file) if server.token_file else None)
    token = checked_token(server.host, token)
    with contextlib.ExitStack() as cluster:
        if settings.cluster is None:
            app = RewardServer(settings, token=token, gpus=visible_gpus(settings))
        else:
            ray_replica = _ray_replica()
            cluster.enter_context(ray_replica.connected(settings.cluster))
            app = RewardServer(
                settings,
                token=token,
                make_replica=lambda reward, _: ray_replica.RayReplica(reward, server.start_timeout_s),
            )
        await _serve(app, server)


async def _serve(app: RewardServer, server: ServerSettings) -> None:
    runner = web.AppRunner(
        app.application(),
        access_log=None,
        shutdown_timeout=1.0,
        **CONNECTION_OPTIONS,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _stop, stop)
    await runner.setup()
    try:
        if runner.server is None:
            raise RuntimeError("aiohttp's runner has made no server")
        async with app.connections.listening(server.host, server.port, runner.server) as accepting:
            await _until_stopped(app, server, stop, accepting)
            logger.info("stopping: waiting for the requests in work")
            await app.drain()
    finally:
        await runner.cleanup()


async def _until_stopped(
    app: RewardServer, server: ServerSettings, stop: asyncio.Event, accepting: Sequence[asyncio.Task[None]]
) -> None:
    """Return at a signal. Raises ConfigError if a reward that loads at the start cannot be loaded."""
    url = f"http://{server.host}:{server.port}"
    logger.info("loading %s; %s/ready says 503 until then", app.eager or "nothing before it is asked for", url)
    stopped, failed = asyncio.create_task(stop.wait()), asyncio.create_task(app.failed())
    loaded = asyncio.create_task(app.loaded())
    try:
        await asyncio.wait([stopped, failed, loaded, *accepting], return_when=asyncio.FIRST_COMPLETED)
        if loaded.done():
            logger.info("serving %s on %s", list(app.pools), url)
            gc.freeze()  # what was imported stays; looking through it again took 6 % of a busy server's time
            await asyncio.wait([stopped, failed, *accepting], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise ConfigError(failed.result())
        for task in accepting:
            if task.done():
                task.result()
    finally:
        for task in (stopped, failed, loaded):
            task.cancel()


def _ray_replica() -> ModuleType:
    """The module for clusters. Raises ConfigError without Ray."""
    try:
        return importlib.import_module("unirl.reward_server.ray_replica")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`cluster` needs {error.name}: pip install 'unirl-reward-server[ray]', or leave `cluster` out"
        ) from error


def visible_gpus(settings: Settings) -> list[str]:
    """Accelerators of this process, as the environment names them. Empty where no reward asks for one."""
    if not any(reward.num_gpus for reward in settings.rewards):
        return []
    for kind in KINDS.values():
        if (listed := os.environ.get(kind.visible or "")) is not None:
            return [name.strip() for name in listed.split(",") if name.strip()]
    from unirl.types.devices import accelerator, num_devices  # a server of CPU scorers does not load torch

    kind = accelerator()
    return [] if kind is None else [str(i) for i in range(num_devices(kind.name))]


def _stop(stop: asyncio.Event) -> None:
    if stop.is_set():
        sys.exit(1)
    stop.set()


if __name__ == "__main__":
    main()
