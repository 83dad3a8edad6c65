"""Language models with experts: what is kept of a rollout's routing, replays that use it, and what is measured."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from unirl.models.kept_experts import EXPERTS
from unirl.models.qwen3.bundle import Qwen3MoeBundle
from unirl.models.qwen3.pipeline import Qwen3MoePipeline
from unirl.types.conditions import ExpertCondition
from unirl.types.errors import ContractError
from unirl.types.media import Texts
from unirl.types.sampling import ARSamplingParams

from .tiny_text import qwen3_moe, save_text_model

PARAMS = ARSamplingParams(temperature=0.9, max_new_tokens=8, seed=1, stop_token_ids=tuple(range(70)))
LAYERS, TOP_K, NUM_EXPERTS = 2, 2, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(qwen3_moe(), tmp_path_factory.mktemp("qwen3_moe"))


Rollout = tuple[Qwen3MoePipeline, dict[str, Any], Any]


@pytest.fixture
def rollout(folder: Path) -> Callable[..., Rollout]:
    def sampled(**options: Any) -> Rollout:
        pipeline = Qwen3MoePipeline(Qwen3MoeBundle(str(folder)), **options)
        # Equal prompts are computed once, and samples end at different tokens.
        conditions = pipeline.encode({"text": Texts(texts=["1+1=", "a longer prompt", "1+1=", "ab"])}, PARAMS)
        with pipeline.evaluating():
            segment = pipeline.generate(conditions, PARAMS, noise_keys=["a", "b", "c", "d"])
        return pipeline, conditions, segment

    return sampled


def move_gates(pipeline: Qwen3MoePipeline) -> None:
    """An update that sends many tokens elsewhere."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in pipeline.bundle.model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("packed", [True, False])
def test_replays_send_tokens_to_the_experts_of_the_rollout(packed: bool, rollout: Callable[..., Rollout]) -> None:
    pipeline, conditions, segment = rollout(replays_experts=True, packed=packed)
    kept = conditions[EXPERTS]
    assert segment.lengths.tolist() == [4, 2, 8, 1]  # samples that end leave the cache of those that go on
    assert isinstance(kept, ExpertCondition) and kept.experts.shape[1] == LAYERS * TOP_K
    free = {name: value for name, value in conditions.items() if name != EXPERTS}
    # In float32 a forward of all tokens finds the experts that they went to one by one.
    once = pipeline.experts(free, segment)
    assert torch.equal(kept.experts, once.experts) and torch.equal(kept.lengths, once.lengths)
    assert torch.equal(
        pipeline.replay(conditions, segment, PARAMS).logp_N, pipeline.replay(free, segment, PARAMS).logp_N
    )
    assert float(pipeline.replay_metrics()["routing/busiest_expert"][0]) >= LAYERS
    pipeline.replay(conditions, segment, PARAMS)
    assert int(pipeline.replay_metrics()["routing/changed_fraction"][0]) == 0

    move_gates(pipeline)
    stats = pipeline.replay(conditions, segment, PARAMS)
    changed, num_choices = pipeline.replay_metrics()["routing/changed_fraction"]
    num_tokens = int(kept.lengths.sum())
    assert num_choices == num_tokens * LAYERS * TOP_K and 0 < int(changed) < num_choices
    own = pipeline.experts(free, segment)
    same = [set(a.tolist()) == set(b.tolist()) for a, b in zip(own.experts[:, :2], kept.experts[:, :2], strict=True)]
    assert not all(same)
    assert not torch.allclose(stats.logp_N, pipeline.replay(free, segment, PARAMS).logp_N, atol=1e-4)
    stats.logp_N.sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for name, parameter in pipeline.bundle.model.named_parameters()
        if name.endswith("mlp.gate.weight")
    )


def test_packed_and_padded_replays_agree_and_pads_do_not_count(rollout: Callable[..., Rollout]) -> None:
    found = []
    for packed in (True, False):
        pipeline, conditions, segment = rollout(replays_experts=True, packed=packed)
        move_gates(pipeline)
        logp = pipeline.replay(conditions, segment, PARAMS).logp_N
        found.append((logp, {name: float(a) / b for name, (a, b) in pipeline.replay_metrics().items()}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


def test_recomputed_blocks_send_tokens_where_they_went(rollout: Callable[..., Rollout]) -> None:
    gradients = []
    for is_recomputed in (False, True):
        pipeline, conditions, segment = rollout(replays_experts=True)
        move_gates(pipeline)
        bundle = pipeline.bundle
        assert isinstance(bundle, Qwen3MoeBundle)
        if is_recomputed:
            for layer in bundle.model.model.layers:
                contexts = {"use_reentrant": False, "context_fn": bundle.recompute_contexts}
                layer.forward = partial(checkpoint, layer.forward, **contexts)
        pipeline.replay(conditions, segment, PARAMS).logp_N.sum().backward()
        gradients.append({name: p.grad for name, p in bundle.model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(value, gradients[1][name]) for name, value in gradients[0].items())


def test_what_is_measured_is_what_transformers_has(rollout: Callable[..., Rollout]) -> None:
    pipeline, conditions, segment = rollout()
    logits: list[torch.Tensor] = []
    for layer in pipeline.bundle.model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: logits.append(output[0].detach()))
    pipeline.replay(conditions, segment, PARAMS)
    metrics = {name: float(a) / b for name, (a, b) in pipeline.replay_metrics().items()}
    assert metrics.keys() == {"routing/busiest_expert", "routing/aux_loss"}
    layers: Any = tuple(logits)
    expected = load_balancing_loss_func(layers, NUM_EXPERTS, TOP_K)
    assert metrics["routing/aux_loss"] == pytest.approx(float(expected), rel=1e-5)
    loads = [each.topk(TOP_K).indices.flatten().bincount(minlength=NUM_EXPERTS) for each in logits]
    busiest = [NUM_EXPERTS * int(load.max()) / int(load.sum()) for load in loads]
    assert metrics["routing/busiest_expert"] == pytest.approx(sum(busiest) / LAYERS, rel=1e-6)


def test_experts_of_another_batch_are_refused(rollout: Callable[..., Rollout]) -> None:
    pipeline, conditions, segment = rollout(replays_experts=True)
    other = {**conditions, EXPERTS: conditions[EXPERTS].select([1, 0, 2, 3])}
    with pytest.raises(ContractError, match="expert indices of another batch"):
        pipeline.replay(other, segment, PARAMS)
