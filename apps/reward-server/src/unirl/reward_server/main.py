"""The `reward-server` command."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from aiohttp import web

from unirl.reward_server.app import RewardServer
from unirl.reward_server.config import build_service, read_config
from unirl.types.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> None:
    """Load the scorers of a configuration, then serve until SIGINT or SIGTERM. Exits with 2 for a wrong one."""
    parser = argparse.ArgumentParser(prog="reward-server", description="The reward service behind HTTP.")
    parser.add_argument("--config", required=True, help="JSON or YAML file that lists the scorers by _target_")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (default: 8080)")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = read_config(options.config)
        service = build_service(config)
    except (ConfigError, ImportError) as error:
        parser.error(str(error))
    logging.getLogger(__name__).info("serving %s on http://%s:%d", list(service.scorers), options.host, options.port)
    web.run_app(
        RewardServer(service, config).application(),
        host=options.host,
        port=options.port,
        print=None,
        handler_cancellation=True,
    )
