"""Runs the code of a model where nothing is in reach: `python child.py STATUS`, with a request on standard input.

STATUS is a file descriptor. What goes wrong before the code begins is written there; then it is closed. The code has
standard output. Needs the standard library alone: it starts without packages, in a few milliseconds.

With namespaces there are two processes: this one makes them and waits; its child, the first process of its own
namespace, is cut off and becomes the code. Whatever the code has started ends with it. With Landlock this process
becomes the code: it may read the libraries and write nothing, start nothing, and reach no other process.
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
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
_READING = 0x1 | 0x4 | 0x8
"""Landlock's rights to execute, to read files and to list folders."""
_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 5: 0xFFFF}
"""Version of Landlock -> all rights to files that it knows."""
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
    if request["isolation"] == "landlock":
        _become_code(request, status)
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
        _begin(request, status)
    for descriptor in (0, 1, 2, status, alive):
        os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(child[0], 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _begin(request: dict[str, Any], status: int) -> NoReturn:  # Any: JSON
    os.close(status)
    sys.path += request["libraries"]
    _run(request["code"])


def _become_code(request: dict[str, Any], status: int) -> NoReturn:  # Any: JSON
    """Run the code in this process, among the others of its user, none of which it reaches."""
    try:
        _end_with(request["owner"])
        _read_nothing()
        _limit(request["limits"])
        _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _guard_files(request["readable"])
        _drop_capabilities()
        _end_with(request["owner"])
        _refuse_calls(bytes.fromhex(request["filter"]))
    except (SetUpError, OSError) as error:
        os.write(status, str(error).encode())
        os._exit(1)
    _begin(request, status)


def _guard_files(readable: list[str]) -> None:
    """Landlock: nothing but the readable folders can be opened, and nothing written, made or removed."""

    class Ruleset(ctypes.Structure):
        _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))

    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))

    why = "Landlock is missing"
    version = _call("syscall", _SYS_LANDLOCK_CREATE, None, 0, 1, why=why)
    rights = _RIGHTS[max(known for known in _RIGHTS if known <= version)]
    # Also TCP, and signals and sockets without a path of others, where it knows them: what the filter refuses anyway.
    rules = Ruleset(rights, 0x3 if version >= 4 else 0, 0x3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _call("syscall", _SYS_LANDLOCK_CREATE, ctypes.byref(rules), size, 0, why=why)
    for path in readable:
        folder = os.open(path, os.O_PATH)
        rule = Beneath(_READING, folder)
        _call("syscall", _SYS_LANDLOCK_ADD, ruleset, 1, ctypes.byref(rule), 0, why=f"{path} cannot be allowed")
        os.close(folder)
    _call("syscall", _SYS_LANDLOCK_RESTRICT, ruleset, 0, why="Landlock refuses to work")
    os.close(ruleset)


def _read_nothing() -> None:
    """An empty standard input."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _limit(limits: dict[str, int]) -> None:
    for name, most in limits.items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


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
    _read_nothing()
    _call("sethostname", INSIDE_NAME, len(INSIDE_NAME))
    _change_root(request["readable"], request["files_bytes"])
    _limit(request["limits"])
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


def _call(name: str, *arguments: Any, why: str | None = None) -> int:  # Any: as ctypes converts them
    # ctypes would pass integers as 32 bits, of which a variadic function may read 64.
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    answer = getattr(_LIBC, name)(*converted)
    if answer < 0:
        reason = os.strerror(ctypes.get_errno())
        raise SetUpError(f"{name}: {reason}" if why is None else f"{why} ({name}: {reason})")
    return int(answer)


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
