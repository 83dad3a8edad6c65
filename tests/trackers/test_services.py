"""Every service that a run can report to, for real: its own library, offline, in the environment of
`uv sync --project environments/trackers`."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "environments" / "trackers" / ".venv" / "bin" / "python"
POINTS = {"1": 0.1, "2": 0.2, "3": 0.3, "4": 0.4}
"""What a run that was cut off after two rollouts and resumed has reported, as one curve."""

pytestmark = [
    pytest.mark.trackers,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs uv sync --project environments/trackers"),
]


@pytest.fixture
def reported(tmp_path):
    """What the library of a service reads back of a run that was reported to it."""

    def report(service):
        environment = os.environ | {
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "OMP_NUM_THREADS": "1",
            "TRACKIO_DIR": str(tmp_path / "trackio"),
            "WANDB_SILENT": "true",
        }
        command = [PYTHON, ROOT / "tests" / "trackers" / "reported.py", service, tmp_path]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
        return json.loads(line)

    return report


def test_wandb(reported):
    assert reported("wandb") == {
        "points": POINTS,
        "samples": ["samples/rollout", "samples/rollout/sound/audio", "samples/rollout/video/videos", "samples/texts"],
        "files": [".json", ".mp4", ".png", ".wav"],
        "alerts": ["no weight moves"],
        "ends": [1, 0],
    }


def test_swanlab(reported):
    found = reported("swanlab")
    assert found["points"] == POINTS
    assert found["samples"] == {
        "samples/rollout": ".png",
        "samples/rollout/video": ".gif",
        "samples/rollout/sound": ".wav",
        "samples/texts": ".txt",
        "alerts/zero_gradient": ".txt",
    }
    assert found["alerts"] == ["no weight moves"]
    assert len(set(found["ends"])) == 2, "a run that was cut off ends otherwise than one that finished"


def test_mlflow(reported):
    found = reported("mlflow")
    assert found["points"] == POINTS
    assert found["losses"] == [1.0], "MLflow refuses what is not finite"
    assert {".png", ".mp4", ".wav"} <= set(found["files"])
    assert set(found["names"]) >= {
        "config.yaml",
        "summary.json",
        "samples/rollout-000002/a.mp4",
        "samples/rollout-000002/a.wav",
        "samples/texts-000002.json",
    }
    assert found["parameters"] | {"backend.optimizer.learning_rate": "0.0003", "seed": "1"} == found["parameters"]
    assert found["alerts"] == ["after rollout 2: no weight moves"]
    assert found["ends"] == ["FINISHED"]


def test_trackio(reported):
    assert reported("trackio") == {
        "points": POINTS,
        "samples": {
            "samples/rollout": "trackio.image",
            "samples/rollout/video/0": "trackio.video",
            "samples/rollout/sound/0": "trackio.audio",
            "samples/texts": "trackio.table",
        },
        "alerts": ["no weight moves"],
        "name": "worlds/test run",
    }


def test_tensorboard(reported):
    found = reported("tensorboard")
    assert (found["points"], found["images"], found["audio"]) == (POINTS, ["rollout"], ["rollout/0"])
    assert "texts/text_summary" in found["texts"] and "alerts/zero_gradient/text_summary" in found["texts"]


def test_opentelemetry(tmp_path):
    command = [PYTHON, ROOT / "tests" / "trackers" / "traced.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["paths"], found["keys"]) == (["/v1/traces"], ["k"])
    assert {(each["service"], each["recipe"]) for each in found["spans"]} == {("unirl", "worlds/test")}
    first, second = ([each for each in found["spans"] if each["trace"] == trace] for trace in (0, 1))
    if len(first) == 2:  # traces have random numbers
        first, second = second, first
    first, second = (sorted(each, key=lambda span: span["parent"] is not None) for each in (first, second))
    kept = ("lane", "name", "parent", "begin", "end", "about")
    assert [tuple(each[name] for name in kept) for each in first] == [
        ("run", "rollout 1", None, 0.0, 3.5, {"unirl.step": 1}),
        ("engine", "rollout", "rollout 1", 0.0, 2.0, {"unirl.rollout": 0}),
        ("pool/rollout-1", "engine.generate", "rollout 1", 0.5, 1.5, {}),
        ("learner", "train", "rollout 1", 2.0, 3.5, {"unirl.rollout": 0}),
    ]
    assert [tuple(each[name] for name in kept) for each in second] == [
        ("run", "rollout 2", None, 3.5, 4.0, {"unirl.step": 2}),
        ("engine", "rollout", "rollout 2", 3.5, 4.0, {"unirl.rollout": 1, "unirl.request": 2, "unirl.version": 1}),
    ]
    # A collector that is gone is said once, by us alone, and holds nothing up.
    assert found["closing_s"] < 10
    (said,) = done.stderr.strip().splitlines()
    assert "traces cannot be sent to http://127.0.0.1:" in said and "trackers.opentelemetry.endpoint" in said
