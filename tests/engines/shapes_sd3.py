"""The shipped SD3 of coloured shapes, requests for it, and direct sampling as the reference of engines."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

import unirl.worlds.shapes
from unirl.distributed.weight_sync.last_push import LastPush
from unirl.models.sd3.bundle import SD3Bundle
from unirl.models.sd3.pipeline import SD3Pipeline
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.sde.kernels import FlowSDEStrategy, SDEStrategy
from unirl.sde.schedule import SigmaSchedule
from unirl.types.media import Texts
from unirl.types.noise import noise_keys
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment
from unirl.types.weights import WeightReceipt, weight_buckets

CHECKPOINT = Path(next(iter(unirl.worlds.shapes.__path__))) / "checkpoint"
PROMPTS = ("a red circle", "two blue squares", "three green triangles", "a yellow square")
PARAMS = DiffusionSamplingParams(
    num_inference_steps=6,
    guidance_scale=1.0,
    height=32,
    width=32,
    eta=0.9,
    seed=7,
    autocast_precision="fp32",
    max_sequence_length=6,
)


def pipeline_of(strategy: SDEStrategy | None = None, bundle: SD3Bundle | None = None) -> SD3Pipeline:
    """The pipeline of the recipes on the shapes world."""
    return SD3Pipeline(
        bundle or SD3Bundle(str(CHECKPOINT)),
        strategy or FlowSDEStrategy(),
        SigmaSchedule(convention="linear", shift=3.0),
        decode_batch_size=48,
    )


def request(pipeline: Any, num: int = 6, rollout_id: int = 3, **changes: Any) -> RolloutReq:
    """`num` samples over the prompts; `changes` of PARAMS."""
    params = dataclasses.replace(PARAMS, **changes).resolved(rollout_id)
    ids = [f"s{row}" for row in range(num)]
    return RolloutReq(
        sample_ids=ids,
        group_ids=ids,
        primitives={"text": Texts(texts=[PROMPTS[row % len(PROMPTS)] for row in range(num)])},
        sampling_params=params,
        sigmas=pipeline.sigmas(params),
        init_noise_group_ids=noise_keys(rollout_id, ids, ids, same_noise=False),
        init_noise_latent_shape=list(pipeline.latent_shape(params)),
        rollout_id=rollout_id,
    )


def direct(pipeline: Any, req: RolloutReq) -> LatentSegment:
    """The segment that the model itself samples."""
    resp = TrainsideRolloutEngine(pipeline, forward_batch_size=req.batch_size).generate(req)
    segment = resp.tracks["image"].segment
    assert isinstance(segment, LatentSegment)
    return segment


def gap(engine: Any, pipeline: Any) -> float:
    """Between the latents of the engine and those of the model."""
    req = request(pipeline)
    found = engine.generate(req).tracks["image"].segment.latents
    return float((found - direct(pipeline, req).latents).abs().max())


def state(pipeline: Any, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """The transformer's tensors, its matrices scaled."""
    own = pipeline.bundle.transformer.state_dict()
    return {name: tensor * factor if name.endswith("weight") else tensor.clone() for name, tensor in own.items()}


def replay_gap(pipeline: Any, track: Any) -> torch.Tensor:
    """|log-prob of the engine - of a replay| [B, S]."""
    segment, rows = track.segment, torch.arange(track.batch_size)
    with pipeline.evaluating():
        own = [
            pipeline.replay(track.conditions, segment, rows, torch.full_like(rows, step), segment.params).logp_R
            for step in segment.sde_indices
        ]
    return (torch.stack(own, dim=1) - segment.sde_logp).abs()


def push(engine: Any, tensors: dict[str, torch.Tensor], version: int, last: LastPush | None = None) -> WeightReceipt:
    """Push all tensors in several buckets; or of what changed since `last`, which remembers this push."""
    third = sum(tensor.nbytes for tensor in tensors.values()) // 3
    base, changes = (None, None) if last is None else (last.begin(), last.changes)
    buckets = list(
        weight_buckets(tensors.items(), policy_version=version, max_bytes=third, base_version=base, changes=changes)
    )
    assert len(buckets) > 1 or base is not None
    engine.begin_weights(version, [spec for bucket in buckets for spec in (*bucket.specs, *bucket.kept)])
    for bucket in buckets:
        engine.receive_weights(bucket)
    receipt = engine.finish_weights(version)
    if last is not None:
        last.succeed(version)
    return receipt
