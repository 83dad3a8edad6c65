"""TCP ports for servers that take a while until they listen."""

from __future__ import annotations

import contextlib
import random
import socket

from unirl.types.errors import ConfigError

_PORTS = range(20_000, 32_768)
"""Below Linux's ephemeral ports and above those of Ray's workers."""


def free_port() -> int:
    """A free TCP port of this host outside the ephemeral range, so that no other program gets it while the engine
    starts. Raises ConfigError if there is none."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ConfigError(f"no port of this host from {_PORTS[0]} to {_PORTS[-1]} is free. End what listens there.")
