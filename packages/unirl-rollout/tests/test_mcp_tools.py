"""Tools of servers of the Model Context Protocol, by the official library: what they answer, and every way not to."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from unirl.rollout.environments.programs import MARK
from unirl.rollout.environments.tool_use import ToolUse
from unirl.rollout.environments.tools.base import ToolError, ToolUnavailableError, mcp_schema
from unirl.rollout.environments.tools.calculator import Calculator
from unirl.rollout.environments.tools.mcp.server import McpServer, connected
from unirl.rollout.environments.workers import EnvironmentWorkers, Lost
from unirl.rollout.turns.calls import ToolCall, Turn
from unirl.types.errors import ConfigError
from unirl.types.messages import ShownImage

FOLDER = Path(__file__).parent
SERVED, ODD = str(FOLDER / "mcp_served.py"), str(FOLDER / "mcp_odd.py")
SERVING = "unirl.rollout.environments.tools.mcp.serving"


@pytest.fixture
def opened():
    """Makes servers whose connection of this process is closed after the test."""
    made = []

    def make(**options):
        given: dict[str, Any] = {"timeout_s": 20.0} | options
        made.append(McpServer(**given))
        return made[-1]

    yield make
    for server in made:
        connected(server._address).close()
    connected.cache_clear()


@pytest.fixture
def tools(opened, tmp_path):
    def make(command=("python", SERVED), **options):
        return opened(command=command, env={"SCRATCH": str(tmp_path), **options.pop("env", {})}, **options).offer()

    return make


def pid_of(tools):
    return int(tools["pid"]({}, {}).text)


def answered(tool):
    """What it answers; None where the server does not."""
    try:
        return int(tool({}, {}).text)
    except ToolUnavailableError:
        return None


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid):
    for _ in range(100):
        if not is_running(pid):
            return
        time.sleep(0.1)
    raise AssertionError(f"{pid} runs")


def test_tools_of_a_server_are_called_by_their_schemas(tools):
    found = tools(shows_images=True)
    assert set(found) == {"add", "fail", "pid", "red", "slow", "hang", "die", "die_once", "mutter", "forget"}
    assert found["add"].description == "Add two whole numbers."
    assert found["add"].parameters["properties"]["a"]["type"] == "integer"
    assert found["add"]({"a": 2, "b": 3}, {}).text == "5"
    with pytest.raises(ToolError, match="fail"):
        found["fail"]({"reason": "x"}, {})
    with pytest.raises(ToolError, match="valid integer"):
        found["add"]({"a": "x", "b": 1}, {})
    assert found["red"]({}, {}).images == (ShownImage(2, 3, b"\xff\0\0" * 6),)
    assert found["mutter"]({}, {}).text == "said", "what is no message is left out"
    assert found["forget"]({}, {}).text == "done"
    with pytest.raises(ToolError, match="Unknown tool: add"):
        found["add"]({"a": 2, "b": 3}, {})


def test_a_call_that_takes_too_long_costs_no_other(tools, caplog):
    found = tools(timeout_s=2.0)
    own = next(pid for _ in range(20) if (pid := answered(found["pid"])))  # a start may take longer than a call
    with pytest.raises(ToolUnavailableError, match="no answer within 2 s"):
        found["slow"]({}, {})
    assert pid_of(found) == own, "the server lives and goes on"
    with pytest.raises(ToolUnavailableError):
        found["hang"]({}, {})
    other = next(pid for _ in range(20) if (pid := answered(found["pid"])))
    assert other != own and "does not answer; it is ended" in caplog.text
    wait_until_gone(own)


def test_a_server_that_dies_is_started_again_and_asked_once_more(tools, tmp_path):
    found = tools()
    own = pid_of(found)
    assert found["die_once"]({"flag": str(tmp_path / "flag")}, {}).text == "alive"
    os.kill(pid_of(found), signal.SIGKILL)
    assert found["add"]({"a": 2, "b": 3}, {}).text == "5"
    with pytest.raises(ToolUnavailableError, match="ended before it answered"):
        found["die"]({}, {})
    assert pid_of(found) != own


def test_a_server_that_cannot_be_started_again_fails_the_episode(tools, tmp_path):
    script = tmp_path / "served.py"
    script.write_text(Path(SERVED).read_text())
    found = tools(command=("python", str(script)))
    own = pid_of(found)
    script.write_text("import not_there")
    os.kill(own, signal.SIGKILL)
    with pytest.raises(
        RuntimeError, match="does not start: .*it last wrote: ModuleNotFoundError: No module named 'not_"
    ):
        found["add"]({"a": 2, "b": 3}, {})


def test_answers_that_break_the_protocol_are_told_as_errors(tools):
    found = tools(command=("python", ODD), timeout_s=3.0)
    assert set(found) == {"odd", "silent"}, "all pages of the list are read"
    with pytest.raises(ToolUnavailableError, match="what cannot be read"):
        found["odd"]({}, {})
    with pytest.raises(ToolUnavailableError, match="no answer within"):
        found["silent"]({}, {})


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (["nowhere-to-be-found"], {}, "does not start: FileNotFoundError"),
        (["python", "-c", "import nope"], {}, "it last wrote: ModuleNotFoundError: No module named 'nope'"),
        (["python", SERVED], {"tools": ["sub", "add"]}, "has no tool sub. It has add, fail"),
        (["python", ODD, "broken"], {}, "the arguments of odd of .* have no valid JSON schema"),
        (
            ["python", ODD, "elsewhere"],
            {},
            "refers to https://example.org/schema.json, and none is read from elsewhere",
        ),
    ],
)
def test_what_a_server_lacks_is_one_message(tools, command, options, message):
    with pytest.raises(ConfigError, match=message):
        tools(command=command, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has a command or a url"),
        ({"command": ["a"], "url": "http://a"}, "has a command or a url"),
        ({"command": []}, "is no list of a program"),
        ({"command": "python server.py"}, "is no list of a program"),
        ({"url": "ftp://a"}, "must begin with http"),
        ({"url": "http://a", "env": {}}, "env is for a command"),
        ({"command": ["a"], "headers": {}}, "headers are for a url"),
        ({"command": ["a"], "tools": []}, "is empty"),
        ({"command": ["a"], "tools": ["add", "add"]}, "has add twice"),
        ({"command": ["a"], "tools": {"add": "sum", "sub": "sum"}}, "has sum twice"),
    ],
)
def test_mistakes_in_a_recipe_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        McpServer(**options)


def test_own_tools_and_servers_stand_next_to_each_other(opened):
    served = {"command": ["python", SERVED]}
    chosen = opened(tools={"add": "plus", "pid": "process"}, **served)
    environment = ToolUse({"calculator": Calculator(), "sums": chosen})
    schemas = environment.introduce().tools
    assert [schema["function"]["name"] for schema in schemas] == ["calculator", "plus", "process"]
    assert schemas[1]["function"]["parameters"]["required"] == ["a", "b"]
    environment.reset({}, 0)
    calls = [
        ToolCall("plus", {"a": 2, "b": 3}),
        ToolCall("plus", {"a": 2}),
        ToolCall("calculator", {"expression": "7"}),
    ]
    step = environment.step(Turn("", tuple(calls)))
    assert [message.content for message in step.observation] == ["5", "error: 'b' is a required property", "7"]
    assert step.counts == {"calls": 3.0, "malformed_calls": 1.0, "tool_errors": 0.0, "unavailable_tools": 0.0}
    with pytest.raises(ConfigError, match="calculator and sums both have a tool 'calculator'"):
        ToolUse({"calculator": Calculator(), "sums": opened(tools={"add": "calculator"}, **served)}).introduce()


@pytest.fixture
def played(request):
    """Plays two episodes in two processes."""

    def make(server):
        environment = ToolUse({"served": server})
        environment.introduce()
        workers = EnvironmentWorkers(environment, num_workers=2, step_timeout_s=60.0)
        request.addfinalizer(workers.close)
        workers.reset({"a": ({}, 0), "b": ({}, 0)})
        return workers

    return make


def called(workers, **arguments):
    turn = Turn("", tuple(ToolCall(name, given) for name, given in arguments.items()))
    return workers.step({"a": turn, "b": turn})


def marked():
    """Processes of environments with the servers that they started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found += [int(folder.name)] * any(word.startswith(MARK.encode()) for word in words)
    return found


def test_a_server_per_process_ends_with_it(played):
    before = set(marked())
    workers = played(McpServer(command=["python", SERVED], timeout_s=20.0))
    servers = [int(step.observation[0].content) for step in called(workers, pid={}).values()]
    assert len(set(servers)) == 2 and not set(servers) & set(workers.pids)
    step = called(workers, die={}, add={"a": 1, "b": 1})["a"]
    assert [message.content for message in step.observation] == ["error: the tool ended before it answered", "2"]
    assert step.counts["tool_errors"] == step.counts["unavailable_tools"] == 1.0
    running = set(marked()) - before
    assert len(running) >= 4, "two processes with a server each"
    workers.close()
    for pid in running:
        wait_until_gone(pid)


def test_a_process_that_is_killed_takes_its_server_with_it(played):
    workers = played(McpServer(command=["python", SERVED], timeout_s=20.0))
    servers = {name: int(step.observation[0].content) for name, step in called(workers, pid={}).items()}
    os.kill(workers.pids[0], signal.SIGKILL)
    found = called(workers, pid={})
    (lost,) = [name for name, step in found.items() if isinstance(step, Lost)]
    assert "neither deterministic nor resumable" in found[lost].reason
    (kept,) = set(found) - {lost}
    assert int(found[kept].observation[0].content) == servers[kept]
    wait_until_gone(servers[lost])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("a: int, b: int", "a: int", r"takes other arguments for add than when the run began\. Start it again"),
        ("def add(", "def plus(", r"has no tool add\. It has plus, fail"),
    ],
)
def test_a_server_that_has_changed_since_the_prompts_were_made_is_one_message(tmp_path, old, new, message):
    script, text = tmp_path / "served.py", Path(SERVED).read_text()
    script.write_text(text)
    environment = ToolUse({"served": McpServer(command=["python", str(script)], tools=["add"])})
    environment.introduce()
    script.write_text(text.replace(old, new))
    workers = EnvironmentWorkers(environment, num_workers=1, step_timeout_s=60.0)
    with pytest.raises(ConfigError, match=message) as raised:
        workers.reset({"a": ({}, 0)})
    assert "Traceback" not in str(raised.value)


@pytest.fixture
def http_server():
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port = own.getsockname()[1]
    running = []

    def start():
        running.append(subprocess.Popen([sys.executable, SERVED, str(port)]))
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return running[-1]
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the server does not listen")

    yield f"http://127.0.0.1:{port}/mcp", start
    for process in running:
        process.kill()
        process.wait()


def test_a_server_over_http_may_go_and_come_back(opened, http_server):
    url, start = http_server
    process = start()
    found = opened(url=url, headers={"Authorization": "Bearer x"}).offer()
    assert found["add"]({"a": 2, "b": 3}, {}).text == "5" and pid_of(found) == process.pid
    process.kill()
    process.wait()
    with pytest.raises(RuntimeError, match=f"the MCP server at {url} cannot be reached: ConnectError"):
        found["add"]({"a": 2, "b": 3}, {})
    start()
    assert found["add"]({"a": 2, "b": 3}, {}).text == "5"


def test_our_tools_are_served_with_their_schemas(tools):
    command = ["python", "-m", SERVING, f"calculator={Calculator.__module__}.Calculator"]
    command.append('paint=mcp_own_tools.Paint:{"side": 3}')
    own = tools(command=command, shows_images=True, env={"PYTHONPATH": str(FOLDER)})
    assert own["calculator"].parameters == mcp_schema("calculator", Calculator())["inputSchema"]
    assert own["calculator"].description == Calculator.description
    assert own["calculator"]({"expression": "2 ** 10"}, {}).text == "1024"
    with pytest.raises(ToolError, match="division by zero"):
        own["calculator"]({"expression": "1 / 0"}, {})
    with pytest.raises(ToolError, match="'expression' is a required property"):
        own["calculator"]({}, {})
    answer = own["paint"]({"color": "0a141e"}, {})
    assert answer.text == "there" and answer.images == (ShownImage(3, 3, bytes([10, 20, 30]) * 9),)


def test_what_cannot_be_served_is_said_on_the_command_line():
    command = [sys.executable, "-m", SERVING]
    for words, message in (
        ("calculator", "is not NAME=IMPORT.PATH"),
        ("a=nowhere.Tool", "No module named 'nowhere'"),
        ("a=pathlib.Path", "pathlib.Path is no Tool"),
    ):
        done = subprocess.run([*command, words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2 and message in done.stderr
