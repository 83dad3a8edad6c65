"""The engines that sample latents in their own processes, as tests start them: float32, on one thread."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from unirl.rollout.engine.served_latents.engine import ServedLatentsEngine
from unirl.rollout.engine.sglang_diffusion.engine import SGLangDiffusionEngine
from unirl.rollout.engine.vllm_omni.engine import VLLMOmniEngine

ENVIRONMENTS = Path(__file__).parents[2] / "environments"


@dataclass(frozen=True)
class Served:
    """An engine and the environment of its process."""

    name: str
    """Also the marker of its tests."""
    engine_class: Callable[..., ServedLatentsEngine]
    environment: str
    recipe: str
    """On the shapes world."""
    has_workers: bool
    """True if the model is in processes that the engine's process starts, where one device samples."""

    @property
    def python(self) -> str:
        """The interpreter that has the engine; skips the test where there is none."""
        return engine_python(self.environment)

    def start(self, pipeline: Any, checkpoint: Path, **options: Any) -> Any:
        """An engine of a pipeline; the caller shuts it down."""
        settings = {"dtype": "fp32", "forward_batch_size": 8, **options}
        return self.engine_class(pipeline, model=str(checkpoint), python=self.python, **settings)


SERVED: Mapping[str, Served] = {
    served.name: served
    for served in (
        Served("sglang", SGLangDiffusionEngine, "sglang-cpu", "worlds/shapes/sglang", True),
        Served("vllm_omni", VLLMOmniEngine, "vllm-omni-cpu", "worlds/shapes/vllm_omni", False),
    )
}


def engine_python(environment: str) -> str:
    """The interpreter of an environment; skips the test where it was not made."""
    python = ENVIRONMENTS / environment / ".venv" / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"needs its environment: uv sync --project environments/{environment}")
    return str(python)


def marked(name: str, *values: object) -> Any:
    """Parameters of a test by one engine: its name, and what else."""
    return pytest.param(name, *values, marks=getattr(pytest.mark, name), id="-".join([name, *map(str, values)]))


def nightly(parameters: Any) -> Any:
    """Parameters of `marked`, for a test that `.ci/run` leaves out."""
    return pytest.param(*parameters.values, marks=(*parameters.marks, pytest.mark.nightly), id=parameters.id)
