"""Hooks of SGLang Diffusion's processes, on requests alone."""

import sys
from types import SimpleNamespace

import pytest
import torch

from unirl.rollout.engine.sglang_diffusion.worker_ext import GIVEN, keep_given_text


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
