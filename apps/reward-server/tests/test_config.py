"""Configuration files, and the command end to end."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import unused_port

from unirl.reward.local.compressibility import JPEGCompressibilityScorer
from unirl.reward_server.config import build_service, read_config
from unirl.reward_server.main import main
from unirl.types.errors import ConfigError

JPEG = "unirl.reward.local.compressibility.JPEGCompressibilityScorer"


def written(tmp_path, content, name="server.json"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_configuration_builds_its_scorers_and_weights(tmp_path):
    path = written(tmp_path, {"scorers": {"small": {"_target_": JPEG, "quality": 90}}, "weights": {"small": 0.5}})
    service = build_service(read_config(path))
    scorer = service.scorers["small"]
    assert isinstance(scorer, JPEGCompressibilityScorer) and scorer.quality == 90
    assert service.weights == {"small": 0.5} and service.on_failure == "drop_group"


def test_yaml_says_the_same_as_json(tmp_path):
    pytest.importorskip("yaml")
    text = f"scorers:\n  small:\n    _target_: {JPEG}\n    quality: 90\nmax_queued: 3\n"
    content = {"scorers": {"small": {"_target_": JPEG, "quality": 90}}, "max_queued": 3}
    assert read_config(written(tmp_path, text, "a.yaml")) == read_config(written(tmp_path, content))
    with pytest.raises(ConfigError, match="is not YAML"):
        read_config(written(tmp_path, "a: [", "b.yaml"))


def test_without_pyyaml_a_yaml_file_names_the_fix(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match="pip install pyyaml"):
        read_config(written(tmp_path, "scorers: {}", "a.yaml"))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a mapping, got list"),
        ({"scorer": {}}, r"unknown key 'scorer'. Did you mean one of \['scorers'"),
        ({"max_queued": 0}, "max_queued = 0 must be positive"),
        ({"max_queued": "many"}, "server.json: "),
        ({}, "scorers must map at least one name"),
        ({"scorers": {"a": {"quality": 3}}}, "scorers.a has no _target_.*'quality'"),
        ({"scorers": {"a": 3}}, "scorers.a has no _target_.*it is 3"),
        ({"scorers": {"a": {"_target_": "builtins.dict"}}}, "scorers.a, _target_ builtins.dict: no signature"),
        ({"scorers": {"a": {"_target_": "fractions.Fraction"}}}, "a is a Fraction, which is no scorer"),
        ({"scorers": {"a": {"_target_": JPEG, "qualty": 3}}}, "scorers.a, _target_ .*'qualty'"),
        ({"scorers": {"a": {"_target_": JPEG + "s"}}}, "scorers.a, _target_ .* has no 'JPEGCompressibilityScorers'"),
        ({"scorers": {"a": {"_target_": "no_such.Thing"}}}, "No module named 'no_such'"),
        ({"scorers": {"a": {"_target_": "math.pi"}}}, "is not a callable object"),
        ({"scorers": {"a": {"_target_": JPEG}}, "weights": {"b": 1.0}}, "weights name 'b'"),
    ],
)
def test_a_wrong_configuration_names_what_to_change(tmp_path, content, text):
    with pytest.raises(ConfigError, match=text):
        build_service(read_config(written(tmp_path, content)))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read configuration .*nothing.json"):
        read_config(str(tmp_path / "nothing.json"))


def test_the_command_exits_with_2_and_the_message(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--config", written(tmp_path, {"scorers": {}})])
    assert caught.value.code == 2 and "scorers must map at least one name" in capsys.readouterr().err


@pytest.fixture
def serve(tmp_path):
    """Runs the command on a configuration; gives the port once it answers. Stops it with SIGTERM afterwards."""
    running = []

    def start(content):
        port = unused_port()
        command = [sys.executable, "-c", "from unirl.reward_server.main import main; main()"]
        process = subprocess.Popen([*command, "--config", written(tmp_path, content), "--port", str(port)])
        running.append(process)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return port
            time.sleep(0.1)
        raise TimeoutError(f"the server did not listen on port {port} within 60 s")

    yield start
    for process in running:
        process.terminate()
        assert process.wait(timeout=20) == 0


def test_the_readme_works_as_it_stands(serve, capsys, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    [config] = re.findall(r"```json\n(.*?)```", readme, re.DOTALL)
    [program] = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    port = serve(config)
    names: dict[str, Any] = {}
    exec(program.replace("8080", str(port)), names)
    smooth = names["scored"]["components"]["smooth"][0]
    detail = names["scored"]["components"]["detail"][0]
    assert smooth < 0 < detail and names["scored"]["rewards"] == [pytest.approx(smooth + 0.5 * detail)]
    assert "smooth" in capsys.readouterr().out
