"""Loads and hurts its own reward server, and prints what happened as Markdown.

    uv run --package unirl-reward-server python apps/reward-server/bench/load.py [PART ...]

    load    throughput and latency at 1, 8, 64 and 256 clients; CPU time per image of the server and of its replica;
            the binary body against JSON
    bodies  one image of 512 x 512 a request, as JSON and binary, at 8 and 64 clients, in turns over --rounds; with
            --beside the folders of other checkouts, their servers take part in every round
    faults  a replica killed under load, a slow scorer, a full queue, clients that leave, half-sent bodies
    slow    2,000 connections that send a byte of their headers now and then, against a server of 300 files; /ready
            and scoring at the same time, and the size of the log; --beside as for bodies
    fuzz    10,000 damaged requests
    steady  memory over --minutes of load
Every client is a keep-alive connection that waits for its answer before it asks again.
"""

# ruff: noqa: INP001 - a script, no package
from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
import yaml
from aiohttp.test_utils import unused_port
from scorers import tiny_clip

from unirl.reward.wire import BINARY_TYPE, JSON_TYPE, encode_binary, encode_json, samples_of
from unirl.types.media import Images, Texts
from unirl.types.reward import RewardRequest

CLIENTS = (1, 8, 64, 256)


def body_of(reward: str, *, num: int, side: int, kind: str, seed: int = 0) -> tuple[bytes, list[float]]:
    """A body of random images and what the null scorer must answer."""
    pixels = torch.randint(0, 256, (num, 3, side, side), generator=torch.Generator().manual_seed(seed)).float() / 255
    request = RewardRequest(
        sample_ids=[f"s{i}" for i in range(num)],
        primitives={"text": Texts(texts=["a red circle"] * num)},
        generated={"image": Images(pixels=pixels)},
    )
    samples = samples_of(request, "uint8")
    encoded = encode_json(samples, [reward]) if kind == JSON_TYPE else b"".join(encode_binary(samples, [reward]))
    return encoded, pixels[:, :, 0].mean((1, 2)).tolist()


class Link:
    """A keep-alive connection that hands a body to the system as it is: the load should cost what the server costs."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def score(self, body: bytes, kind: str) -> int:
        """Status of the answer, which is read to its end."""
        loop = asyncio.get_running_loop()
        head = f"POST /score HTTP/1.1\r\nHost: h\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(self._socket, head.encode())
        await loop.sock_sendall(self._socket, body)
        answer = b""
        while b"\r\n\r\n" not in answer or len(answer) < self._length(answer):
            part = await loop.sock_recv(self._socket, 2**16)
            if not part:
                raise RuntimeError(f"the connection ended within an answer: {answer[:200]!r}")
            answer += part
        return int(answer.split(b" ", 2)[1])

    @staticmethod
    def _length(answer: bytes) -> int:
        head, _, _ = answer.partition(b"\r\n\r\n")
        [size] = [
            line.partition(b":")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
        ]
        return len(head) + 4 + int(size)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Server:
    """A server in its own process."""

    def __init__(
        self,
        folder: Path,
        rewards: list[dict[str, Any]],
        *,
        checkout: Path | None = None,
        max_files: int | None = None,
        **server: Any,
    ) -> None:  # Any: settings
        """checkout: the folder whose sources run; None runs those of this environment. max_files: as `ulimit -n`."""
        self._max_files = max_files
        self._sources = [] if checkout is None else [str(path) for path in checkout.glob("*/*/src")]
        self.url = f"http://127.0.0.1:{unused_port()}"
        self.port = int(self.url.rpartition(":")[2])
        self._config = folder / "service.yaml"
        server = {"port": self.port, **server}
        self._config.write_text(yaml.safe_dump({"server": server, "rewards": [{"num_gpus": 0, **r} for r in rewards]}))
        self.log = folder / "server.log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id of the server itself, without its replicas."""
        if self._process is None:
            raise RuntimeError("the server does not run")
        return self._process.pid

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[aiohttp.ClientSession]:
        """A session with the server once it is ready; it is stopped by SIGTERM."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*self._sources, str(Path(__file__).parent)])}
        with self.log.open("w") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "unirl.reward_server.main", "--config", str(self._config)),
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=self._limit_files,
            )
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
            async with asyncio.timeout(300):
                while not await self._is_ready(session):
                    await asyncio.sleep(0.2)
            yield session
        self._process.send_signal(signal.SIGTERM)
        code = await self._process.wait()
        if code != 0:
            raise RuntimeError(f"the server ended with {code}: {self.log.read_text()[-2000:]}")

    def _limit_files(self) -> None:
        if self._max_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._max_files, self._max_files))

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with session.get(f"{self.url}/ready") as answer:
                return answer.status == 200
        return False

    async def status(self, session: aiohttp.ClientSession) -> dict[str, Any]:  # Any: JSON values
        """What the status page shows."""
        async with session.get(f"{self.url}/status.json") as answer:
            return await answer.json()

    async def score(self, session: aiohttp.ClientSession, body: bytes, kind: str) -> tuple[int, bytes]:
        """Status and body of the answer."""
        async with session.post(f"{self.url}/score", data=body, headers={"Content-Type": kind}) as answer:
            return answer.status, await answer.read()


def cpu_s(pid: int) -> float:
    """User and system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def hammer(
    server: Server, body: bytes, kind: str, *, clients: int, seconds: float
) -> tuple[list[float], Counter[int], float]:
    """Latencies, statuses and the time it took."""
    latencies: list[float] = []
    statuses: Counter[int] = Counter()
    end = time.monotonic() + seconds

    async def client() -> None:
        with contextlib.closing(Link(server.port)) as link:
            while time.monotonic() < end:
                started = time.monotonic()
                status = await link.score(body, kind)
                latencies.append(time.monotonic() - started)
                statuses[status] += 1

    started = time.monotonic()
    await asyncio.gather(*(client() for _ in range(clients)))
    return latencies, statuses, time.monotonic() - started


async def load(folder: Path, seconds: float) -> None:
    """Throughput, latency, CPU and the two bodies."""
    tiny_clip(str(folder / "clip"))
    rewards = [
        {"name": "null", "scorer": "scorers.NullScorer"},
        {"name": "clip", "scorer": "clip", "params": {"model": str(folder / "clip"), "batch_size": 32}},
    ]
    server = Server(folder, rewards)
    async with server.running() as session:
        say("| scorer | body | clients | images/s | p50 ms | p95 ms | p99 ms | server ms CPU | replica ms CPU |")
        say("|---|---|---|---|---|---|---|---|---|")
        for index, (reward, side, num) in enumerate((("null", 64, 1), ("clip", 224, 4))):
            for clients in CLIENTS:
                body, _ = body_of(reward, num=num, side=side, kind=BINARY_TYPE)
                await measure(server, session, (reward, index), body, BINARY_TYPE, num, clients, seconds)
        for kind in (BINARY_TYPE, JSON_TYPE):
            body, _ = body_of("null", num=4, side=512, kind=kind)
            await measure(server, session, ("null", 0), body, kind, 4, 8, seconds)


async def bodies(folder: Path, seconds: float, rounds: int, beside: list[Path]) -> None:
    """CPU time of a request and requests per second, by body and number of clients: medians over the rounds."""
    checkouts: dict[str, Path | None] = {path.name: path for path in beside} | {"this": None}
    cases = [(kind, clients) for kind in (JSON_TYPE, BINARY_TYPE) for clients in (8, 64)]
    data = {kind: body_of("null", num=1, side=512, kind=kind)[0] for kind in (JSON_TYPE, BINARY_TYPE)}
    found: dict[tuple[str, str, int], list[tuple[float, float, float]]] = {}
    async with contextlib.AsyncExitStack() as stack:
        running = {}
        for name, checkout in checkouts.items():
            (folder / name).mkdir()
            server = Server(folder / name, [{"name": "null", "scorer": "scorers.NullScorer"}], checkout=checkout)
            running[name] = server, await stack.enter_async_context(server.running())
        for _ in range(rounds):
            for kind, clients in cases:
                for name, (server, session) in running.items():
                    row = await cost(server, session, data[kind], kind, clients=clients, seconds=seconds)
                    found.setdefault((name, kind, clients), []).append(row)
    say("| server | body | clients | requests/s | server ms CPU | replica ms CPU | together |")
    say("|---|---|---|---|---|---|---|")
    for (name, kind, clients), rows in found.items():
        rate, server_ms, replica_ms = np.median(rows, 0)
        together = float(np.median([own + replica for _, own, replica in rows]))
        body = "JSON" if kind == JSON_TYPE else "binary"
        say(f"| {name} | {body} | {clients} | {rate:.0f} | {server_ms:.2f} | {replica_ms:.2f} | {together:.2f} |")


async def cost(
    server: Server, session: aiohttp.ClientSession, body: bytes, kind: str, *, clients: int, seconds: float
) -> tuple[float, float, float]:
    """Requests per second, and CPU milliseconds of a request: of the server and of its replica."""
    await hammer(server, body, kind, clients=clients, seconds=seconds / 5)
    replica = (await server.status(session))["rewards"][0]["replicas"][0]["pid"]
    before = cpu_s(server.pid), cpu_s(replica)
    latencies, statuses, took = await hammer(server, body, kind, clients=clients, seconds=seconds)
    used = cpu_s(server.pid) - before[0], cpu_s(replica) - before[1]
    if set(statuses) != {200}:
        raise RuntimeError(f"statuses {statuses}")
    num = len(latencies)
    return num / took, 1000 * used[0] / num, 1000 * used[1] / num


async def measure(
    server: Server,
    session: aiohttp.ClientSession,
    reward: tuple[str, int],
    body: bytes,
    kind: str,
    num: int,
    clients: int,
    seconds: float,
) -> None:
    """One row of the table of `load`."""
    await hammer(server, body, kind, clients=clients, seconds=seconds / 5)
    replica = (await server.status(session))["rewards"][reward[1]]["replicas"][0]["pid"]
    before = cpu_s(server.pid), cpu_s(replica)
    latencies, statuses, took = await hammer(server, body, kind, clients=clients, seconds=seconds)
    used = cpu_s(server.pid) - before[0], cpu_s(replica) - before[1]
    if set(statuses) != {200}:
        raise RuntimeError(f"statuses {statuses}")
    images = len(latencies) * num
    p50, p95, p99 = np.percentile(latencies, [50, 95, 99]) * 1000
    per_image = [f"{1000 * value / images:.2f}" for value in used]
    name = f"{'binary' if kind == BINARY_TYPE else 'JSON'}, {num} x {len(body) // num // 1024} KiB"
    say(
        f"| {reward[0]} | {name} | {clients} | {images / took:.0f} | {p50:.1f} | {p95:.1f} | {p99:.1f} | "
        f"{per_image[0]} | {per_image[1]} |"
    )


async def faults(folder: Path, seconds: float) -> None:
    """What happens when something breaks."""
    rewards = [
        {"name": "null", "scorer": "scorers.NullScorer", "num_replicas": 2},
        {"name": "slow", "scorer": "scorers.SlowScorer", "params": {"seconds": 0.2}, "max_queue": 16},
    ]
    server = Server(folder, rewards, score_timeout_s=5, body_timeout_s=1)
    async with server.running() as session:
        await kill_replica(server, session, seconds)
        body, _ = body_of("slow", num=2, side=16, kind=BINARY_TYPE)
        latencies, statuses, _ = await hammer(server, body, BINARY_TYPE, clients=32, seconds=seconds)
        p50 = 1000 * float(np.median(latencies))
        say(f"- Slow scorer, 32 clients, queue of 16 samples: statuses {dict(statuses)}, p50 {p50:.0f} ms.")
        await leave(server, session, body)
        await half_sent(server, session)
        status, _ = await server.score(session, body, BINARY_TYPE)
        say(f"- After all that: status {status}, bytes held {(await server.status(session))['pending_bytes']}.")


async def kill_replica(server: Server, session: aiohttp.ClientSession, seconds: float) -> None:
    """SIGKILL under load; every answer is compared with what it must be."""
    bodies = [body_of("null", num=4, side=32, kind=BINARY_TYPE, seed=i) for i in range(32)]
    end = time.monotonic() + seconds
    right = wrong = kills = 0

    async def client(index: int) -> None:
        nonlocal right, wrong
        rng = random.Random(index)
        while time.monotonic() < end:
            body, expected = rng.choice(bodies)
            status, content = await server.score(session, body, BINARY_TYPE)
            got = [each["null"]["reward"] for each in json.loads(content)["results"]] if status == 200 else None
            right, wrong = (right + 1, wrong) if got == expected else (right, wrong + 1)

    async def killer() -> None:
        nonlocal kills
        while time.monotonic() < end:
            await asyncio.sleep(seconds / 5)
            [null] = [each for each in (await server.status(session))["rewards"] if each["name"] == "null"]
            ready = [each["pid"] for each in null["replicas"] if each["state"] == "ready"]
            if len(ready) == 2:
                os.kill(ready[0], signal.SIGKILL)
                kills += 1

    await asyncio.gather(killer(), *(client(i) for i in range(16)))
    say(f"- {kills} replicas killed under load of 16 clients: {right} requests answered right, {wrong} wrong or lost.")


async def leave(server: Server, session: aiohttp.ClientSession, body: bytes) -> None:
    """Clients that hang up while they wait."""
    calls = [asyncio.create_task(server.score(session, body, BINARY_TYPE)) for _ in range(8)]
    while not (await server.status(session))["requests_in_work"]:
        await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    started = time.monotonic()
    while (await server.status(session))["requests_in_work"]:
        await asyncio.sleep(0.01)
    say(
        f"- 8 clients gone while waiting: their work was cancelled within {1000 * (time.monotonic() - started):.0f} ms."
    )


async def half_sent(server: Server, session: aiohttp.ClientSession) -> None:
    """Bodies that never end."""
    head = b"POST /score HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n{"
    links = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(50)]
    for _, writer in links:
        writer.write(head)
    answers = Counter([(await reader.readline()).decode().strip() for reader, _ in links])
    for _, writer in links:
        writer.close()
    say(f"- 50 half-sent bodies: {dict(answers)}.")


async def slow(folder: Path, beside: list[Path]) -> None:
    """Connections that never finish their headers, all from one address."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    say("| server | /ready answered | slowest ms | scored meanwhile | log KiB | server CPU s |")
    say("|---|---|---|---|---|---|")
    checkouts: dict[str, Path | None] = {path.name: path for path in beside} | {"this": None}
    for name, checkout in checkouts.items():
        (folder / name).mkdir()
        rewards = [{"name": "null", "scorer": "scorers.NullScorer"}]
        server = Server(folder / name, rewards, checkout=checkout, max_files=300)
        async with server.running():
            before = cpu_s(server.pid)
            found = await attacked(server)
            used = cpu_s(server.pid) - before
        answered = [seconds for seconds in found["/ready"] if seconds is not None]
        scored = [seconds for seconds in found["/score"] if seconds is not None]
        say(
            f"| {name} | {len(answered)} of {len(found['/ready'])} | {1000 * max(answered, default=0):.0f} | "
            f"{len(scored)} of {len(found['/score'])} | {server.log.stat().st_size / 1024:.0f} | {used:.1f} |"
        )


async def attacked(server: Server) -> dict[str, list[float | None]]:
    """Seconds of every answer with 2,000 slow connections, while they are opened and while they stay open; None without
    an answer."""
    body, _ = body_of("null", num=1, side=16, kind=BINARY_TYPE)
    head = f"POST /score HTTP/1.1\r\nHost: h\r\nContent-Type: {BINARY_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
    asked = {"/ready": b"GET /ready HTTP/1.1\r\nHost: h\r\n\r\n", "/score": head.encode() + body}
    found: dict[str, list[float | None]] = {path: [] for path in asked}
    links: list[asyncio.StreamWriter] = []

    async def probe(path: str) -> None:
        started = time.monotonic()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                with contextlib.closing(writer):
                    writer.write(asked[path])
                    if b" 200 " in await reader.readline():
                        found[path].append(time.monotonic() - started)
                        return
        found[path].append(None)

    for num in range(1, 2001):
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(2):
                links.append((await asyncio.open_connection("127.0.0.1", server.port))[1])
                links[-1].write(b"GET /ready HTTP/1.1\r\nX-Slow: ")
        if num % 100 == 0:
            await asyncio.gather(*map(probe, asked))
    for _ in range(10):
        for link in links:
            if not link.is_closing():
                link.write(b"a")
        await asyncio.gather(*map(probe, asked), asyncio.sleep(0.5))
    for link in links:
        link.close()
    return found


async def fuzz(folder: Path, num: int) -> None:
    """Damaged bodies and heads."""
    server = Server(folder, [{"name": "null", "scorer": "scorers.NullScorer"}], body_timeout_s=2)
    rng = random.Random(0)
    bodies = [(kind, body_of("null", num=2, side=8, kind=kind)[0]) for kind in (JSON_TYPE, BINARY_TYPE)]
    statuses: Counter[str] = Counter()

    async def one(index: int) -> None:
        kind, body = bodies[index % 2]
        content = damaged(body, rng)
        head = f"POST /score HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Type: {kind}\r\n"
        head_bytes = f"{head}Content-Length: {len(content)}\r\n\r\n".encode()
        if index % 5 == 0:
            head_bytes = damaged(head_bytes, rng)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        with contextlib.suppress(ConnectionError):
            writer.write(head_bytes + content)
            if b"\r\n\r\n" not in head_bytes:
                writer.write_eof()
            line = await asyncio.wait_for(reader.readline(), 60)
            statuses[line.split(b" ")[1].decode() if line else "closed"] += 1
        writer.close()

    async with server.running() as session:
        before = memory_mib(server.pid)
        for start in range(0, num, 32):
            await asyncio.gather(*(one(i) for i in range(start, min(start + 32, num))))
        content, _ = body_of("null", num=1, side=8, kind=JSON_TYPE)
        status, _ = await server.score(session, content, JSON_TYPE)
        after = memory_mib(server.pid)
        say(f"- {num} damaged requests: {dict(sorted(statuses.items()))}; then one whole: {status}.")
        say(f"- Memory of the server before and after them: {before:.0f} and {after:.0f} MiB.")


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Cut, or with some bytes replaced, added or taken away."""
    content = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(content))
        content[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
    return bytes(content[: rng.randrange(1, len(content))] if rng.random() < 0.2 else content)


async def steady(folder: Path, minutes: float) -> None:
    """Memory of the server and its replica under mixed load."""
    server = Server(folder, [{"name": "null", "scorer": "scorers.NullScorer"}])
    bodies = [(kind, body_of("null", num=4, side=256, kind=kind)[0]) for kind in (BINARY_TYPE, JSON_TYPE)]
    async with server.running() as session:
        rows, num, parts = [], 0, 10
        for _ in range(parts):
            for kind, body in bodies:
                latencies, _, _ = await hammer(
                    server, body, kind, clients=8, seconds=60 * minutes / parts / len(bodies)
                )
                num += len(latencies)
            replica = (await server.status(session))["rewards"][0]["replicas"][0]["pid"]
            rows.append((memory_mib(server.pid), memory_mib(replica)))
        shown = [" ".join(f"{row[i]:.0f}" for row in rows) for i in (0, 1)]
        say(f"- {minutes:g} minutes, {num} requests: MiB of the server {shown[0]}; of its replica {shown[1]}.")


def say(line: str) -> None:
    """Print at once, for who watches."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the parts that are named, all without names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="{load,bodies,faults,slow,fuzz,steady}")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--minutes", type=float, default=10.0, help="of steady")
    parser.add_argument("--requests", type=int, default=10_000, help="of fuzz")
    parser.add_argument("--rounds", type=int, default=5, help="of bodies")
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], help="of bodies and slow: folders of other checkouts"
    )
    options = parser.parse_args()
    run: dict[str, Callable[[Path], Any]] = {  # Any: coroutines
        "load": lambda folder: load(folder, options.seconds),
        "bodies": lambda folder: bodies(folder, options.seconds, options.rounds, options.beside),
        "faults": lambda folder: faults(folder, options.seconds),
        "slow": lambda folder: slow(folder, options.beside),
        "fuzz": lambda folder: fuzz(folder, options.requests),
        "steady": lambda folder: steady(folder, options.minutes),
    }
    if unknown := sorted(set(options.parts) - set(run)):
        parser.error(f"no part is called {unknown[0]!r}; there are {', '.join(run)}")
    for part in options.parts or run:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(run[part](Path(folder)))


if __name__ == "__main__":
    main()
