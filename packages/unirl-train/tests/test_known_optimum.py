"""A world whose best policy is known: every algorithm must find it within a stated number of samples.

Images are N(mean, 0.3^2) and the velocity field is the exact one of that Gaussian, linear in the latent, with
the mean as its only parameter; it starts at 0. The reward is -(x0 - 1)^2, so the best policy has mean 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import FieldEngine, FieldPipeline, prompt_rows, sampling, setup
from torch import Tensor, nn

from unirl.algorithms.advantages import AdvantageConfig, Advantages
from unirl.algorithms.awm import AWM
from unirl.algorithms.branch_grpo import BranchGRPO
from unirl.algorithms.cppo import CPPO
from unirl.algorithms.crd import CRD
from unirl.algorithms.ddpo import DDPO
from unirl.algorithms.dgpo import DGPO
from unirl.algorithms.diffusion_dpo import DiffusionDPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.dpok import DPOK
from unirl.algorithms.flow_dppo import FlowDPPO
from unirl.algorithms.grpo_guard import GRPOGuard
from unirl.algorithms.sample_weights import SampleWeights
from unirl.algorithms.schedules import OldPolicyDecay
from unirl.algorithms.selection import SampleSelection
from unirl.algorithms.weighted_matching import WeightedMatching
from unirl.sde.kernels import CPSSDEStrategy, SDEStrategy
from unirl.trainer.request import build_request
from unirl.types.copies import copy_of
from unirl.types.segments import LatentSegment

BEST_MEAN = 1.0
SPREAD = 0.3
SHAPE = (1, 2, 2)
GROUP = 16
NUM_PROMPTS = 4


class GaussianField(nn.Module):
    """The exact velocity of N(mean, SPREAD^2): E[noise - x0 | x] is linear in x at every noise level."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(1))

    def forward(self, x_R: Tensor, sigma_R: Tensor, step_R: Tensor, text_R: Tensor) -> Tensor:
        """[R, ...] to the same shape."""
        sigma = sigma_R.reshape(-1, *(1,) * (x_R.ndim - 1))
        variance = (1 - sigma) ** 2 * SPREAD**2 + sigma**2
        centred = x_R - (1 - sigma) * self.mean
        return (sigma - (1 - sigma) * SPREAD**2) / variance * centred - self.mean


@dataclass(frozen=True)
class Way:
    """One algorithm with the settings it is used with."""

    kind: Any  # Any: a class of algorithms
    options: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    advantages: Advantages = AdvantageConfig()
    selection: SampleSelection = SampleSelection()
    strategy: SDEStrategy | None = None
    updates: int = 2
    num_rollouts: int = 40
    tolerance: float = 0.15


ODE = {"eta": 0.0, "sde_indices": []}
WAYS = {
    "flowgrpo": Way(DiffusionGRPO, {"clip_range": 0.2}),
    "flowgrpo_cps": Way(DiffusionGRPO, {"clip_range": 0.2}, strategy=CPSSDEStrategy()),
    "step_fraction": Way(DiffusionGRPO, {"clip_range": 0.2, "step_fraction": 0.6}, {"init_same_noise": True}),
    "window": Way(DiffusionGRPO, {"clip_range": 0.2}, {"sde_indices": [1], "init_same_noise": True}),
    "branches": Way(
        BranchGRPO,
        {"clip_range": 0.2, "samples_per_tree": GROUP, "micro": 2 * GROUP},
        {"init_same_noise": True, "branch_steps": [0, 1], "branch_factors": [2, GROUP // 2]},
    ),
    "guard": Way(GRPOGuard, {"clip_range": 0.05}),
    "dppo": Way(FlowDPPO, {"threshold": 0.02}),
    "cppo": Way(CPPO, {"threshold": 0.02, "prefix_threshold": 0.01}),
    "ddpo": Way(DDPO, {"estimator": "score_function"}, updates=1),
    "dpok": Way(DPOK, {"kl_coef": 1e-3}, updates=1),
    "nft": Way(DiffusionNFT, {"beta": 0.1, "advantage_max": 2.0, "decay": OldPolicyDecay(start=0.3, cap=0.5)}, ODE),
    "awm": Way(AWM, {"clip_range": 0.2}, ODE),
    "dgpo": Way(DGPO, {"beta": 20.0, "samples_per_group": GROUP, "micro": 2 * GROUP}, ODE),
    "crd": Way(
        CRD,
        {
            "samples_per_group": GROUP,
            "decay": OldPolicyDecay(start=0.25, rate=0.005, cap=0.5),
            "micro": 2 * GROUP,
        },
        ODE,
    ),
    "rwr": Way(WeightedMatching, {}, ODE, SampleWeights(kind="reward_weighted", temperature=0.1)),
    "raft": Way(WeightedMatching, {}, ODE, SampleWeights(kind="best_of_n", num_best=2)),
    "online_dpo": Way(DiffusionDPO, {"beta": 20.0}, ODE, selection=SampleSelection(best_of=2)),
}


def clean(segment: object) -> Tensor:
    assert isinstance(segment, LatentSegment)
    return segment.clean_latents


def trained(way: Way) -> tuple[list[float], int]:
    """The policy's mean after every rollout, and the number of samples it took."""
    made = setup(
        way.kind,
        model=GaussianField(),
        strategy=way.strategy,
        shape=SHAPE,
        lr=0.03,
        updates=way.updates,
        max_grad_norm=1.0,
        keep_reference=True,
        **way.options,
    )
    pipeline: FieldPipeline = made.pipeline
    engine = FieldEngine(pipeline, made.backend)
    params = sampling(samples_per_prompt=GROUP, **way.params)
    means, num_samples = [], 0
    for rollout_id in range(way.num_rollouts):
        req = build_request(
            prompt_rows(NUM_PROMPTS),
            params,
            sigmas=pipeline.sigmas(params),
            latent_shape=SHAPE,
            rollout_id=rollout_id,
        )
        copies = made.stack.rollout_policy()
        resp = engine.generate(req, copy_of(copies, "image", "default"))
        rewards = -(clean(resp.tracks["image"].segment) - BEST_MEAN).square().mean(dim=(1, 2, 3))
        advantages = way.advantages(rewards, req.group_ids)
        rows = way.selection.rows(advantages, req.group_ids, way.updates)
        if rows is not None:
            resp, advantages = resp.select(rows), advantages[rows]
        made.stack.train(with_advantages(resp, advantages), progress=rollout_id / way.num_rollouts)
        means.append(float(made.parameters["transformer.mean"]))
        num_samples += req.batch_size
    return means, num_samples


@pytest.mark.parametrize("name", WAYS)
def test_the_best_policy_is_found(name: str):
    way = WAYS[name]
    means, num_samples = trained(way)
    assert num_samples == way.num_rollouts * NUM_PROMPTS * GROUP == 2560
    settled = sum(means[-5:]) / 5
    assert abs(settled - BEST_MEAN) < way.tolerance, means[::5]


def test_the_field_is_that_of_its_gaussian():
    """The mean and the spread of many samples of the ODE at 50 steps."""
    model = GaussianField()
    with torch.no_grad():
        model.mean.fill_(0.4)
    pipeline = FieldPipeline(model, shape=SHAPE)
    params = sampling(samples_per_prompt=500, num_inference_steps=50, **ODE)
    req = build_request(prompt_rows(1), params, sigmas=pipeline.sigmas(params), latent_shape=SHAPE, rollout_id=0)
    drawn = clean(FieldEngine(pipeline).generate(req).tracks["image"].segment)
    assert float(drawn.mean()) == pytest.approx(0.4, abs=0.02)
    assert float(drawn.std()) == pytest.approx(SPREAD, abs=0.02)
