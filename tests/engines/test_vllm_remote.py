"""The real vLLM next to a Ray worker, pushed to from this process: nothing is shared but Ray's connection."""

import functools
import os
import time
from pathlib import Path
from typing import Any

import pytest
from letters_model import CONTEXT, TOLERANCE, LetterCodec, ReplayedQwen3, backend_of, save_qwen3

from unirl.distributed.group.ray_runtime import RayRuntime
from unirl.distributed.weight_sync.full import FullWeightSync
from unirl.distributed.weight_sync.remote_engines import RemoteEngines
from unirl.rollout.engine.vllm_llm.engine import VLLMRolloutEngine
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.sampling import ARSamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow]


class Probe:
    """Knows where the engine of a worker lives."""

    def __init__(self, engine: VLLMRolloutEngine) -> None:
        self._engine = engine

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def places(self) -> tuple[int, int, str]:
        """Process of the worker, process of vLLM, and the folder that only these two share."""
        return os.getpid(), self._engine.pids[0], str(self._engine._folder)


def is_alive(process_id: int) -> bool:
    """True if a process runs; one that has ended and waits for its parent does not."""
    stat = Path(f"/proc/{process_id}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def build(python, model, transfer_dir, context):
    """A worker with an engine alone."""
    engine = VLLMRolloutEngine(
        LetterCodec(),
        model=model,
        python=python,
        dtype="fp32",
        context_length=CONTEXT,
        kv_cache_bytes=64 << 20,
        transfer_dir=transfer_dir,
    )
    return {"engine": engine, "probe": Probe(engine)}


def test_an_engine_beside_another_worker_takes_the_policy_and_leaves_nothing_behind(vllm_python, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    private = tmp_path / "of_the_worker"
    private.mkdir()
    save_qwen3(tmp_path / "base", seed=0)
    model = save_qwen3(tmp_path / "policy", seed=1)
    builder = functools.partial(build, vllm_python, str(tmp_path / "base"), str(private))
    with RayRuntime(builder, num_devices=1, timeout_s=300, start_timeout_s=600) as rollouts:
        worker, vllm, folder = rollouts.role("probe").places()
        assert worker != os.getpid() and Path(folder).parent == private
        pipeline: Any = ReplayedQwen3(model)
        sync = FullWeightSync(
            backend_of(model),
            None,
            pipeline,
            sampling=ARSamplingParams(temperature=1.0),
            dtype="fp32",
            canary_tolerance=1e-4,
            bucket_bytes=100_000,
        )
        sync.connect(RemoteEngines(rollouts.remote_role("engine")))
        sync.prepare()
        metrics = sync.push()
        assert (metrics["sync/tensors"], metrics["sync/bound"]) == (25, 19)
        assert metrics["sync/logprob_gap_max"] < TOLERANCE
    deadline = time.monotonic() + 60
    while is_alive(vllm) or Path(folder).exists():
        assert time.monotonic() < deadline, (is_alive(vllm), Path(folder).exists())
        time.sleep(0.02)
