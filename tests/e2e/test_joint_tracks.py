"""Two tracks on one backend end in one optimizer step, whose gradient is the weighted sum of the tracks' own.

On the real miniature models in float64. Log-probs are computed in float32 as always, which rounds a track alike in
every run; the rest is the order of additions.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.app.environment import register_resolvers
from unirl.config import instantiate
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.data.data_source import PromptRow
from unirl.distributed.worker import WorkerContext
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.train.stack import TrainStack
from unirl.train.track_loss import TrackLoss
from unirl.trainer.build.worker import build_components
from unirl.trainer.request import build_request, build_text_request
from unirl.types.rollout import RolloutReq, RolloutResp, RolloutTrack
from unirl.types.training import StepStats

WEIGHTS = {"first": 0.3, "second": 1.7}
PROMPTS = {
    "worlds/shapes/flowgrpo": {"first": ["red circle"], "second": ["two blue squares", "green triangle"]},
    "worlds/arithmetic/grpo": {"first": ["3+4="], "second": ["12+30=", "9-2="]},
}
FEW = ["sampling.samples_per_prompt=2", "engine.forward_batch_size=4"]
FEW_STEPS = {"worlds/shapes/flowgrpo": ["sampling.num_inference_steps=2"]}


class StandingBackend(FSDPBackend):
    """Remembers the gradients of a step instead of taking it, so that every run meets the same weights."""

    def optimizer_step(self, max_grad_norm: float) -> StepStats:
        """The gradients, as copies."""
        self.found = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
        return StepStats(grad_norm=0.0, lr=0.0, is_skipped=False)


def request(recipe: Any, engine: Any, prompts: list[str], rollout_id: int) -> RolloutReq:
    """What the trainer of the modality would ask for."""
    rows = [PromptRow(prompt, prompt, {}) for prompt in prompts]
    params = instantiate(recipe["sampling"])
    if recipe["recipe"].startswith("worlds/arithmetic"):
        return build_text_request(rows, params, rollout_id=rollout_id)
    params = params.resolved(0)
    plan = engine.plan(params)
    return build_request(rows, params, sigmas=plan.sigmas, latent_shape=plan.latent_shape, rollout_id=rollout_id)


def sampled(recipe: Any, engine: Any, name: str) -> RolloutTrack:
    """A track of the engine with advantages of both signs."""
    names = list(WEIGHTS)
    resp = engine.generate(request(recipe, engine, PROMPTS[recipe["recipe"]][name], names.index(name)))
    track = resp.root_track()
    advantages = torch.randn(track.batch_size, generator=torch.Generator().manual_seed(names.index(name)))
    return track.replace(advantages=advantages)


@pytest.mark.parametrize("name", list(PROMPTS))
def test_the_joint_gradient_is_the_weighted_sum_of_the_single_ones(tmp_path: Path, name: str):
    register_resolvers()
    recipe = resolve(compose(name, [*FEW, *FEW_STEPS.get(name, [])]))
    built: Any = build_components(run_of(recipe), str(tmp_path), WorkerContext(rank=0, world_size=1, device="cpu"))
    tracks = {track: sampled(recipe, built["engine"], track) for track in WEIGHTS}
    tracks["second"] = tracks["second"].replace(
        parent_track="first", parent_ids=[tracks["first"].sample_ids[i // 2] for i in range(4)]
    )
    backend = StandingBackend(built["bundle"], optimizer=OptimizerConfig(learning_rate=1.0), device="cpu")
    for module in built["bundle"].trainable_modules().values():
        module.double()

    def gradients(**given: RolloutTrack) -> dict[str, Tensor]:
        algorithms = {
            track: instantiate(recipe["algorithm"], pipeline=built["pipeline"], policies=backend) for track in given
        }
        losses = {track: TrackLoss(weight=WEIGHTS[track]) for track in given} if len(given) > 1 else None
        stack = TrainStack(backend, algorithms, micro_batch_size=3, max_grad_norm=math.inf, losses=losses)
        stack.train(RolloutResp(tracks=given), progress=0.0)
        return backend.found

    single = {
        "first": gradients(first=tracks["first"]),
        "second": gradients(second=tracks["second"].replace(parent_track=None)),
    }
    joint = gradients(**tracks)
    assert {gradient.dtype for gradient in joint.values()} == {torch.float64}
    assert joint.keys() == single["first"].keys() == single["second"].keys()
    for key, gradient in joint.items():
        expected = WEIGHTS["first"] * single["first"][key] + WEIGHTS["second"] * single["second"][key]
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    assert any(bool(gradient.any()) for gradient in joint.values())
