"""Who may keep a connection: limits, time for headers, and an attack by slow connections."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import subprocess
import sys
import time

import aiohttp
import pytest
from aiohttp import web

from unirl.reward_server.app import CONNECTION_OPTIONS, RewardServer
from unirl.reward_server.connections import NUM_RESERVED, connection_limit
from unirl.reward_server.logs import MAX_RECORDS, WINDOW_S, RateLimit
from unirl.reward_server.settings import ServerSettings, Settings
from unirl.types.errors import ConfigError

from .fakes import Maker, held_port, reward, until
from .test_app import JSON, TOKEN, body

READY = b"GET /ready HTTP/1.1\r\nHost: h\r\n\r\n"
UNFINISHED = b"GET /ready HTTP/1.1\r\nHost: h\r\nX-Slow: "
ATTACKED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
from unirl.reward_server.main import main
main()
"""


def listening(test, *, token=None, **server):
    """Run `test(app, make, port)` against a server that accepts its connections as the command does."""

    async def run():
        make = Maker()
        app = RewardServer(Settings((reward(),), ServerSettings(**server)), token=token, make_replica=make)
        runner = web.AppRunner(app.application(), access_log=None, shutdown_timeout=0.1, **CONNECTION_OPTIONS)
        await runner.setup()
        assert runner.server is not None
        try:
            with held_port() as port:
                async with app.connections.listening("127.0.0.1", port, runner.server):
                    await until(lambda: app.pools["r"].is_ready)
                    await test(app, make, port)
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(run(), 120))


async def opened(port, app, sent=b"", host="127.0.0.1"):
    """A connection that the server has accepted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
    writer.write(sent)
    own = writer.get_extra_info("sockname")
    await until(lambda: own in [each.get_extra_info("peername") for each in app.connections._open])
    return reader, writer


async def answer(reader):
    """Status of the next answer; its body is read too."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    [size] = [line.partition(": ")[2] for line in head.split("\r\n") if line.lower().startswith("content-length")]
    await reader.readexactly(int(size))
    return int(head.split()[1])


async def asked(port, path="/ready", host="127.0.0.1", **options):
    """Status of one request on its own connection."""
    connector = aiohttp.TCPConnector(local_addr=(host, 0))
    async with aiohttp.ClientSession(connector=connector) as session:
        method = session.post if "json" in options else session.get
        async with method(f"http://127.0.0.1:{port}{path}", **options) as response:
            return response.status


def closed(app, reason):
    return app.metrics.closed_connections.labels(reason)._value.get()


def test_headers_that_do_not_end_get_408_on_a_new_connection_and_after_a_first_request():
    async def test(app, make, port):
        first, _ = await opened(port, app, UNFINISHED)
        second, writer = await opened(port, app, READY)
        assert await answer(second) == 200
        await asyncio.sleep(0.7)  # no timeout runs between requests
        assert not second.at_eof()
        writer.write(UNFINISHED)
        for reader in (first, second):
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        await until(lambda: app.connections.num_open == 0)
        assert closed(app, "header_timeout") == 2

    listening(test, header_timeout_s=0.5)


def test_beyond_the_limit_the_connection_that_rested_longest_makes_room():
    async def test(app, make, port):
        kept, writer = await opened(port, app, READY)
        assert await answer(kept) == 200
        waiting = [await opened(port, app) for _ in range(2)]
        writer.write(READY)
        assert await answer(kept) == 200  # so it has rested for the shortest time
        for reader, _ in waiting:
            new, _ = await opened(port, app, READY)
            assert await answer(new) == 200 and await reader.read() == b""
        writer.write(READY)
        assert await answer(kept) == 200
        assert closed(app, "limit") == 2

    listening(test, max_connections=3)


def test_one_address_cannot_take_the_places_of_others():
    async def test(app, make, port):
        other, writer = await opened(port, app, READY, host="127.0.0.2")
        assert await answer(other) == 200
        waiting = [await opened(port, app) for _ in range(6)]
        for reader, _ in waiting[:4]:
            assert await reader.read() == b""
        assert app.connections.num_open == 3 and not any(reader.at_eof() for reader, _ in waiting[4:])
        writer.write(READY)
        assert await answer(other) == 200

    listening(test, max_connections=8, max_connections_per_address=2)


def test_who_has_shown_the_token_is_closed_after_strangers():
    async def test(app, make, port):
        head = f"GET /health HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        friend, writer = await opened(port, app, head)
        assert await answer(friend) == 200
        for _ in range(6):
            await opened(port, app, READY)
        writer.write(head)
        assert await answer(friend) == 200

    listening(test, token=TOKEN, max_connections=3)


def test_a_server_whose_connections_all_work_still_says_how_it_is_but_scores_no_more():
    async def test(app, make, port):
        [replica] = make.made
        replica.may_score.clear()
        working = [asyncio.create_task(asked(port, "/score", json=body(1))) for _ in range(3)]
        await until(lambda: app._num_requests == 3)
        assert [await asked(port, path) for path in ("/ready", "/health", "/metrics")] == [200] * 3
        assert await asked(port, "/score", json=body(1), headers=JSON) == 429
        slow = [await opened(port, app, UNFINISHED) for _ in range(NUM_RESERVED + 4)]
        assert await asked(port) == 200 and app.connections.num_open <= 3 + NUM_RESERVED
        replica.may_score.set()
        assert await asyncio.gather(*working) == [200] * 3
        assert await asked(port, "/score", json=body(1)) == 200
        assert len(slow) > NUM_RESERVED

    listening(test, max_connections=3)


def test_connections_leave_room_for_the_other_files_of_the_process(monkeypatch):
    def may_open(num):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (num, num))

    settings = ServerSettings(max_connections=1000)
    may_open(300)
    assert 100 < connection_limit(settings, num_replicas=4) < 300 - 4 * 4
    for enough in (10_000, resource.RLIM_INFINITY):
        may_open(enough)
        assert connection_limit(settings, num_replicas=4) == 1000
    may_open(80)
    with pytest.raises(ConfigError, match=r"may open 80 files \(ulimit -n\)"):
        connection_limit(settings, num_replicas=4)


def test_a_line_of_the_code_cannot_fill_the_log():
    now = [0.0]
    limit = RateLimit(lambda: now[0])

    def logged(lineno, num):
        records = [logging.LogRecord("a", logging.ERROR, "a.py", lineno, "no %d", (i,), None) for i in range(num)]
        return [record.getMessage() for record in records if limit.filter(record)]

    first = logged(1, 100)
    assert len(first) == MAX_RECORDS and first[0] == "no 0" and "more like this are left out for 60 s" in first[-1]
    assert logged(2, 1) == ["no 0"]
    now[0] = WINDOW_S
    assert logged(1, 2) == [f"no 0 ({100 - MAX_RECORDS} more like this were left out)", "no 1"]


@contextlib.contextmanager
def many_files(num):
    """Let this process open so many files for a while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < num:
        pytest.skip(f"this machine lets a process open {hard} files, the test needs {num}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, num) if soft >= 0 else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_ready(port):
    """True if /ready answers 200. A connection that is refused or answered otherwise counts as no."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=600) as link:
            link.sendall(READY)
            return link.recv(100).startswith(b"HTTP/1.1 200 ")
    except OSError:
        return False


@pytest.mark.slow
def test_two_thousand_slow_connections_neither_starve_readiness_nor_fill_the_log(tmp_path):
    log, config = tmp_path / "log", tmp_path / "service.yaml"
    config.write_text("rewards: [{name: jpeg, scorer: jpeg_compressibility, num_gpus: 0}]")
    with contextlib.ExitStack() as stack:
        port, stream = stack.enter_context(held_port()), stack.enter_context(log.open("w"))
        server = subprocess.Popen(
            [sys.executable, "-c", ATTACKED, "--config", str(config), "--port", str(port)], stderr=stream
        )
        stack.callback(server.wait)
        stack.callback(server.kill)
        end = time.monotonic() + 600
        while not is_ready(port):
            assert server.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        with many_files(4000), contextlib.ExitStack() as attackers:
            for num in range(1, 2001):
                link = attackers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=600))
                with contextlib.suppress(ConnectionError):  # it has made room for others already
                    link.sendall(UNFINISHED)
                if num % 50 == 0:
                    assert is_ready(port), f"/ready did not answer beside {num} slow connections"
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
    assert "serving" in log.read_text() and log.stat().st_size < 2**20
