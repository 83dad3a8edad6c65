"""The script that kills random processes of runs, with few kills."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "survives_kills"


@pytest.mark.matrix
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["local-sync"])  # the others take minutes: run the script
def test_random_kills_lose_nothing_and_leave_nothing_behind(tmp_path, name):
    report = tmp_path / "report.json"
    options = ["--rollouts", "12", "--seeds", "0", "--overlap", "0", "--report", str(report)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), f"{name}=2", *options], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(report.read_text())["configurations"]
    assert len(found["kills"]) == 2 and found["num_trained"] == 12 * 512
    assert (found["num_lost"], found["num_doubled"], found["num_orphans"], found["faults"]) == (0, 0, 0, [])
