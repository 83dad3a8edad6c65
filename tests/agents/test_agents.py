"""Environments of other libraries, for real, in the environment of `uv sync --project environments/agents`."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "environments" / "agents" / ".venv" / "bin" / "python"

pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs uv sync --project environments/agents"),
]


def played(library):
    command = [PYTHON, ROOT / "tests" / "agents" / "played.py", library]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def said(content):
    return {"role": "user", "content": content}


def test_episodes_of_an_openenv_server():
    found = played("openenv")
    first, second, third = found["texts"]
    assert first == [said("up from 3")], "reset gets the seed and the row's keys"
    assert second["observation"] == [said("6")] and second["counts"] == {"unrewarded_steps": 1.0}
    assert (third["reward"], third["terminated"], third["observation"]) == (1.0, True, [])
    begun, counted, refused = found["objects"]
    assert begun == [] and json.loads(counted["observation"][0]["content"])["text"] == "5"
    assert refused["counts"] == {"malformed_calls": 1.0}
    assert "EXECUTION_ERROR" in found["broken"][1]["reason"] and "the counter broke" in found["broken"][1]["reason"]
    assert "no OpenEnv server answers at ws://127.0.0.1:9/ws" in found["unreachable"][0]["reason"]
    assert "not 'picture' (turns.environment.observation)" in found["unknown"][1]["reason"]


def test_environments_of_skyrl_gym():
    found = played("skyrl")
    first, wrong, right = found["right"]
    assert first == [] and wrong["observation"] == [said("again")] and wrong["reward"] == 0.0
    assert right["reward"] == 1.0 and right["terminated"]
    assert found["cut"][2]["truncated"] and not found["cut"][2]["terminated"]
    assert "replaces what the model wrote" in found["rewritten"][1]["reason"]
    assert found["published"][1]["observation"], "a published environment answers a wrong number"
