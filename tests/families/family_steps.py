"""One rollout of a tiny family and the gradient of one update on it: what one process and each of two ranks run."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.data.data_source import PromptRow
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.train.stack import TrainStack
from unirl.trainer.request import build_request
from unirl.types.media import Texts
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.segments import LatentSegment
from unirl.types.training import StepStats

kit: Any = importlib.import_module("packages.unirl-models.tests.families.kit")
"""The families as the package's own tests have them."""

SAMPLES_PER_PROMPT = 2
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5])
"""For two prompts with two samples each."""


class StandingBackend(FSDPBackend):
    """Remembers the gradients of a step instead of taking it."""

    def optimizer_step(self, max_grad_norm: float) -> StepStats:
        """Every rank gathers the whole gradients."""
        self.found = {
            name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
            for name, p in self.parameters.items()
            if p.grad is not None
        }
        return StepStats(grad_norm=0.0, lr=0.0, is_skipped=False)


def request_of(family: Any, engine: TrainsideRolloutEngine, params: Any, rollout_id: int) -> RolloutReq:
    """Two prompts, two samples each, with what else the family takes."""
    rows = [PromptRow(text, text, {}) for text in kit.TEXTS[:2]]
    params = params.resolved(rollout_id)
    plan = engine.plan(params)
    req = build_request(rows, params, sigmas=plan.sigmas, latent_shape=plan.latent_shape, rollout_id=rollout_id)
    inputs = {name: value.repeat_interleave(SAMPLES_PER_PROMPT) for name, value in family.inputs(len(rows)).items()}
    return dataclasses.replace(req, primitives={**req.primitives, **inputs})


def clean_latents(resp: RolloutResp) -> Tensor:
    """Clean latents of the root track."""
    segment = resp.root_track().segment
    assert isinstance(segment, LatentSegment)
    return segment.clean_latents


def gradients(name: str, folder: Path) -> dict[str, Tensor]:
    """The gradients of a Flow-GRPO update on this rank's share of four samples, summed over the ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    family, pipeline = kit.families()[name], kit.ours(name, folder / name)
    # Every rank samples all, before the model is sharded: sampling is not what is compared.
    engine = TrainsideRolloutEngine(pipeline, forward_batch_size=4, decode=False)
    params = family.sampling(num_inference_steps=3, samples_per_prompt=SAMPLES_PER_PROMPT)
    track = engine.generate(request_of(family, engine, params, 0)).root_track().replace(advantages=ADVANTAGES)
    share = len(ADVANTAGES) // world
    backend = StandingBackend(pipeline.bundle, optimizer=OptimizerConfig(learning_rate=1.0), device="cpu")
    algorithm = DiffusionGRPO(pipeline, backend, clip_range=1e-2, old_logp_source="replay")
    stack = TrainStack(backend, {"image": algorithm}, micro_batch_size=share, max_grad_norm=1.0)
    stack.prepare()
    stack.train(RolloutResp(tracks={"image": track.slice(rank * share, (rank + 1) * share)}), progress=0.0)
    return backend.found


def all_gradients(names: list[str], folder: Path) -> dict[str, dict[str, Tensor]]:
    """`gradients` of every family."""
    return {name: gradients(name, folder) for name in names}


LEVELS = torch.tensor([1.0, 0.95, 0.5, 0.2])
"""For four rows: where two ranks share them, each needs another expert of Wan 2.2."""


def expert_gradients(name: str, folder: Path) -> dict[str, Tensor]:
    """The gradients of the velocities of this rank's share of four rows, averaged over the ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    family, pipeline = kit.families()[name], kit.ours(name, folder / name)
    params = family.sampling()
    conditions = pipeline.encode({"text": Texts(texts=[*kit.TEXTS, kit.TEXTS[0]])}, params)
    noise = torch.randn(len(LEVELS), *pipeline.latent_shape(params), generator=torch.Generator().manual_seed(0))
    share = len(LEVELS) // world
    mine = slice(rank * share, (rank + 1) * share)
    backend = StandingBackend(pipeline.bundle, optimizer=OptimizerConfig(learning_rate=1.0), device="cpu")
    rows = {slot: condition.slice(mine.start, mine.stop) for slot, condition in conditions.items()}
    velocity = pipeline.velocity(rows, noise[mine], LEVELS[mine], torch.arange(share), params)
    (world * velocity.square().sum()).backward()
    backend.optimizer_step(1.0)
    return backend.found
