"""Hooks of SGLang Diffusion's processes, on requests alone."""

import sys
from types import SimpleNamespace

import pytest
import torch

from unirl.rollout.engine.sglang_diffusion.worker_ext import (
    GIVEN,
    adapt_text_refiner,
    add_per_sample,
    keep_given_text,
    read_texts_alone,
    with_adapters,
)


@pytest.fixture
def samples_elsewhere(monkeypatch):
    """SGLang samples on another device than requests come from: meta stands for a GPU."""
    distributed = SimpleNamespace(get_local_torch_device=lambda: torch.device("meta"))
    monkeypatch.setitem(sys.modules, "sglang.multimodal_gen.runtime.distributed", distributed)


def request_with(**extra):
    return SimpleNamespace(
        prompt_embeds=[torch.ones(2, 3, 4), torch.ones(2, 5)],
        pooled_embeds=[torch.ones(2, 4)],
        negative_prompt_embeds=None,
        neg_pooled_embeds=[],
        image_embeds=[torch.ones(2, 6, 4)],
        image_latent=torch.ones(2, 3, 1, 2, 2),
        timesteps=torch.tensor([1000.0, 500.0]),
        scheduler=SimpleNamespace(timesteps=torch.tensor([1000.0, 500.0]), sigmas=torch.tensor([1.0, 0.5, 0.0])),
        extra=extra,
    )


def test_given_prompts_and_noise_levels_are_moved_to_the_device_that_samples(samples_elsewhere):
    batch = keep_given_text(None, None, request_with(**{GIVEN: {}}), None)
    levels = [batch.timesteps, batch.scheduler.timesteps, batch.scheduler.sigmas]
    given = [*batch.prompt_embeds, *batch.pooled_embeds, *batch.image_embeds, batch.image_latent]
    assert [tuple(tensor.shape) for tensor in given] == [(2, 3, 4), (2, 5), (2, 4), (2, 6, 4), (2, 3, 1, 2, 2)]
    assert [tuple(tensor.shape) for tensor in levels] == [(2,), (2,), (3,)]
    moved = [*given, *levels]
    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert batch.negative_prompt_embeds is None and batch.neg_pooled_embeds == []


def test_requests_of_others_are_encoded(samples_elsewhere):
    batch = request_with()
    assert keep_given_text(lambda stage, own, server_args: ("encoded", own), None, batch, None) == ("encoded", batch)
    assert batch.prompt_embeds[0].device.type == "cpu"


@pytest.fixture
def denoised(monkeypatch):
    """What SGLang says of the request that it denoises."""
    context = SimpleNamespace(forward_batch=SimpleNamespace(extra={GIVEN: {}}))
    module = SimpleNamespace(get_forward_context=lambda: context)
    monkeypatch.setitem(sys.modules, "sglang.multimodal_gen.runtime.managers.forward_context", module)
    return context.forward_batch


def velocity(transformer, **inputs):
    """Reads every token that it is given, as SGLang's HunyuanVideo does."""
    seen.append(tuple(inputs["encoder_hidden_states"].shape))
    return inputs["hidden_states"] + inputs["encoder_hidden_states"].mean(dim=(1, 2))[:, None]


seen: list[tuple[int, ...]] = []


def test_hunyuan_video_reads_no_padding(denoised):
    lengths = torch.tensor([3, 1, 3, 2])
    mask = torch.arange(4) < lengths[:, None]
    texts = torch.randn(4, 4, 2, generator=torch.Generator().manual_seed(0))
    inputs = {
        "hidden_states": torch.arange(4.0)[:, None],
        "encoder_hidden_states": texts,
        "encoder_attention_mask": mask,
        "pooled_projections": None,
    }
    seen.clear()
    found = read_texts_alone(velocity, None, **inputs)
    alone = [row + text[:length].mean() for row, (text, length) in enumerate(zip(texts, lengths, strict=True))]
    torch.testing.assert_close(found[:, 0], torch.stack(alone))
    assert seen == [(1, 1, 2), (1, 2, 2), (2, 3, 2)]
    denoised.extra.clear()
    assert torch.equal(read_texts_alone(velocity, None, **inputs), velocity(None, **inputs))


def test_a_gate_of_a_sample_reaches_its_own_tokens():
    def plain(layer, a, b, c, k):
        return c + a * (k + b)

    a, c = torch.ones(2, 2, 3), torch.zeros(2, 2, 3)
    gate = torch.tensor([[1.0] * 3, [2.0] * 3])
    for b in (gate, gate[:, None]):
        assert torch.equal(
            add_per_sample(plain, None, a, b, c), torch.stack([gate[:1].expand(2, 3), gate[1:].expand(2, 3)])
        )


def test_the_text_refiner_takes_adapters():
    pipeline = SimpleNamespace(exclude_lora_layers=["img_in", "txt_in"])
    assert adapt_text_refiner(lambda own: own.exclude_lora_layers, pipeline) == ["img_in"]


def test_hunyuan_video_is_registered_as_a_pipeline_that_takes_adapters(monkeypatch):
    class Adapted:
        pass

    class HunyuanVideoPipeline:
        pass

    registry = SimpleNamespace(_PIPELINE_REGISTRY={})
    root = "sglang.multimodal_gen"
    monkeypatch.setitem(sys.modules, f"{root}.registry", registry)
    monkeypatch.setitem(sys.modules, f"{root}.runtime.pipelines_core", SimpleNamespace(LoRAPipeline=Adapted))
    for _ in range(2):  # SGLang asks again and again, and registers once
        with_adapters(lambda: registry._PIPELINE_REGISTRY.setdefault("HunyuanVideoPipeline", HunyuanVideoPipeline))
    found = registry._PIPELINE_REGISTRY["HunyuanVideoPipeline"]
    assert found.__mro__ == (found, Adapted, HunyuanVideoPipeline, object)
    assert (found.__name__, found.__module__) == ("HunyuanVideoPipeline", HunyuanVideoPipeline.__module__)
