"""Replicas in this process, and samples for them."""

import asyncio
import contextlib
import dataclasses
import socket

import numpy as np

from unirl.reward.wire import WireSample
from unirl.reward_server.metrics import Metrics
from unirl.reward_server.pool import RewardPool
from unirl.reward_server.replica import ReplicaDied
from unirl.reward_server.settings import RewardSettings


class FakeReplica:
    """Stands for a process: scores {"reward": mean byte of the media, or length of a text} once `may_score` is set."""

    def __init__(self, fails=None, batch_size=4):
        self.card = {"batch_size": batch_size}
        self.pid = None
        self.fails = fails
        self.batches = []
        self.cancelled = 0
        self.is_stopped = False
        self.may_score = asyncio.Event()
        self.may_score.set()
        self.asked = asyncio.Event()
        self.ended = asyncio.Event()

    async def start(self):
        if self.fails is not None:
            raise self.fails

    async def score(self, samples):
        self.batches.append([sample.id for sample in samples])
        self.asked.set()
        ended, free = asyncio.create_task(self.ended.wait()), asyncio.create_task(self.may_score.wait())
        try:
            await asyncio.wait([ended, free], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            ended.cancel()
            free.cancel()
        if self.ended.is_set():
            raise ReplicaDied("killed")
        return [scored(sample) for sample in samples]

    async def died(self):
        await self.ended.wait()

    async def stop(self):
        self.is_stopped = True
        self.ended.set()


def scored(sample):
    if sample.prompt == "explode":
        return "ValueError: cannot open /srv/models/secret/weights.bin: boom"
    if isinstance(sample.media, str):
        return {"reward": float(len(sample.media))}
    return {"reward": float(np.mean(sample.media)), "frames": float(sample.media.ndim)}


def sample(name, size=2, value=7, prompt="p"):
    return WireSample(id=str(name), kind="image", media=np.full((size, size, 3), value, np.uint8), prompt=prompt)


class Maker:
    """Makes replicas and keeps them; `following` are those to hand out first."""

    def __init__(self, *following):
        self.following = list(following)
        self.made = []

    def __call__(self, *_):
        replica = self.following.pop(0) if self.following else FakeReplica()
        self.made.append(replica)
        return replica


def reward(name="r", **changes):
    return dataclasses.replace(RewardSettings(name, "shapes", num_gpus=0, max_wait_ms=0), **changes)


def pool_of(make, *, timeout_s=20.0, **changes):
    return RewardPool(reward(**changes), make, Metrics().of("r"), timeout_s, first_backoff_s=0.0)


@contextlib.contextmanager
def held_port():
    """A free port of 127.0.0.1 that no other process is given meanwhile: it is bound and not listened on, and a server,
    which may use an address again, can listen there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


async def until(condition):
    """Let other tasks run until the condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)
