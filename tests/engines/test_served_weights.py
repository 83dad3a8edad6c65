"""Pushes to real engines of latents, which call everything a success: what arrives, what is refused, what acts."""

import copy

import pytest
import torch
from shapes_sd3 import CHECKPOINT, gap, push, state

from unirl.distributed.weight_sync.last_push import LastPush
from unirl.types.errors import WeightSyncError
from unirl.types.weights import AdapterConfig, WeightBucket, weight_spec

pytestmark = [pytest.mark.slow]

TOLERANCE = 1e-4
"""As of test_served_latents."""
RANK = 4


def test_a_full_push_makes_the_engine_the_new_policy(painter, shapes, other):
    before = painter.policy_version
    assert gap(painter, other) > 0.1
    tensors = state(other)
    receipt = push(painter, tensors, before + 3)
    assert gap(painter, other) < TOLERANCE
    assert (receipt.policy_version, receipt.num_tensors) == (painter.policy_version, len(tensors)) == (before + 3, 95)
    assert receipt.num_bytes == sum(tensor.numel() * 4 for tensor in tensors.values())
    # SGLang counts the position table too, a buffer here; vLLM-Omni joins the projections of attention.
    assert receipt.num_bound == painter.ready().num_parameters
    push(painter, tensors, before + 4)  # the same again: the engine's own checksum must stay


def test_changed_elements_make_the_engine_the_new_policy(painter, other):
    last, version = LastPush(keeps_elements=True), painter.policy_version
    everything = push(painter, state(other), version + 1, last)
    present = other.bundle.transformer.state_dict()
    for number in range(2, 4):
        with torch.no_grad():
            for tensor in present.values():
                tensor.view(-1)[number::50] *= 1.5
        assert gap(painter, other) > 0.01
        receipt = push(painter, state(other), version + number, last)
        assert gap(painter, other) < TOLERANCE
        assert (receipt.num_tensors, receipt.num_bound) == (everything.num_tensors, everything.num_bound)
        assert receipt.num_bytes < 0.05 * everything.num_bytes


def test_what_does_not_fit_is_listed_and_the_engine_keeps_its_policy(painter, shapes):
    tensors, version = state(shapes), painter.policy_version
    push(painter, tensors, version + 1)
    wrong = dict(tensors)
    del wrong["proj_out.bias"]
    wrong["proj_out.biases"] = torch.ones(16)
    with pytest.raises(WeightSyncError, match=r"(?s)missing: proj_out.bias .*unknown: proj_out.biases"):
        push(painter, wrong, version + 2)
    with pytest.raises(WeightSyncError, match="of the policy is older than the engine's version"):
        push(painter, tensors, version)
    assert gap(painter, shapes) < TOLERANCE


@pytest.fixture(scope="module")
def adapted(served, shapes):
    """An engine for adapters."""
    engine = served.start(shapes, CHECKPOINT, max_lora_rank=RANK)
    yield engine
    engine.shutdown()


def adapter(pipeline, version, scale):
    """LoRA factors of projections of attention of SD3, and the model with them merged."""
    transformer, generator = pipeline.bundle.transformer, torch.Generator().manual_seed(version)
    tensors = {}
    for name, module in transformer.named_modules():
        if name.endswith((".attn.to_q", ".attn.to_v", ".attn.to_out.0")):
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, module.in_features, generator=generator)
            tensors[f"{name}.lora_B.weight"] = scale * torch.randn(module.out_features, RANK, generator=generator)
    config = AdapterConfig(rank=RANK, alpha=2 * RANK, target_modules=("to_q", "to_v", "to_out.0"))
    specs = tuple(weight_spec(name, tensor) for name, tensor in tensors.items())
    return WeightBucket(version, tensors, specs), config


def test_an_adapter_acts_in_the_place_of_the_last(adapted, shapes):
    engine = adapted
    transformer = shapes.bundle.transformer
    kept = copy.deepcopy(transformer.state_dict())
    try:
        for version, scale in ((1, 0.0), (2, 0.02), (3, 0.03)):
            bucket, config = adapter(shapes, version, scale)
            receipt = engine.load_adapter(bucket, config)
            assert (receipt.num_tensors, receipt.num_bound) == (len(bucket.tensors), len(bucket.tensors) // 2)
            merged = copy.deepcopy(kept)
            for name in bucket.tensors:
                layer = name.removesuffix(".lora_A.weight")
                if layer != name:
                    factor_b = bucket.tensors[f"{layer}.lora_B.weight"]
                    merged[f"{layer}.weight"] += 2 * factor_b @ bucket.tensors[name]
            transformer.load_state_dict(merged)
            assert gap(engine, shapes) < TOLERANCE
            transformer.load_state_dict(kept)
            assert (gap(engine, shapes) > 0.01) == (scale > 0)
        bucket, config = adapter(shapes, 4, 0.1)
        renamed = {f"transformer.{name}": tensor for name, tensor in bucket.tensors.items()}
        specs = tuple(weight_spec(name, tensor) for name, tensor in renamed.items())
        with pytest.raises(WeightSyncError, match="the adapter does not fit the engine's model"):
            engine.load_adapter(WeightBucket(4, renamed, specs), config)
        assert engine.policy_version == 3
    finally:
        transformer.load_state_dict(kept)
