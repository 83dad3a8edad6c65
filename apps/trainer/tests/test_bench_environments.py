"""The script that measures environments runs, and two parts of a batch save what they should."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "environments.py"


@pytest.mark.nightly
def test_two_parts_of_a_batch_hide_most_of_the_waits_of_one():
    command = [sys.executable, SCRIPT, "--only", "turns", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"equal waits: ([0-9.]+)x", done.stdout)
    assert found is not None and float(found[1]) >= 1.6
