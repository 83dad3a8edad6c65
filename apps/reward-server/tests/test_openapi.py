"""The OpenAPI document against the server that it describes, and bodies that no client would send."""

import asyncio
import contextlib
import json
import random
import socket
import threading

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS
from schemathesis.core.result import Ok

from unirl.reward.wire import BINARY_TYPE, encode_binary
from unirl.reward_server.app import RewardServer
from unirl.reward_server.openapi import document
from unirl.reward_server.settings import ServerSettings, Settings

from .fakes import Maker, reward, sample
from .test_app import body, started

SERVER = ServerSettings(max_samples=4, max_image_pixels=256, max_text_chars=1000)
WHOLE = b"".join(encode_binary([sample("a"), sample("b", size=3)], ["r"]))
DOCUMENTED = {200, 400, 413, 415, 422}

schema = schemathesis.openapi.from_dict(document(SERVER, needs_token=False))
schemathesis.openapi.media_type(BINARY_TYPE, st.just(WHOLE) | st.binary(max_size=300))


@pytest.fixture(scope="module")
def port():
    """Port of a server whose replicas live in a thread next to the tests."""
    found = {}
    ready = threading.Event()

    async def run():
        found["stop"] = asyncio.Event()
        found["loop"] = asyncio.get_running_loop()
        found["app"] = RewardServer(Settings((reward(), reward("q")), SERVER), make_replica=Maker())
        async with await started(found["app"]) as client:
            found["port"] = client.port
            ready.set()
            await found["stop"].wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(60)
    yield found["port"]
    held = found["app"]._bodies.num_pending, found["app"]._num_requests
    found["loop"].call_soon_threadsafe(found["stop"].set)
    thread.join(60)
    assert not thread.is_alive() and held == (0, 0)


def answers_generated_requests(operation):
    """A test of one operation: what schemathesis makes of the document gets what the document says."""

    @schema.include(path=operation.path, method=operation.method.upper()).parametrize()
    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def test(case, port):
        # A schema cannot say what makes an image of base64, so a body that fits it may still get 400.
        case.call_and_validate(
            base_url=f"http://127.0.0.1:{port}",
            excluded_checks=CHECKS.get_by_names(["positive_data_acceptance"]),
        )

    return test


for _found in schema.get_all_operations():
    # A name each: tests of one name would be one to whoever deals tests out by name.
    assert isinstance(_found, Ok), _found
    _operation = _found.ok()
    _name = f"test_{_operation.method}{_operation.path.replace('/', '_').replace('.', '_')}_answers_as_documented"
    globals()[_name] = answers_generated_requests(_operation)


def raw(port, content, *, ends=False):
    """The status of what the server answers to these bytes; None where it hangs up. ends: nothing more follows."""
    with socket.create_connection(("127.0.0.1", port), timeout=600) as link, contextlib.suppress(ConnectionError):
        link.sendall(content)
        if ends:
            link.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := link.recv(65536):
            answer += chunk
        return int(answer.split(b" ", 2)[1]) if answer else None


def changed(data, rng):
    """Cut, repeated, or with some bytes replaced."""
    content = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(content))
        content[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
    return bytes(content[: rng.randrange(1, len(content))] if rng.random() < 0.2 else content)


def test_damaged_bodies_and_requests_get_a_documented_status_and_the_server_goes_on(port):
    rng = random.Random(0)
    bodies = [("application/json", json.dumps(body(1, 2)).encode()), (BINARY_TYPE, WHOLE)]
    for i in range(200):
        kind, data = bodies[i % 2]
        content = changed(data, rng) if i % 4 < 3 else data
        head = f"POST /score HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Type: {kind}\r\n"
        head = f"{head}Content-Length: {len(content)}\r\n\r\n".encode()
        if i % 4 < 3:
            assert raw(port, head + content) in DOCUMENTED
        else:
            status = raw(port, changed(head, rng) + content, ends=True)
            assert status is None or 200 <= status < 500
    whole = b"POST /score HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Type: application/json\r\n"
    data = json.dumps(body(1)).encode()
    assert raw(port, whole + f"Content-Length: {len(data)}\r\n\r\n".encode() + data) == 200
