"""HunyuanImage3 thinks, then draws, and learns from both: two joint steps of LoRA on a tiny one."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import torch
from unified_steps import DRAWING, WEIGHTS, rollout

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.pipeline import EXPERTS, HunyuanImage3Pipeline, HunyuanImage3TextPipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import LoraConfig, OptimizerConfig
from unirl.train.stack import TrainStack
from unirl.train.track_loss import TrackLoss
from unirl.types.rollout import RolloutResp

tiny: Any = importlib.import_module("packages.unirl-models.tests.tiny_hunyuan_image3")


def test_two_joint_steps_on_thoughts_and_images(tmp_path: Path) -> None:
    """At the weights of the rollout every ratio is 1, with kept experts too; only adapters of attention move."""
    bundle = HunyuanImage3Bundle(str(tiny.save_hunyuan_image3(tmp_path / "model")))
    writer = HunyuanImage3TextPipeline(bundle, task="think_recaption", replays_experts=True)
    painter = HunyuanImage3Pipeline(bundle, FlowSDEStrategy(), decode_batch_size=4)
    backend = FSDPBackend(
        bundle, optimizer=OptimizerConfig(learning_rate=1e-2), lora=LoraConfig(rank=2, alpha=4), device="cpu"
    )
    algorithms = {
        "text": ARGRPO(writer, backend),
        "image": DiffusionGRPO(painter, backend, clip_range=1e-2, old_logp_source="rollout"),
    }
    stack = TrainStack(
        backend,
        algorithms,
        micro_batch_size=4,
        max_grad_norm=1.0,
        losses={track: TrackLoss(weight=weight) for track, weight in WEIGHTS.items()},
        measures_balance=True,
    )
    drawing = dataclasses.replace(DRAWING, height=32, width=96)
    before = {name: tensor.clone() for name, tensor in bundle.decoder.state_dict().items()}
    sampled = []
    for _ in range(2):
        tracks = rollout(writer, painter, drawing)
        assert EXPERTS in tracks["text"].conditions
        metrics = stack.train(RolloutResp(tracks=tracks), progress=0.0).metrics
        # Both steps of an image are replayed in one forward: experts multiply matrices of other heights than a rollout.
        assert metrics["image/policy/first_ratio_max_abs_dev"] < 1e-6
        assert metrics["text/policy/first_ratio_max_abs_dev"] == 0
        assert metrics["image/train/grad_norm"] > 0 and metrics["text/train/grad_norm"] > 0
        segment: Any = tracks["image"].segment
        sampled.append(segment.clean_latents)
    assert backend.num_optimizer_steps == 2
    moved = {name for name, tensor in bundle.decoder.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved and all(".self_attn." in name and ".lora_" in name for name in moved)
    assert not torch.allclose(*sampled, atol=1e-4)
