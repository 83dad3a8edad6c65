"""The server's side of a replica: what crosses the socket when calls are cancelled."""

import asyncio
import os
import signal
import sys

import pytest

from unirl.reward_server import replica as replica_module
from unirl.reward_server.replica import ProcessReplica, ReplicaDied

from .fakes import reward, sample

WORKER = """
import json, signal, socket, sys
from unirl.reward_server.frames import Frame, receive_frame, send_frame
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
link = socket.socket(fileno=int(sys.argv[2]))
receive_frame(link)
send_frame(link, Frame.READY, 0, b"{}")
signal.sigwait([signal.SIGUSR1])
seen = []
while True:
    kind, task, payload = receive_frame(link)
    seen.append([kind.name, task, len(payload)])
    if len(seen) == 3:
        send_frame(link, Frame.ANSWER, task, json.dumps(seen).encode())
"""
"""Reads nothing after its start until it gets SIGUSR1; then answers the third frame with all it saw."""


@pytest.fixture
def deaf_replica(monkeypatch):
    monkeypatch.setattr(replica_module, "worker_command", lambda _: [sys.executable, "-c", WORKER])
    return lambda: ProcessReplica(reward(), [], start_timeout_s=120)


def test_a_call_that_is_cancelled_while_its_samples_are_sent_leaves_whole_frames(deaf_replica):
    async def run():
        replica = deaf_replica()
        await replica.start()
        large = sample("large", size=1024)  # 3 MiB, far more than a socket's buffer
        call = asyncio.create_task(replica.score([large]))
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.sleep(0)
        small = asyncio.create_task(replica.score([sample("small")]))
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGUSR1)
        with pytest.raises(asyncio.CancelledError):
            await call
        seen = await small
        await replica.stop()
        return seen

    first, *others = asyncio.run(asyncio.wait_for(run(), 240))
    kind, task, num_bytes = first
    assert kind == "SCORE" and num_bytes > 3 * 1024**2 and sorted(each[0] for each in others) == ["CANCEL", "SCORE"]
    assert ["CANCEL", task, 0] in others


def test_stopping_a_replica_that_does_not_read_ends_the_calls_to_it(deaf_replica):
    async def run():
        replica = deaf_replica()
        await replica.start()
        call = asyncio.create_task(replica.score([sample("large", size=1024)]))
        await asyncio.sleep(0.1)
        await replica.stop()
        with pytest.raises(ReplicaDied):
            await call
        with pytest.raises(ReplicaDied):
            await replica.score([sample("after")])

    asyncio.run(asyncio.wait_for(run(), 240))
