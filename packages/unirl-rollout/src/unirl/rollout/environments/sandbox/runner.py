"""Starts code of a model in a sandbox, reads what it writes, and ends it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from unirl.rollout.environments.sandbox import child
from unirl.rollout.environments.sandbox.filters import refused_calls
from unirl.types.errors import ConfigError

_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_START_S = 10.0
_STOP_S = 5.0
"""Longest time that ending a sandbox may take."""
Isolation = Literal["namespaces", "landlock"]
"""How code is kept apart."""
_LANDLOCK_HELP = (
    "It needs Linux 5.13 with Landlock and seccomp: add landlock to the list lsm= of the kernel's command line, and in "
    "a container allow the calls landlock_create_ruleset, landlock_add_rule and landlock_restrict_self."
)
_HELP = (
    "It needs Linux 5.12 with user namespaces that users may make and seccomp. In a container they are often "
    "forbidden: docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined allows them; on "
    "Ubuntu 24.04 so does sysctl kernel.apparmor_restrict_unprivileged_userns=0, else sysctl "
    "user.max_user_namespaces=10000. Where namespaces stay forbidden, isolation: landlock does without."
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What code may use."""

    time_s: float
    """From its start, the sandbox being ready, to its end."""
    memory_bytes: int
    """Addresses of each of its processes."""
    files_bytes: int
    """All files in its folder together; they are in memory."""
    output_bytes: int
    """That it may write to standard output and error."""
    num_processes: int
    """Processes and threads at a time, the first included."""


@dataclass(frozen=True)
class Ran:
    """What came of code."""

    end: Literal["ended", "time", "output"]
    """Which limit stopped it, if one did."""
    status: int
    """0 if it ended well, 128 + a signal if one ended it, 1 if it raised."""
    output: str
    """Standard output and error, at most `output_bytes`."""


class Sandbox:
    """A place for code that must not reach anything: each run has its processes, network without a device, empty
    environment and folder in memory, all of which end with it.

    libraries: folders with modules that the code may import, besides the standard library.
    isolation: "landlock" does without namespaces: the code has no folder, sees that there are other processes and
    files, and reaches none of them.
    """

    def __init__(self, limits: Limits, libraries: Sequence[str] = (), *, isolation: Isolation = "namespaces") -> None:
        self._limits = limits
        self._isolation = isolation
        self._help = _LANDLOCK_HELP if isolation == "landlock" else _HELP
        self._libraries = [str(Path(folder).resolve()) for folder in libraries]
        python = [f"{sys.base_prefix}/lib", f"{sys.base_exec_prefix}/lib", sysconfig.get_path("stdlib")]
        wanted = [*_SYSTEM_LIBRARIES, *python, *self._libraries]
        self._readable = [path for path in dict.fromkeys(wanted) if os.path.isdir(path)]
        self._filter = refused_calls(
            starts_processes=limits.num_processes > 1, is_among_others=isolation == "landlock"
        ).hex()

    def run(self, code: str) -> Ran:
        """Run code to its end or its limits. Raises ConfigError if the machine cannot isolate it."""
        status, theirs = os.pipe()
        command = [sys.executable, "-P", "-s", "-S", "-B", child.__file__, str(theirs)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            cwd="/",
            # Sets have one order in every run; libraries of mathematics start no threads.
            env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        os.close(theirs)
        try:
            return self._ran(process, code, status)
        finally:
            _stop(process, has_namespace=self._isolation == "namespaces")
            os.close(status)

    def verify(self) -> None:
        """Raise ConfigError with what code could reach or use on this machine."""
        with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
            secret = Path(folder, "secret")
            secret.write_text("secret")
            facts = {
                "port": server.getsockname()[1],
                "secret": str(secret),
                "readable": self._readable,
                "memory_bytes": self._limits.memory_bytes,
                "num_processes": self._limits.num_processes,
                "has_namespace": self._isolation == "namespaces",
                "owner": os.getpid(),
            }
            ran = self.run(f"FACTS = {facts!r}\n{_PROBE}")
            if sorted(path.name for path in Path(folder).iterdir()) != ["secret"]:
                raise ConfigError(f"code of a model can write files on this machine outside its folder. {self._help}")
        if ran.end != "ended" or ran.status or not ran.output.startswith("["):
            raise ConfigError(f"the sandbox for code of a model does not work: {ran.output or ran}")
        if reached := json.loads(ran.output):
            raise ConfigError(f"code of a model is not isolated on this machine: {'; '.join(reached)}. {self._help}")

    def _ran(self, process: subprocess.Popen[bytes], code: str, status: int) -> Ran:
        stdin, stdout = cast("BinaryIO", process.stdin), cast("BinaryIO", process.stdout)  # pipes, as asked for
        with contextlib.suppress(BrokenPipeError), stdin:  # then its status says why
            stdin.write(json.dumps(self._request(code)).encode())
        refusal, has_begun = _read(status, 10_000, time.monotonic() + _START_S)
        if refusal or not has_begun:
            reason = refusal.decode() or f"it does not start within {_START_S:g} s"
            raise ConfigError(f"this machine cannot isolate code of a model: {reason}. {self._help}")
        deadline = time.monotonic() + self._limits.time_s
        most = self._limits.output_bytes
        written, is_all = _read(stdout.fileno(), most + 1, deadline)
        output = written[:most].decode(errors="replace")
        if len(written) > most:
            return Ran("output", 1, output)
        if not is_all:
            return Ran("time", 1, output)
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()))
            return Ran("ended", status if status >= 0 else 128 - status, output)
        except subprocess.TimeoutExpired:
            return Ran("time", 1, output)

    def _request(self, code: str) -> dict[str, Any]:  # Any: JSON
        limits = self._limits
        return {
            "owner": os.getpid(),
            "isolation": self._isolation,
            "code": code,
            "readable": self._readable,
            "libraries": self._libraries,
            "files_bytes": limits.files_bytes,
            "filter": self._filter,
            "limits": {
                "RLIMIT_AS": limits.memory_bytes,
                "RLIMIT_CPU": math.ceil(limits.time_s) + 1,
                "RLIMIT_FSIZE": limits.files_bytes,
                "RLIMIT_NOFILE": 64,
                "RLIMIT_CORE": 0,
                "RLIMIT_MEMLOCK": 0,
                "RLIMIT_MSGQUEUE": 0,
                # A single process is what the filter allows: no limit counts the processes of root.
                **({} if limits.num_processes == 1 else {"RLIMIT_NPROC": limits.num_processes}),
            },
        }


def _read(descriptor: int, most: int, deadline: float) -> tuple[bytes, bool]:
    """What is written there until its end, the deadline or `most` bytes, and True if it came to its end."""
    found = b""
    while len(found) < most:
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return found, False
        part = os.read(descriptor, min(65536, most - len(found)))
        if not part:
            return found, True
        found += part
    return found, False


def _stop(process: subprocess.Popen[bytes], *, has_namespace: bool) -> None:
    """End a sandbox and wait until all its processes have gone. Without a namespace it is the code itself, the only
    one."""
    if not has_namespace:
        process.kill()
        process.wait()
    elif process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    cast("BinaryIO", process.stdout).close()


_PROBE = """
import ctypes, json, os, resource, signal, socket, time

reached = []


def attempt(what, act):
    try:
        act()
    except (OSError, MemoryError):
        return
    reached.append(what)


def start_processes():
    children = []
    try:
        for _ in range(FACTS["num_processes"]):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            children.append(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def make_namespace():
    if ctypes.CDLL(None).unshare(0x10000000) != 0:
        raise OSError


outside = os.path.dirname(FACTS["secret"])
attempt("it can reach the network", lambda: socket.create_connection(("127.0.0.1", FACTS["port"]), 1))
attempt("it can read files", lambda: open(FACTS["secret"]).read())
attempt("it can write files", lambda: open(outside + "/written", "w").close())
for folder in FACTS["readable"]:
    attempt(f"it can write in {folder}", lambda: open(folder + "/unirl_probe", "x").close())
if FACTS["has_namespace"]:
    if set(os.listdir("/")) != {"work", *(path.split("/")[1] for path in FACTS["readable"])}:
        reached.append("it sees other folders")
    if os.getpid() != 1:
        reached.append("it sees other processes")
else:
    attempt("it can list other folders", lambda: os.listdir("/"))
    attempt("it can change files", lambda: os.chmod(FACTS["secret"], 0o600))
    attempt("it can date files", lambda: os.utime(FACTS["secret"]))
    attempt("it can remove files", lambda: os.remove(FACTS["secret"]))
    attempt("it can send signals", lambda: os.kill(FACTS["owner"], 0))
    attempt("it can limit other processes", lambda: resource.prlimit(FACTS["owner"], resource.RLIMIT_CORE))
    attempt("it can slow other processes", lambda: os.setpriority(os.PRIO_PROCESS, FACTS["owner"], 19))
    attempt("it can make sockets", socket.socketpair)
for descriptor in range(3, 64):
    attempt(f"it has the open file {descriptor}", lambda: os.fstat(descriptor))
attempt("it can make namespaces", make_namespace)
attempt(f"it can start more than {FACTS['num_processes']} processes (root can: set processes: 1)", start_processes)
attempt("it can use more memory", lambda: bytearray(FACTS["memory_bytes"]))
print(json.dumps(reached))
"""
"""Tries what code must not be able to do, and prints what worked."""
