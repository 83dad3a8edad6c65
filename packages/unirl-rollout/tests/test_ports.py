"""Ports of engines: the system must not give one to another program before the engine listens on it."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unirl.rollout.engine import ports
from unirl.rollout.engine.child.messages import Start
from unirl.rollout.engine.ports import free_port
from unirl.rollout.engine.sglang_diffusion import host
from unirl.types.errors import ConfigError

GIVEN_BY_LINUX = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_free_port_is_none_that_the_system_gives_to_whoever_asks():
    first = int(GIVEN_BY_LINUX.read_text().split()[0]) if GIVEN_BY_LINUX.is_file() else 32_768
    assert all(20_000 <= free_port() < first for _ in range(50))


def test_a_port_that_is_taken_is_not_free(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "_PORTS", range(port, port + 1))
        with pytest.raises(ConfigError, match=f"no port of this host from {port} to {port} is free"):
            free_port()


def test_sglangs_scheduler_listens_where_the_system_sends_nobody(monkeypatch, tmp_path):
    """SGLang binds its port ten seconds after it is told, and exits if another program has it."""
    told: list[dict[str, Any]] = []

    class Generator:
        @staticmethod
        def from_pretrained(**options: Any) -> None:
            told.append(options)
            raise ConfigError("no further")

    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusion3Pipeline"}))
    monkeypatch.setattr(host, "_SGLang", lambda: SimpleNamespace(generator=Generator))
    with pytest.raises(ConfigError, match="no further"):
        host.EngineHost(Start(str(tmp_path), {}, 0, str(tmp_path)))
    assert all(20_000 <= told[0][name] < 32_768 for name in ("scheduler_port", "master_port"))
