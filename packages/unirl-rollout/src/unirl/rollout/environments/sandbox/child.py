"""Runs the code of a model where nothing is in reach: `python child.py STATUS`, with a request on standard input.

STATUS is a file descriptor. What goes wrong before the code begins is written there; then it is closed. The code has
standard output. Needs the standard library alone: it starts without packages, in a few milliseconds.

Two processes: this one makes namespaces and waits; its child, the first process of its own namespace, is cut off and
becomes the code. Whatever the code has started ends with it.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import fcntl
import json
import linecache
import os
import resource
import signal
import sys
import traceback
from typing import Any, NoReturn

CLONE_FLAGS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""New namespaces of mounts, control groups, host names, IPC, users, processes and networks."""
INSIDE = 65534
"""Id of the user and group in the sandbox: one without privileges there."""
INSIDE_NAME = b"sandbox"
"""What the machine is called there."""
WORK = "/work"
_MS_PRIVATE_ALL, _MS_BIND_ALL, _MS_NOSUID_NODEV, _MNT_DETACH = 0x44000, 0x5000, 0x6, 0x2
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR, _AT_RECURSIVE, _RDONLY_NOSUID_NODEV = 442, 0x8000, 0x7
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CAPABILITIES_VERSION_3 = 0x20080522
# Any place that is there on each machine: nothing is to be read in it, and no mark of it stays outside.
_NEW_ROOT = "/proc"
_LIBC = ctypes.CDLL(None, use_errno=True)


class SetUpError(Exception):
    """What this machine lacks."""


def main(status: int) -> NoReturn:
    """Run the request. Exits as the code does, with 128 + the signal that ended it."""
    request = json.loads(sys.stdin.buffer.read())
    try:
        _end_with(request["owner"])
        _make_namespaces()
        alive, held = os.pipe()
        child: list[int] = []
        # The owner's request to stop: after the child and all in its namespace have gone.
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child[0], signal.SIGKILL) if child else os._exit(1))
        child.append(os.fork())
        if child[0] == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(held)
            _cut_off(request, alive)
    except (SetUpError, OSError) as error:
        os.write(status, str(error).encode())
        os._exit(1)
    if child[0] == 0:
        os.close(status)
        sys.path += request["libraries"]
        _run(request["code"])
    for descriptor in (0, 1, 2, status, alive):
        os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(child[0], 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _end_with(owner: int) -> None:
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != owner:
        raise SetUpError("its owner has ended")


def _make_namespaces() -> None:
    user, group = os.geteuid(), os.getegid()
    _call("unshare", CLONE_FLAGS, why="namespaces of users, mounts, processes and networks cannot be made")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{INSIDE} {user} 1"), ("gid_map", f"{INSIDE} {group} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError as error:
            raise SetUpError(f"a namespace of users cannot be used (/proc/self/{name}: {error.strerror})") from error


def _cut_off(request: dict[str, Any], alive: int) -> None:  # Any: JSON
    """Leave this process with nothing but its standard output, its folder and what is readable."""
    os.setsid()
    _call("sethostname", INSIDE_NAME, len(INSIDE_NAME))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    _change_root(request["readable"], request["files_bytes"])
    for name, most in request["limits"].items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
    _drop_capabilities()
    # After the capabilities: changing them would clear it. Without the owner, the read below says so.
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    fcntl.fcntl(alive, fcntl.F_SETFL, os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.read(alive, 1)
        os._exit(1)
    os.close(alive)
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _refuse_calls(bytes.fromhex(request["filter"]))


def _change_root(readable: list[str], files_bytes: int) -> None:
    """Make a folder in memory the root, with the readable folders in it."""
    sources = [(path, os.open(path, os.O_PATH)) for path in readable]
    _call("mount", b"none", b"/", None, _MS_PRIVATE_ALL, None)
    options = f"size={files_bytes},nr_inodes=4096,mode=755".encode()
    _call("mount", b"none", _NEW_ROOT.encode(), b"tmpfs", _MS_NOSUID_NODEV, options, why="no tmpfs can be mounted")
    os.mkdir(_NEW_ROOT + WORK)
    read_only = (ctypes.c_uint64 * 4)(_RDONLY_NOSUID_NODEV, 0, 0, 0)
    here = os.open(_NEW_ROOT, os.O_PATH)
    for path, descriptor in sources:
        target = _NEW_ROOT + path
        os.makedirs(target, exist_ok=True)
        os.fchdir(descriptor)
        _call("mount", b".", target.encode(), None, _MS_BIND_ALL, None, why=f"{path} cannot be mounted")
        size = ctypes.c_size_t(ctypes.sizeof(read_only))
        arguments = (-100, target.encode(), _AT_RECURSIVE, ctypes.byref(read_only), size)
        _call("syscall", _SYS_MOUNT_SETATTR, *arguments, why=f"{path} cannot be made read-only (Linux 5.12 can)")
        os.close(descriptor)
    os.fchdir(here)
    os.close(here)
    # The old root comes to lie on the new one, and is let go.
    _call("syscall", _SYS_PIVOT_ROOT[os.uname().machine], b".", b".", why="the root cannot be changed")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir(WORK)


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION_3, 0)
    _call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def _refuse_calls(lines: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = (("num_lines", ctypes.c_ushort), ("lines", ctypes.c_char_p))

    program = Program(len(lines) // 8, lines)
    _call("prctl", _PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0, why="the kernel has no seccomp filters")


def _call(name: str, *arguments: Any, why: str | None = None) -> None:  # Any: as ctypes converts them
    # ctypes would pass integers as 32 bits, of which a variadic function may read 64.
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    if getattr(_LIBC, name)(*converted) < 0:
        reason = os.strerror(ctypes.get_errno())
        raise SetUpError(f"{name}: {reason}" if why is None else f"{why} ({name}: {reason})")


def _run(code: str) -> NoReturn:
    """Run code as a notebook does: the value of a last expression is printed. Exits with 1 if it raises."""
    name, status = "<code>", 1
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}  # Any: as the code defines it
    sys.argv = [name]
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), space)  # noqa: S102 - what this process is for
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), space)  # noqa: S307 - as above
            if value is not None:
                print(repr(value))  # noqa: T201 - the answer
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if status and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:  # noqa: BLE001 - the model is told
        shown = traceback.TracebackException.from_exception(error, limit=-10)
        shown.stack[:] = [frame for frame in shown.stack if frame.filename != __file__]
        sys.stderr.write("".join(shown.format()))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
    os._exit(status & 255)


if __name__ == "__main__":
    main(int(sys.argv[1]))
