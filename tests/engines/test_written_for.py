"""Each real engine has all that its adapter uses of it: the list is checked where the library is installed."""

import json
import subprocess

import pytest
from served_engines import engine_python

SAY = """
import json
from unirl.rollout.engine.written_for import {name} as written
library = written.require()
print(json.dumps([written.version, library.__version__.partition("+")[0]]))
"""


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        pytest.param("VLLM", "vllm-cpu", marks=pytest.mark.vllm),
        pytest.param("SGLANG_DIFFUSION", "sglang-cpu", marks=pytest.mark.sglang),
        pytest.param("VLLM_OMNI", "vllm-omni-cpu", marks=pytest.mark.vllm_omni),
    ],
)
def test_the_installed_engine_has_all_that_is_used_of_it(name: str, environment: str):
    words = [engine_python(environment), "-c", SAY.format(name=name)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    written, installed = json.loads(done.stdout.splitlines()[-1])
    assert written == installed
