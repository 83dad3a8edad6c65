"""`scripts/gpu_report` on this machine's accelerator."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from unirl.types.device_kinds import kind_of

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_report"


def test_small_models_are_measured_and_every_check_holds(device, tmp_path):
    """Without the model of released size, which takes minutes: run the script itself for it."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", device, "--cases", "shapes", "arithmetic", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["environment"]["device"] == device
    if kind_of(device).counts_memory:
        for case in found["cases"].values():
            assert case["bytes_are"] == "allocated" and case["phases"]["train"]["peak_bytes"] > 0
    if kind_of(device).has_ragged_attention:
        assert any("varlen" in name for name in found["cases"]["arithmetic"]["attention"]["step"])
    assert found["pushes"]["device"] == device
