"""Samples move between processes by every data plane, bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "apps" / "trainer" / "bench" / "data_planes.py"


@pytest.mark.ray
@pytest.mark.matrix
def test_every_plane_gives_the_bits_that_it_took():
    # A process with its own Ray: TransferQueue reserves more cores than the tests' Ray has.
    done = subprocess.run(
        [sys.executable, str(BENCH), "--megabytes", "1", "3", "--repeats", "1"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines()[2:]]
    assert rows == ["ray", "rdt", "transfer_queue"]
