"""Code of a model in the sandbox: what it may do, and attacks on the machine, each bounded and told to the model."""

import json
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from unirl.rollout.environments.sandbox import runner
from unirl.rollout.environments.sandbox.runner import Limits, Sandbox
from unirl.rollout.environments.tool_use import ToolUse
from unirl.rollout.environments.tools.base import ToolError
from unirl.rollout.environments.tools.python import PythonInterpreter
from unirl.rollout.environments.workers import EnvironmentWorkers
from unirl.rollout.turns.calls import ToolCall, Turn
from unirl.types.errors import ConfigError

SECRET = "moss-agate"
TIME_S = 2.0


def can_isolate(isolation="namespaces"):
    limits = Limits(time_s=5.0, memory_bytes=2**29, files_bytes=2**20, output_bytes=2**14, num_processes=1)
    try:
        Sandbox(limits, isolation=isolation).verify()
    except ConfigError:
        return False
    return True


isolating = pytest.mark.skipif(not can_isolate(), reason="this machine isolates no code")
guarding = pytest.mark.skipif(not can_isolate("landlock"), reason="this machine has no Landlock")


@pytest.fixture(scope="module")
def python():
    return PythonInterpreter(time_s=TIME_S, memory_mb=256, files_mb=8, output_kb=16)


@pytest.fixture(scope="module")
def among_others():
    """The same without namespaces."""
    return PythonInterpreter(time_s=TIME_S, memory_mb=256, output_kb=16, isolation="landlock")


def processes():
    """Ids of all that run below this one or were left to others by it."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def of_sandboxes():
    found = set()
    for pid in processes():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if runner.child.__file__.encode() in command:
            found.add(pid)
    return found


def attacked(python, code):
    """What the model is told and the seconds that it took; nothing is left behind."""
    before, started = set(os.listdir("/proc/self/fd")), time.monotonic()
    try:
        said = python({"code": code}, {})
    except ToolError as error:
        said = f"error: {error}"
    took_s = time.monotonic() - started
    assert not of_sandboxes(), "processes are left"
    deadline = time.monotonic() + 10
    while left := set(os.listdir("/proc/self/fd")) - before:  # threads of other tests open some for a while
        assert time.monotonic() < deadline, f"files are left open: {left}"
        time.sleep(0.1)
    assert took_s < TIME_S + 3
    assert SECRET not in said
    assert len(said) < 17_000
    return said


@isolating
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(6 * 7)", "42"),
        ("x = 6\nx * 7", "42"),
        ("x = 1", "(the code printed nothing)"),
        ("def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nf(30)", "265252859812191058636308480000000"),
        ("open('a', 'w').write('kept')\nopen('a').read()", "'kept'"),
        ("import collections, datetime, fractions, itertools, json, math, random, re, sqlite3, statistics\n1", "1"),
        ("print('half'); raise SystemExit", "half"),
        ("list({'b', 'a', 'c'}) == list({'b', 'a', 'c'})", "True"),
        ("print('\\ud800'.encode('utf-8', 'surrogatepass'))", "b'\\xed\\xa0\\x80'"),
    ],
)
def test_code_is_answered_with_what_it_prints_and_its_last_value(python, code, said):
    assert attacked(python, code) == said


@isolating
def test_an_exception_is_told_with_its_line(python):
    said = attacked(python, "def f(x):\n    return 1 / x\nf(0)")
    assert said.startswith("error: the code ended with status 1\nTraceback")
    assert "return 1 / x" in said and said.endswith("ZeroDivisionError: division by zero")
    assert "child.py" not in said
    assert "SyntaxError" in attacked(python, "1 +")


@isolating
def test_each_call_begins_anew(python):
    attacked(python, "x = 1\nopen('a', 'w').close()")
    assert attacked(python, "import os\n'x' in globals(), os.listdir()") == "(False, [])"


ATTACKS = {
    "fork bomb": ("import os\nwhile True: os.fork()", "PermissionError"),
    "threads": ("import threading\nwhile True: threading.Thread(target=input).start()", "can't start new thread"),
    "other programs": ("import subprocess\nsubprocess.run(['/usr/lib/x'])", "PermissionError"),
    "endless output": ("while True: print('x' * 1000)", "wrote more than 16384 bytes"),
    "endless output to errors": ("import os\nwhile True: os.write(2, b'x' * 10000)", "wrote more than 16384 bytes"),
    "endless loop": ("while True: pass", "stopped after 0.5 s"),
    "sleep without output": ("import os, time\nos.close(1); os.close(2); time.sleep(99)", "stopped after 0.5 s"),
    "deaf to signals": (
        "import signal\nfor n in range(1, 32):\n    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\n"
        "signal.alarm(0)\nwhile True: pass",
        "stopped after 0.5 s",
    ),
    "10 GB of memory": ("x = bytearray(10 * 2**30)", "MemoryError"),
    "memory bit by bit": ("x = []\nwhile True: x.append(bytearray(2**20))", "MemoryError"),
    "memory in files": ("f = open('a', 'wb')\nwhile True: f.write(bytes(2**20))", "File too large|No space left"),
    "many files": ("n = 0\nwhile True:\n    open(str(n), 'w').close(); n += 1", "No space left"),
    "memory without files": ("import os\nos.memfd_create('x')", "PermissionError"),
    "more of a limit": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
        "not allowed to raise maximum limit",
    ),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "SIGSEGV|MemoryError|stopped after",
    ),
    "crash": ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    "huge exception": ("raise ValueError('x' * 10**8)", "wrote more than 16384 bytes|MemoryError"),
    "exception without text": (
        "class E(Exception):\n    def __str__(self): raise MemoryError\nraise E",
        "exception str\\(\\) failed",
    ),
    "endless text of an exception": (
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
        "stopped after 0.5 s",
    ),
    "not text": ("import os\nos.write(1, bytes(range(128, 256)))\nraise ValueError", "ValueError"),
    "too many brackets": ("(" * 10_000, "too many nested|MemoryError"),
    "kernel log": ("import ctypes\nassert ctypes.CDLL(None).klogctl(3, b' ' * 99, 99) > 0", "AssertionError"),
    "null": ("\0", "null bytes"),
    "TCP": ("import socket\nsocket.create_connection(('1.1.1.1', 53))", "PermissionError"),
    "UDP": ("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)", "PermissionError"),
    "raw packets": ("import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)", "PermissionError"),
    "DNS": ("import socket\nsocket.getaddrinfo('example.org', 80)", "gaierror"),
    "web": ("import urllib.request\nurllib.request.urlopen('http://example.org')", "URLError"),
    "mounts": ("import ctypes\nassert ctypes.CDLL(None).mount(b'/lib', b'/work', 0, 4096, 0) == 0", "AssertionError"),
    "namespaces": ("import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0", "AssertionError"),
    "traces": ("import ctypes\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0", "AssertionError"),
    "writing a library": ("import os\nopen(os.__file__, 'a')", "Read-only file system|Permission denied"),
    "devices": ("open('/dev/mem')", "FileNotFoundError"),
    "leaving the root": (
        "import os\nos.listdir('/../../..') == os.listdir('/') or 1/0\nopen('/../etc/passwd')",
        "No such",
    ),
}


@isolating
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_bounded_and_told_to_the_model(python, name):
    code, reason = ATTACKS[name]
    if "stopped after" in reason:
        python = PythonInterpreter(time_s=0.5, memory_mb=256)
    said = attacked(python, code)
    assert said.startswith("error: ") and re.search(reason, said), said


OTHERWISE = {
    "memory in files": "Permission denied",
    "many files": "Permission denied",
    "devices": "Permission denied|No such file",
    "leaving the root": "Permission denied",
}
"""What code is told with Landlock, where that differs."""
AMONG_OTHERS = {
    "other folders": ("import os\nos.listdir('/')", "PermissionError"),
    "a pair of sockets": ("import socket\nsocket.socketpair()", "PermissionError"),
    "limits of others": ("import os, resource\nresource.prlimit(os.getppid(), 7, (0, 0))", "PermissionError"),
    "priority of others": ("import os\nos.setpriority(os.PRIO_USER, os.getuid(), 19)", "PermissionError"),
    "processors of others": ("import os\nos.sched_setaffinity(os.getppid(), {0})", "PermissionError"),
    "owner of a file's signals": ("import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())", "PermissionError"),
    "signal of a file": ("import fcntl\nfcntl.fcntl(1, fcntl.F_SETSIG, 9)", "PermissionError"),
    "shared memory": ("import ctypes\nassert ctypes.CDLL(None).shmat(0, 0, 0) != -1", "AssertionError"),
    "folder that watches": ("import ctypes\nassert ctypes.CDLL(None).inotify_init() != -1", "AssertionError"),
    "a file without a name": ("import os\nos.open('/tmp', os.O_TMPFILE | os.O_RDWR)", "PermissionError"),
    "a pipe with a name": ("import os\nos.mkfifo('/tmp/unirl-pipe')", "PermissionError"),
    "another root": ("import os\nos.chroot('/lib')", "PermissionError"),
    "another user": ("import os\nos.setuid(1); 1/0", "PermissionError|ZeroDivisionError"),
}


@guarding
@pytest.mark.parametrize("name", [*ATTACKS, *AMONG_OTHERS])
def test_an_attack_among_other_processes_is_bounded_and_told_to_the_model(among_others, name):
    code, reason = (ATTACKS | AMONG_OTHERS)[name]
    python = among_others
    if "stopped after" in reason:
        python = PythonInterpreter(time_s=0.5, memory_mb=256, isolation="landlock")
    said = attacked(python, code)
    assert said.startswith("error: ") and re.search(OTHERWISE.get(name, reason), said), said


@guarding
def test_files_are_neither_opened_nor_changed_among_other_processes(among_others, tmp_path):
    file = tmp_path / "run" / "config.yaml"
    file.parent.mkdir()
    file.write_text(SECRET)
    before = file.stat()
    for path in (file, Path("/etc/passwd"), Path("/proc/self/environ"), Path(f"/proc/{os.getpid()}/environ")):
        assert "PermissionError" in attacked(among_others, f"print(open({str(path)!r}).read())")
        assert "PermissionError" in attacked(among_others, f"open({str(path)!r}, 'a').write('changed')")
    name = repr(str(file))
    for change in (
        *(f"os.remove({name})", f"os.truncate({name}, 0)", f"os.chmod({name}, 0)", f"os.chown({name}, 0, 0)"),
        *(f"os.utime({name}, (0, 0))", f"os.rename({name}, {name} + '2')", f"os.symlink('x', {name} + '2')"),
        *(f"os.link({name}, {name} + '2')", f"os.mkdir({name} + '2')", f"os.setxattr({name}, 'user.a', b'1')"),
        *(f"os.rmdir(os.path.dirname({name}))", f"os.listdir(os.path.dirname({name}))"),
    ):
        assert re.search("PermissionError|OSError: .*cross-device", attacked(among_others, f"import os\n{change}")), (
            change
        )
    after = file.stat()
    assert file.read_text() == SECRET and os.listdir(file.parent) == ["config.yaml"]
    assert (after.st_mode, after.st_mtime_ns, after.st_uid) == (before.st_mode, before.st_mtime_ns, before.st_uid)


@guarding
def test_code_among_other_processes_has_libraries_and_nothing_else(among_others, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    (tmp_path / "own_sums.py").write_text("def total(x): return sum(x)\n")
    own = PythonInterpreter(libraries=[str(tmp_path)], isolation="landlock")
    assert attacked(own, "import own_sums\nown_sums.total([1, 2])") == "3"
    assert "ModuleNotFoundError" in attacked(own, "import torch")
    assert attacked(among_others, "import sqlite3, json, random, statistics\n6 * 7") == "42"
    assert "HF_TOKEN" not in attacked(among_others, "import os\nprint(dict(os.environ))")
    assert attacked(among_others, "import sys\nsys.stdin.read()") == "''"
    code = "import os\nfor n in range(3, 1024):\n    try: print(n, os.read(n, 99))\n    except OSError: pass"
    assert attacked(among_others, code) == "(the code printed nothing)"


@guarding
@pytest.mark.parametrize("victim", ["os.getppid()", "0", "-1", "{pid}", "-{group}"])
def test_no_other_process_gets_a_signal_without_namespaces(among_others, victim):
    victim = victim.format(pid=os.getpid(), group=os.getpgrp())
    got = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    try:
        for code in (f"os.kill({victim}, signal.SIGUSR1)", f"os.kill({victim}, signal.SIGKILL)"):
            assert "PermissionError" in attacked(among_others, f"import os, signal\n{code}")
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert not got


@guarding
def test_options_that_do_nothing_without_namespaces_are_refused():
    given: list[dict[str, Any]] = [{"files_mb": 8}, {"processes": 2}]
    for options in given:
        with pytest.raises(ConfigError, match="isolation = landlock lets code write no files and start no processes"):
            PythonInterpreter(isolation="landlock", **options)


@isolating
def test_memory_of_this_process_does_not_grow_with_what_code_writes(python):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attacked(python, "import os\nwhile True: os.write(1, b'x' * 65536)")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # KiB


@isolating
def test_files_outside_are_neither_read_nor_written(python, tmp_path):
    file = tmp_path / "run" / "config.yaml"
    file.parent.mkdir()
    file.write_text(SECRET)
    for path in (file, Path("/etc/passwd"), Path("/proc/self/environ"), Path(f"/proc/{os.getpid()}/environ")):
        assert "FileNotFoundError" in attacked(python, f"print(open({str(path)!r}).read())")
        assert "FileNotFoundError" in attacked(python, f"open({str(path)!r}, 'a').write('changed')")
        for change in ("os.remove", "os.stat", "os.listdir", "os.readlink"):
            assert "FileNotFoundError" in attacked(python, f"import os\n{change}({str(path)!r})")
    assert file.read_text() == SECRET
    assert sorted(os.listdir(tmp_path)) == ["run"] and os.listdir(file.parent) == ["config.yaml"]


@isolating
def test_what_code_leaves_in_temporary_folders_is_nowhere(python):
    before = set(os.listdir("/tmp"))
    attacked(python, "import os\nos.makedirs('/tmp/unirl-left'); open('/tmp/unirl-left/file', 'w').write('x')")
    attacked(python, "open('/unirl-left', 'w').write('x')")
    assert "unirl-left" not in set(os.listdir("/tmp")) - before
    assert not Path("/unirl-left").exists()


@isolating
def test_environment_variables_and_open_files_are_not_inherited(python, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    file = tmp_path / "secret"
    file.write_text(SECRET)
    descriptor = os.open(file, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        assert "HF_TOKEN" not in attacked(python, "import os\nprint(dict(os.environ))")
        code = "import os\nfor n in range(3, 1024):\n    try: print(n, os.read(n, 99))\n    except OSError: pass"
        assert attacked(python, code) == "(the code printed nothing)"
        assert attacked(python, "import sys\nsys.stdin.read()") == "''"
        assert attacked(python, "import socket\nsocket.gethostname()") == "'sandbox'"
    finally:
        os.close(descriptor)


@isolating
def test_sockets_of_other_processes_are_out_of_reach(python, tmp_path):
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract:
        named.bind(str(tmp_path / "socket"))
        abstract.bind("\0unirl-test")
        named.listen()
        abstract.listen()
        for address in (str(tmp_path / "socket"), "\0unirl-test"):
            code = f"import socket\nsocket.socket(socket.AF_UNIX).connect({address!r})"
            assert "PermissionError" in attacked(python, code)
        pair = "import socket\na, b = socket.socketpair()\n"
        assert "Error" in attacked(python, pair + f"a.sendto(b'x', {str(tmp_path / 'socket')!r})\n1/0")
        assert "Error" in attacked(
            python, "import socket\na, b = socket.socketpair(type=socket.SOCK_DGRAM)\na.connect('\\0unirl-test')"
        )


@isolating
@pytest.mark.parametrize("victim", ["os.getppid()", "0", "-1", "{pid}", "-{group}"])
def test_no_other_process_gets_a_signal(python, victim):
    victim = victim.format(pid=os.getpid(), group=os.getpgrp())
    got = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    try:
        attacked(python, f"import os, signal\nos.kill({victim}, signal.SIGUSR1)")
        attacked(python, f"import os, signal\nos.kill({victim}, signal.SIGKILL)")
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert not got


@pytest.mark.parametrize(
    ("isolation", "number"),
    [pytest.param("namespaces", 2, marks=isolating), pytest.param("landlock", 1, marks=guarding)],
)
def test_code_ends_with_the_process_that_runs_it(isolation, number):
    script = (
        "from unirl.rollout.environments.tools.python import PythonInterpreter\n"
        f"tool = PythonInterpreter(time_s=60, isolation={isolation!r})\nprint('ready', flush=True)\n"
        "tool({'code': 'import ctypes, time\\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\\ntime.sleep(50)'}, {})\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 20
        while len(of_sandboxes()) < number:
            assert time.monotonic() < deadline, "the code does not begin"
            time.sleep(0.02)
        owner.kill()
    while of_sandboxes():
        assert time.monotonic() < deadline, "the code outlives its owner"
        time.sleep(0.02)


BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
LEAVES = "import os, time\nif os.fork() == 0:\n    os.setsid(); os.close(1); os.close(2); time.sleep(99)"


@isolating
def test_more_processes_are_bounded_or_refused():
    if os.geteuid() == 0:
        with pytest.raises(ConfigError, match=r"more than 4 processes \(root can: set processes: 1\)"):
            PythonInterpreter(processes=4)
        return
    python = PythonInterpreter(time_s=TIME_S, processes=4)
    assert attacked(python, "import subprocess\nsubprocess.run(['/usr/lib/x'])").endswith("'/usr/lib/x'")
    assert "stopped after" in attacked(python, BOMB)
    assert attacked(python, LEAVES) == "(the code printed nothing)"


@isolating
def test_libraries_are_what_the_recipe_names(tmp_path):
    (tmp_path / "own_sums.py").write_text("def total(x): return sum(x)\n")
    python = PythonInterpreter(libraries=[str(tmp_path)])
    assert attacked(python, "import own_sums\nown_sums.total([1, 2])") == "3"
    assert "ModuleNotFoundError" in attacked(python, "import torch")
    assert "Read-only" in attacked(python, f"open({str(tmp_path / 'own_sums.py')!r}, 'w')")
    with pytest.raises(ConfigError, match=r"libraries: .*nowhere is no folder"):
        PythonInterpreter(libraries=[str(tmp_path / "nowhere")])


@isolating
def test_an_environment_plays_with_it_in_its_process():
    workers = EnvironmentWorkers(ToolUse({"python": PythonInterpreter()}), num_workers=1, step_timeout_s=30.0)
    try:
        workers.reset({"a": ({}, 0)})
        calls = tuple(ToolCall("python", {"code": code}) for code in ("2**10", "1/0", "x" * 20_001))
        step: Any = workers.step({"a": Turn("", calls)})["a"]
        first, second, third = (message.content for message in step.observation)
        assert first == "1024" and "ZeroDivisionError" in second and "20001 characters; at most 20000" in third
        assert step.counts == {"calls": 3, "malformed_calls": 0, "tool_errors": 2}
    finally:
        workers.close()


@isolating
def test_it_can_be_sent_to_processes(python):
    assert json.dumps(PythonInterpreter.parameters)
    assert attacked(pickle.loads(pickle.dumps(python)), "1") == "1"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("unshare", "namespaces of users, mounts, processes and networks cannot be made (unshare:"),
        ("mount", "no tmpfs can be mounted (mount:"),
        ("umount2", "umount2:"),
        ("capset", "capset:"),
        ("prctl", "prctl:"),
    ],
)
def test_a_machine_that_lacks_a_layer_is_refused(call, reason, monkeypatch, tmp_path):
    """A copy of the program stands for such a machine: one of its calls fails as there."""
    source = Path(runner.child.__file__).read_text()
    changed = source.replace(
        "if answer < 0:",
        f"if (name == {call!r} and (name != 'mount' or b'tmpfs' in arguments)) or answer < 0:",
    )
    assert changed != source
    (tmp_path / "child.py").write_text(changed)
    monkeypatch.setattr(runner.child, "__file__", str(tmp_path / "child.py"))
    with pytest.raises(ConfigError, match="this machine cannot isolate code of a model: ") as refused:
        PythonInterpreter()
    assert reason in str(refused.value) and "--security-opt" in str(refused.value)


@isolating
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("\n    _refuse_calls(bytes.fromhex", "it can start more than 1 processes"),
        ("        resource.setrlimit(", "it can use more memory"),
        ("    _change_root(request", "it can read files; it can write files"),
    ],
)
def test_a_layer_that_does_nothing_is_found_before_code_runs(line, reason, monkeypatch, tmp_path):
    without(line, monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=r"not isolated on this machine|can write files on this machine") as refused:
        PythonInterpreter()
    assert reason in str(refused.value) or "can write files on this machine outside its folder" in str(refused.value)


def without(line, monkeypatch, tmp_path):
    """Let sandboxes run a copy of the program in which one line does nothing."""
    source = Path(runner.child.__file__).read_text()
    assert source.count(line) == 1
    (tmp_path / "child.py").write_text(source.replace(line, line.replace(line.strip(), f"0 and {line.strip()}")))
    monkeypatch.setattr(runner.child, "__file__", str(tmp_path / "child.py"))


@guarding
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("        _guard_files(request", "it can read files; it can write files|outside its folder"),
        ("        _refuse_calls(bytes.fromhex", "it can change files; it can date files"),
        ("        _limit(request", "it can use more memory"),
    ],
)
def test_a_layer_that_does_nothing_is_found_without_namespaces(line, reason, monkeypatch, tmp_path):
    without(line, monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=reason):
        PythonInterpreter(isolation="landlock")


def test_a_machine_without_landlock_is_refused(monkeypatch, tmp_path):
    source = Path(runner.child.__file__).read_text()
    changed = source.replace("_SYS_LANDLOCK_RESTRICT = 444, 445, 446", "_SYS_LANDLOCK_RESTRICT = 9999, 445, 446")
    assert changed != source
    (tmp_path / "child.py").write_text(changed)
    monkeypatch.setattr(runner.child, "__file__", str(tmp_path / "child.py"))
    with pytest.raises(ConfigError, match="Landlock is missing .*It needs Linux 5.13 with Landlock and seccomp"):
        PythonInterpreter(isolation="landlock")


def test_a_machine_that_forbids_namespaces_is_told_of_the_other_way(monkeypatch, tmp_path):
    source = Path(runner.child.__file__).read_text()
    (tmp_path / "child.py").write_text(source.replace("CLONE_FLAGS = ", "CLONE_FLAGS = 1 | "))
    monkeypatch.setattr(runner.child, "__file__", str(tmp_path / "child.py"))
    with pytest.raises(ConfigError, match="isolation: landlock does without"):
        PythonInterpreter()
