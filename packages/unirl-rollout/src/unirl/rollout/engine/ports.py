"""Ports for servers that listen long after they were told where."""

from __future__ import annotations

import contextlib
import random
import socket

from unirl.types.errors import ConfigError

_PORTS = range(20_000, 32_768)
"""Below the ports that Linux gives to whoever asks for any, and above those of Ray's workers."""


def free_port() -> int:
    """A TCP port of this host that nothing listens on now, and that the system gives nobody who asks for any: an engine
    takes seconds to minutes until it listens. Raises ConfigError where there is none."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ConfigError(f"no port of this host from {_PORTS[0]} to {_PORTS[-1]} is free. End what listens there.")
