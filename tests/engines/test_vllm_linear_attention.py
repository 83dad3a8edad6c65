"""Qwen3.5 in the real vLLM against transformers, on a CPU, where vLLM computes linear attention in bfloat16 alone.

bfloat16 has 8 bits: log-probs of two computations differ by some hundredths at |logp| below 10, the largest of all by
0.05 to 0.21, as the processor multiplies.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from letters_model import CONTEXT, LetterCodec, gap

from unirl.models.causal_lm.bundle import CausalLMBundle
from unirl.models.qwen3_5.bundle import Qwen35Bundle, Qwen35VLBundle
from unirl.rollout.engine.vllm_llm.engine import VLLMRolloutEngine
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.types.weights import weight_buckets

tiny_text: Any = importlib.import_module("packages.unirl-models.tests.tiny_text")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
TOLERANCE = 0.3


def make_model(seed: int) -> Any:  # Any: transformers types it as a union
    """Heads of linear attention as wide as released ones, which is the one width of vLLM's kernel on a CPU."""
    torch.manual_seed(seed)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
        eos_token_id=0,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 3, 3],
            "mrope_interleaved": True,
        },
    )
    return transformers.Qwen3_5ForCausalLM(config).eval()


def make_seeing_model(seed: int) -> Any:  # Any: as above
    """The same layers with a vision tower, moved a little from the same start."""
    model = tiny_text.qwen_vl(
        "qwen3_5", head_dim=32, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=1
    )
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


@dataclass(frozen=True)
class Kind:
    """A model, how it is saved and what trains it."""

    make: Callable[[int], Any]
    save: Callable[[Any, Path], Any]
    bundle: type[CausalLMBundle]


KINDS = {
    "text": Kind(make_model, tiny_text.save_text_model, Qwen35Bundle),
    "vision": Kind(make_seeing_model, tiny_text.save_vision_model, Qwen35VLBundle),
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def linear(
    kind: Kind, vllm_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VLLMRolloutEngine, Any]]:
    """The engine with the model that it starts with."""
    folder: Path = tmp_path_factory.mktemp("qwen3_5")
    model = kind.make(0)
    kind.save(model, folder)
    engine = VLLMRolloutEngine(
        LetterCodec(),
        model=str(folder),
        python=vllm_python,
        dtype="bf16",
        context_length=CONTEXT,
        kv_cache_bytes=64 << 20,
        engine_args={"enable_prefix_caching": False},
    )
    yield engine, model
    engine.shutdown()


def test_log_probs_of_linear_attention_are_those_of_transformers(linear: tuple[VLLMRolloutEngine, Any]) -> None:
    engine, model = linear
    assert gap(engine, model) < TOLERANCE


def test_a_push_of_what_trains_makes_the_engine_the_new_policy(
    kind: Kind, linear: tuple[VLLMRolloutEngine, Any], tmp_path: Path
) -> None:
    engine, before = linear
    after = kind.make(1)
    kind.save(after, tmp_path)
    backend = FSDPBackend(kind.bundle(str(tmp_path)), optimizer=OptimizerConfig(learning_rate=1e-3))
    weights = [(name, tensor.detach().bfloat16()) for name, tensor in backend.weight_source.weights()]
    buckets = list(weight_buckets(weights, policy_version=2, max_bytes=100_000))
    engine.begin_weights(2, [spec for bucket in buckets for spec in bucket.specs])
    for bucket in buckets:
        engine.receive_weights(bucket)
    receipt = engine.finish_weights(2)
    backend.close()
    assert (receipt.policy_version, receipt.num_tensors) == (2, len(weights))
    assert gap(engine, after) < TOLERANCE
    assert gap(engine, before) > 3 * TOLERANCE
