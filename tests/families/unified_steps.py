"""A tiny BAGEL thinks, then draws: one rollout of both tracks, and what one update makes of them."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from family_steps import StandingBackend
from torch import Tensor

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.data.data_source import PromptRow
from unirl.models.bagel.bundle import BagelBundle
from unirl.models.bagel.pipeline import BagelPipeline, BagelTextPipeline
from unirl.models.pipeline import DiffusionPipeline
from unirl.models.text_pipeline import AutoregressivePipeline
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.rollout.stages.engine import StagesEngine
from unirl.rollout.stages.reading import Asked, Thought
from unirl.sde.kernels import FlowSDEStrategy
from unirl.train.configs import OptimizerConfig
from unirl.train.stack import TrainStack
from unirl.train.track_loss import TrackLoss
from unirl.trainer.request import build_staged_request
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams, StagedSamplingParams
from unirl.types.stages import BuiltStage

tiny_bagel: Any = importlib.import_module("packages.unirl-models.tests.tiny_bagel")

PROMPTS = ["a red cat", "fog"]
WEIGHTS = {"text": 0.3, "image": 1.7}
THINKING = ARSamplingParams(samples_per_prompt=2, temperature=1.0, max_new_tokens=5)
DRAWING = DiffusionSamplingParams(
    samples_per_prompt=2,
    num_inference_steps=3,
    guidance_scale=3.0,
    negative_prompt="",
    height=32,
    width=32,
    eta=0.7,
    sde_indices=[0, 1],
    autocast_precision="fp32",
)


@dataclass
class Unified:
    """One bundle, its two pipelines, and what trains them."""

    bundle: BagelBundle
    writer: BagelTextPipeline
    painter: BagelPipeline
    backend: StandingBackend

    def algorithm(self, track: str) -> StageAlgorithm:
        """Algorithm of a track."""
        if track == "text":
            return ARGRPO(self.writer, self.backend)
        return DiffusionGRPO(self.painter, self.backend, clip_range=1e-2, old_logp_source="rollout")

    def stack(self, tracks: list[str], **options: Any) -> TrainStack:
        """A stack that weighs several tracks as above."""
        losses = {track: TrackLoss(weight=WEIGHTS[track]) for track in tracks} if len(tracks) > 1 else None
        algorithms = {track: self.algorithm(track) for track in tracks}
        return TrainStack(
            self.backend, algorithms, micro_batch_size=4, max_grad_norm=math.inf, losses=losses, **options
        )


class OneProcess:
    """Stands for the backend of a rollout: one rank, whose weights have never changed."""

    policy_version = 0

    def any_rank(self, value: bool) -> bool:
        """Stands for one rank."""
        return value


def unified(folder: Path) -> Unified:
    """Both experts train."""
    bundle = BagelBundle(str(folder), trains="both")
    writer, painter = BagelTextPipeline(bundle), BagelPipeline(bundle, FlowSDEStrategy())
    backend = StandingBackend(bundle, optimizer=OptimizerConfig(learning_rate=1.0), device="cpu")
    return Unified(bundle, writer, painter, backend)


def rollout(
    writer: AutoregressivePipeline,
    painter: DiffusionPipeline,
    drawing: DiffusionSamplingParams = DRAWING,
    thinking: ARSamplingParams = THINKING,
) -> dict[str, RolloutTrack]:
    """Two thoughts per prompt, two images per thought, with advantages of both signs."""
    rows = [PromptRow(prompt, prompt, {}) for prompt in PROMPTS]
    store: Any = OneProcess()
    texts = TrainsideTextEngine(writer, store, forward_batch_size=4)
    images = TrainsideRolloutEngine(painter, store, forward_batch_size=4)
    engine = StagesEngine(
        {
            "text": BuiltStage(engine=texts, pipeline=writer, reader=Asked(), policy="default"),
            "image": BuiltStage(engine=images, pipeline=painter, reader=Thought(), policy="default", grows_from="text"),
        }
    )
    params = StagedSamplingParams(stages={"text": thinking, "image": drawing})
    asked = build_staged_request(rows, params, engine.plans(params), rollout_id=0)
    made, generator = engine.generate(asked), torch.Generator().manual_seed(0)
    return {
        name: track.replace(advantages=torch.randn(track.batch_size, generator=generator))
        for name, track in made.tracks.items()
    }


def gradients_of_ranks(folder: Path) -> dict[str, Any]:
    """Gradients and balance of a joint update on this rank's share of the prompts."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # Sampled before the model is sharded: sampling is not what is compared.
    bundle = BagelBundle(str(folder), trains="both")
    tracks = rollout(BagelTextPipeline(bundle), BagelPipeline(bundle, FlowSDEStrategy()))
    made = unified(folder)
    mine = {}
    for name, track in tracks.items():
        share = track.batch_size // world
        mine[name] = track.slice(rank * share, (rank + 1) * share)
    result = made.stack(list(tracks), measures_balance=True).train(RolloutResp(tracks=mine), progress=0.0)
    found: dict[str, Tensor] = made.backend.found
    balance = {name: value for name, value in result.metrics.items() if "grad_norm" in name or "grad_cosine" in name}
    return {"gradients": found, "balance": balance}
