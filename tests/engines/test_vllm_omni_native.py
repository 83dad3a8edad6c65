"""vLLM-Omni runs on a CPU as it is installed: a random Qwen-Image of two layers, by its own pipeline."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from served_engines import SERVED
from tiny_pipelines import save_qwen_image

pytestmark = [pytest.mark.vllm_omni, pytest.mark.slow]


def test_it_draws_images_by_its_own_pipeline(tmp_path):
    words = [SERVED["vllm_omni"].python, str(Path(__file__).parent / "omni_native.py"), str(save_qwen_image(tmp_path))]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    said = done.stdout[done.stdout.rindex('{"version"') :]  # its log comes before, on the same stream
    assert json.loads(said) == {"version": "0.30.0", "shape": [64, 64, 3], "repeated": True, "seeded": True}
