"""A device without float64 (Apple's) gets no tensor of it. A rehearsal sees every tensor that is made on a device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("narrow_device.py")
NARROW = ["worlds/arithmetic/grpo"]
MORE = [
    *(f"worlds/arithmetic/{name}" for name in ("cispo", "dr_grpo", "drpo", "ppo")),
    *(f"worlds/shapes/{name}" for name in ("cppo", "flowgrpo", "flowdppo", "ppo", "nft")),
    "worlds/edits/nft",
    "worlds/moves/nft",
    "worlds/phrases/both",
]


def places(*words):
    """Recipe -> places."""
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [NARROW, pytest.param(MORE, marks=[pytest.mark.matrix, pytest.mark.nightly])], ids=["one", "more"]
)
def test_a_step_makes_no_float64_on_a_device_without_it(names):
    assert places(*names) == {name: [] for name in names}


@pytest.mark.matrix
@pytest.mark.nightly
def test_float64_is_used_where_there_is_some():
    found = places("worlds/arithmetic/ppo", "--wide")["worlds/arithmetic/ppo"]
    assert {place.split(":")[0] for place in found} >= {
        "algorithms/base.py",
        "algorithms/gae.py",
        "models/token_sampling.py",
        "train/update.py",
    }
