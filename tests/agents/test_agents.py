"""Environments of other libraries, for real, in the environment of `uv sync --project environments/agents`."""

import json
import os
import subprocess
import sys
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


def test_task_sets_of_verifiers():
    found = played("verifiers")
    (tool,) = found["introduced"]["tools"]
    assert tool["function"]["name"] == "add" and found["introduced"]["system_prompt"] is None
    first, called, right = found["right"]
    assert first == [said("96344+37686=")], "the task's prompt replaces the row's"
    assert called["observation"] == [{"role": "tool", "content": "3"}] and called["counts"]["calls"] == 1.0
    assert right["terminated"] and right["reward"] == 2.0, "thoughts are no part of the reply, and the weight counts"
    assert right["counts"] | {"calls": 0.0} == {
        "task_right": 1.0,
        "task_replies": 2.0,
        "calls": 0.0,
        "malformed_calls": 0.0,
    }
    assert found["malformed"][1]["terminated"] and found["malformed"][1]["counts"]["malformed_calls"] == 1.0
    assert found["unknown"][1]["observation"][0]["content"] == "error: unknown tool 'search'"
    assert [step["truncated"] for step in found["cut"][1:]] == [False, False, True]
    assert found["stopped"][1]["terminated"] and not found["stopped"][1]["truncated"]
    assert found["side by side"] == ["8176+5421=", "96344+37686=", 2.0, 0.0]
    assert "the judge broke" in found["broken"][1]["reason"]
    assert "the task has other tools, or another message of the system" in found["system"][0]["reason"]
    assert "begins with messages of user, user" in found["messages"][0]["reason"]
    assert "not 'task', which names the task" in found["nameless"][0]["reason"]
    assert "has 12 tasks, none at 99" in found["absent"][0]["reason"]
    assert found["programs"] == [1, 0], "tool servers end with the process that plays"


def test_a_run_whose_episodes_verifiers_plays_elsewhere(tmp_path):
    """The trainer's environment has no such library: `python` names one that has. Replayed, every token has the
    log-prob of the rollout."""
    rows = [json.dumps({"prompt": "by its place", "task": task}) for task in range(8)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    words = [
        "~turns.environment",
        "+turns.environment={_target_: unirl.rollout.environments.verifiers.environment.Verifiers, taskset: adding, "
        f"python: {PYTHON}, max_turns: 4, timeout_s: 50}}",
        "+turns.step_timeout_s=60",
        "~reward.scorers.exact_match",
        "save.best_metric=null",
        "algorithm.old_logp_source=replay",
        f"data.path={tmp_path / 'sums.jsonl'}",
        f"eval.prompts={tmp_path / 'sums.jsonl'}",
        *("eval.num_samples=8", "eval.batch_size=8"),
        *("batch_size=4", "sampling.samples_per_prompt=16", "stack.micro_batch_size=64", "num_rollouts=1"),
        *("stack.num_updates_per_batch=1", "eval.interval=0", "guardrails.action=off", f"run_dir={tmp_path / 'run'}"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [Path(sys.executable).with_name("trainer"), "worlds/tools/grpo", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    of_rollouts = [each for each in found if "text/rollout/task_replies" in each]
    assert len(of_rollouts) == 1
    for each in of_rollouts:
        assert each["policy/first_ratio_max_abs_dev"] == 0.0
        assert each["text/rollout/task_replies"] == each["text/rollout/turns"] > 1.0
        assert each["text/rollout/calls"] > 0.0


def test_what_is_not_carried_of_verifiers_fails_its_episode_by_name():
    found = played("odd")
    for name in ("nothing", "stream"):
        assert found[name][2]["terminated"] and found[name][2]["reward"] == 1.0
    assert "asks for temperature" in found["sampling"][1]["reason"]
    assert "do not continue the 2 before" in found["shorten"][1]["reason"]
    assert "a message shows image_url" in found["image"][1]["reason"]
    twice = next(step["reason"] for step in found["twice"][1:] if "reason" in step)
    assert "asks twice at once" in twice or "do not continue" in twice
    assert "within 10 s (turns.environment.timeout_s)" in found["hang"][1]["reason"]
    assert "no_such_set" in found["refused"] and "cannot be begun" in found["refused"]
