"""A device without float64 (Apple's) gets no tensor of it. A rehearsal sees every tensor that is made on a device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("narrow_device.py")


def places(*words):
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "worlds/arithmetic/grpo",
        *(
            pytest.param(each, marks=pytest.mark.matrix)
            for each in (
                "worlds/arithmetic/cispo",
                "worlds/arithmetic/dr_grpo",
                "worlds/arithmetic/drpo",
                "worlds/arithmetic/ppo",
                "worlds/edits/nft",
                "worlds/moves/nft",
                "worlds/phrases/both",
                "worlds/shapes/cppo",
                "worlds/shapes/flowgrpo",
                "worlds/shapes/flowdppo",
                "worlds/shapes/ppo",
                "worlds/shapes/nft",
            )
        ),
    ],
)
def test_a_step_makes_no_float64_on_a_device_without_it(name):
    assert places(name) == []


@pytest.mark.matrix
def test_float64_is_used_where_there_is_some():
    found = places("worlds/arithmetic/ppo", "--wide")
    assert {place.split(":")[0] for place in found} >= {
        "algorithms/base.py",
        "algorithms/gae.py",
        "models/token_sampling.py",
        "train/update.py",
    }
