"""One instance of a real engine over two processes of a CPU: its samples and pushes are those of one."""

import pytest
from letters_model import CONTEXT, TOLERANCE, LetterCodec, gap, save_qwen3
from served_engines import engine_python, marked, nightly
from test_vllm_weights import full_sync, push, state

from unirl.rollout.engine.sglang_llm.engine import SGLangRolloutEngine
from unirl.rollout.engine.vllm_llm.engine import VLLMRolloutEngine
from unirl.types.errors import WeightSyncError

pytestmark = [pytest.mark.slow]
START = {
    "vllm": lambda **options: VLLMRolloutEngine(
        LetterCodec(), context_length=CONTEXT, kv_cache_bytes=64 << 20, **options
    ),
    "sglang": lambda **options: SGLangRolloutEngine(
        LetterCodec(), device="cpu", kv_cache_tokens=16 * CONTEXT, **options
    ),
}


@pytest.mark.parametrize("name", [marked("vllm"), nightly(marked("sglang"))])
def test_two_ranks_take_pushes_and_give_log_probs_as_one(name, tmp_path):
    model = save_qwen3(tmp_path / "model")
    python = engine_python(f"{name}-cpu")
    engine = START[name](model=str(tmp_path / "model"), python=python, dtype="fp32", num_devices=2)
    try:
        assert gap(engine, model) < TOLERANCE
        other = save_qwen3(tmp_path / "other", seed=1)
        assert gap(engine, other) > 0.1
        receipt = push(engine, state(other), 3)
        # On each rank q, k and v are one parameter, and so are gate and up: 3 fewer in each of the two layers.
        assert (receipt.num_tensors, receipt.num_bound) == (25, 2 * (25 - 2 * 3))
        assert gap(engine, other) < TOLERANCE
        assert full_sync(engine, model, 4)[1].push()["sync/logprob_gap_max"] < TOLERANCE
        with pytest.raises(WeightSyncError, match="older than the engine's version 4"):
            push(engine, state(other), 3)
    finally:
        engine.shutdown()
