"""HunyuanImage3 thinks, then draws, and learns from both: two joint steps of LoRA on a tiny one."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import torch
from unified_steps import DRAWING, THINKING, WEIGHTS, rollout

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.pipeline import EXPERTS, HunyuanImage3Pipeline, HunyuanImage3TextPipeline
from unirl.sde.kernels import FlowSDEStrategy
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import LoraConfig, OptimizerConfig
from unirl.train.stack import TrainStack
from unirl.train.track_loss import TrackLoss
from unirl.types.media import SizedImages
from unirl.types.noise import noise_key
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.segments import LatentSegment, SizedLatents, TextSegment

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
    assert backend.progress.num_optimizer_steps == 2
    moved = {name for name, tensor in bundle.decoder.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved and all(".self_attn." in name and ".lora_" in name for name in moved)
    assert not torch.allclose(*sampled, atol=1e-4)


WIDE, SQUARE, ASKED = (32, 96), (64, 64), (48, 80)


def choosing(folder: Path) -> HunyuanImage3Bundle:
    """A model that soon ends its caption, and whose thoughts choose between 32 x 96 and 64 x 64 pixels."""
    bundle = HunyuanImage3Bundle(str(tiny.save_hunyuan_image3(folder)))
    words, weight = bundle.words, bundle.head.weight
    with torch.no_grad():
        weight[list(words.ratios)] = 0
        weight[words.recaption_end, 0] = 1000.0
        for size, sign in ((WIDE, 1e-3), (SQUARE, -1e-3)):
            weight[words.ratios[bundle.sizes.index(size)], 8] = sign
    return bundle


def test_thoughts_choose_the_sizes_of_their_images(tmp_path: Path) -> None:
    """Two joint steps on images of three sizes, one of them that of thoughts which ended before they chose. Each is
    what its thought makes alone, and a replay with the rows of the rollout is the rollout's, bit for bit."""
    bundle = choosing(tmp_path / "model")
    writer = HunyuanImage3TextPipeline(bundle, task="recaption", chooses_size=True)
    painter = HunyuanImage3Pipeline(bundle, FlowSDEStrategy(), decode_batch_size=4, replays_experts=True)
    steps = {"num_inference_steps": 2, "sde_indices": [0]}
    drawing = dataclasses.replace(DRAWING, samples_per_prompt=1, height=ASKED[0], width=ASKED[1], **steps)
    backend = FSDPBackend(
        bundle, optimizer=OptimizerConfig(learning_rate=1e-3), lora=LoraConfig(rank=2, alpha=4), device="cpu"
    )
    algorithms = {
        "text": ARGRPO(writer, backend),
        "image": DiffusionGRPO(painter, backend, clip_range=1e-2, old_logp_source="rollout"),
    }
    # Of a whole rollout: the images of one size are one forward, as they were when they were drawn.
    stack = TrainStack(backend, algorithms, micro_batch_size=4, max_grad_norm=1.0)
    for step in range(2):
        tracks = rollout(writer, painter, drawing, dataclasses.replace(THINKING, max_new_tokens=8))
        image, text = tracks["image"], tracks["text"]
        segment, pictures, written = image.segment, image.decoded, text.segment
        assert isinstance(segment, SizedLatents) and isinstance(pictures, SizedImages)
        assert isinstance(written, TextSegment)
        chosen = [size or ASKED for size in writer.chosen_sizes(written)]
        assert segment.sizes == chosen
        assert [tuple(picture.shape[1:]) for picture in pictures.images] == segment.sizes
        assert text.counts["no_size"].tolist() == [float(size == ASKED) for size in chosen]
        if step == 0:
            assert set(chosen) == {WIDE, SQUARE, ASKED}
            alone_and_together(painter, image)
        metrics = stack.train(RolloutResp(tracks=tracks), progress=0.0).metrics
        assert metrics["image/policy/first_ratio_max_abs_dev"] == 0
        assert metrics["train/grad_norm"] > 0
    assert backend.progress.num_optimizer_steps == 2


def alone_and_together(painter: HunyuanImage3Pipeline, image: RolloutTrack) -> None:
    """The last image of each size, drawn alone from its noise, is the one among the others."""
    for rows, part in image.by_size():
        segment, last = part.segment, part.slice(len(rows) - 1, len(rows))
        assert isinstance(segment, LatentSegment) and segment.params is not None
        assert tuple(segment.latents.shape[-2:]) == (segment.params.height // 16, segment.params.width // 16)
        with painter.evaluating():
            drawn = painter.diffuse(
                {slot: value for slot, value in last.conditions.items() if slot != EXPERTS},
                segment.latents[-1:, 0],
                segment.sigmas,
                segment.params,
                noise_keys=[noise_key(0, last.sample_ids[0])],
            )
        # Matrices of other heights in the experts: float32's rounding.
        torch.testing.assert_close(drawn.latents, segment.latents[-1:], rtol=1e-5, atol=1e-4)
        assert drawn.sde_logp is not None and segment.sde_logp is not None
        torch.testing.assert_close(drawn.sde_logp, segment.sde_logp[-1:], rtol=0, atol=1e-5)
