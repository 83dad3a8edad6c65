"""Losses on inputs that no healthy run has: they stay finite, rows that are out give no gradient, and ordinary inputs
get the bits of the plain formula.

Legend: R rows, M tokens, one and the same here.
"""

import itertools
import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
from diffusion_fakes import Stats
from torch import Tensor

from unirl.algorithms.advantages import AdvantageConfig, normalized_advantages
from unirl.algorithms.ar_cispo import ARCISPO
from unirl.algorithms.ar_dppo import ARDPPO
from unirl.algorithms.ar_dro import ARDRO
from unirl.algorithms.ar_drpo import ARDRPO
from unirl.algorithms.ar_gmpo import ARGMPO
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.ar_reinforce import ARReinforce
from unirl.algorithms.ar_sapo import ARSAPO
from unirl.algorithms.ar_vespo import ARVESPO
from unirl.algorithms.base import RowMetrics, report_ratio
from unirl.algorithms.cppo import CPPO
from unirl.algorithms.ddpo import DDPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.dpok import DPOK
from unirl.algorithms.flow_dppo import FlowDPPO
from unirl.algorithms.grpo_guard import GRPOGuard
from unirl.algorithms.losses import (
    MATCHING_WEIGHTINGS,
    MAX_LOG_RATIO,
    centred_reward_loss,
    clipped_surrogate,
    group_preference_loss,
    masked_surrogate,
    matching_logp,
    nft_loss,
    optimality,
    preference_loss,
    velocity_distance,
)
from unirl.algorithms.reference import ReferenceKL, sampled_kl
from unirl.algorithms.rollout_correction import MAX_WEIGHT, RolloutCorrection, correction_weights
from unirl.algorithms.token_losses import (
    gamma_weighted_loss,
    geometric_mean_loss,
    importance_log_ratio,
    quadratic_penalty_loss,
    regularised_loss,
    soft_gate_loss,
    truncated_ratio_loss,
)
from unirl.algorithms.tokens import TokenAlgorithm, TokenRows
from unirl.algorithms.transitions import TransitionAlgorithm, TransitionRows
from unirl.algorithms.values import value_loss
from unirl.types.errors import ConfigError
from unirl.types.protocols.models import AutoregressivePipeline, DiffusionPipeline
from unirl.types.protocols.training import PolicyStore

EXTREMES = (0.0, 1e-4, -1e-4, 1.0, -1.0, 19.0, -19.0, 88.0, -88.0, 89.0, -89.0, 1e4, -1e4)
LOGP, ANCHOR, ADVANTAGE = (torch.tensor(column) for column in zip(*itertools.product(EXTREMES, repeat=3), strict=True))
"""Every combination, float32 [R]."""
IS_OUTSIDE = (torch.arange(LOGP.numel()) % 2).bool()

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "clip": lambda p, a, adv: clipped_surrogate(p, a, adv, clip_low=0.2, clip_high=0.3)[0],
    "narrow clip": lambda p, a, adv: clipped_surrogate(p, a, adv, clip_low=1e-4, clip_high=1e-4)[0],
    "cap": lambda p, a, adv: clipped_surrogate(p, a, adv, clip_low=0.2, clip_high=0.3, ratio_cap=3.0)[0],
    "mask": lambda p, a, adv: masked_surrogate(p, a, adv, IS_OUTSIDE[: p.numel()])[0],
    "cispo": lambda p, a, adv: truncated_ratio_loss(p - a, p, adv, ratio_min=0.0, ratio_max=5.0),
    "uncapped cispo": lambda p, a, adv: truncated_ratio_loss(p - a, p, adv, ratio_min=0.0, ratio_max=math.inf),
    "drpo": lambda p, a, adv: regularised_loss(p - a, a.clamp(max=0), adv, epsilon=12.5, is_weighted=True)[0],
    "spo": lambda p, a, adv: regularised_loss(p - a, a.clamp(max=0), adv, epsilon=12.5, is_weighted=False)[0],
    "gspo": lambda p, a, adv: clipped_surrogate(
        importance_log_ratio(p, a, torch.tensor([p.numel() - 1, 0, 1]), level="sequence"),
        torch.zeros_like(p),
        adv,
        clip_low=3e-4,
        clip_high=4e-4,
    )[0],
    "k1": lambda p, a, adv: sampled_kl(p, a, "k1"),
    "k2": lambda p, a, adv: sampled_kl(p, a, "k2"),
    "k3": lambda p, a, adv: sampled_kl(p, a, "k3"),
    "value": lambda p, a, adv: value_loss(p, a, adv, clip=0.2),
    "preference": lambda p, a, adv: preference_loss(p - a, beta=5000.0),
    "gmpo": lambda p, a, adv: geometric_mean_loss(
        p - a, adv, torch.tensor([p.numel() - 1, 0, 1]), clip_low=0.4, clip_high=0.4
    )[0],
    "vespo": lambda p, a, adv: gamma_weighted_loss(
        p - a, p, adv, torch.tensor([p.numel() - 1, 0, 1]), positive=(2.0, 3.0), negative=(3.0, 2.0)
    )[0],
    "dro": lambda p, a, adv: quadratic_penalty_loss(p - a, p, adv, beta=0.05)[0],
    "sapo": lambda p, a, adv: soft_gate_loss(p - a, adv, temperature_positive=1.0, temperature_negative=1.05)[0],
    "group preference": lambda p, a, adv: group_preference_loss((p - a)[:, None], adv[:, None], beta=5000.0),
    "centred reward": lambda p, a, adv: centred_reward_loss(
        torch.stack([p, a], 1), torch.stack([adv, a], 1), beta=1.0, advantage_max=5.0
    ),
}


def gradient_of(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), leaf, retain_graph=True)[0]


@pytest.mark.parametrize("name", LOSSES)
def test_no_combination_of_extreme_values_makes_a_loss_or_its_gradient_infinite(name: str):
    logp = LOGP.clone().requires_grad_()
    loss = LOSSES[name](logp, ANCHOR, ADVANTAGE)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient_of(loss, logp)).all()


def plain_clip(p: Tensor, a: Tensor, adv: Tensor, low: float, high: float, cap: float = math.inf) -> Tensor:
    ratio = (p - a).exp()
    return torch.maximum(-adv * ratio.clamp(max=cap), -adv * ratio.clamp(1.0 - low, 1.0 + high))


PLAIN: dict[str, Loss] = {
    "clip": lambda p, a, adv: plain_clip(p, a, adv, 0.2, 0.3),
    "narrow clip": lambda p, a, adv: plain_clip(p, a, adv, 1e-4, 1e-4),
    "cap": lambda p, a, adv: plain_clip(p, a, adv, 0.2, 0.3, 3.0),
    "mask": lambda p, a, adv: torch.where(
        IS_OUTSIDE[: p.numel()] & ((((p - a) > 0) & (adv > 0)) | (((p - a) < 0) & (adv < 0))), 0.0, -adv * (p - a).exp()
    ),
    "cispo": lambda p, a, adv: -(p - a).detach().exp().clamp(0.0, 5.0) * adv * p,
    "k3": lambda p, a, adv: (a - p).expm1() - (a - p),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("spread", [1e-5, 0.1, 4.0])
def test_ordinary_inputs_get_the_bits_of_the_plain_formula(name: str, spread: float):
    generator = torch.Generator().manual_seed(0)
    anchor, step, advantage = (torch.randn(2000, generator=generator) for _ in range(3))
    advantage[::7] = 0.0
    step[::5] = 0.0  # a ratio of exactly one
    logp = (anchor + (spread * step).clamp(-19, 19)).requires_grad_()
    mine, plain = LOSSES[name](logp, anchor, advantage), PLAIN[name](logp, anchor, advantage)
    assert torch.equal(mine, plain)
    assert torch.equal(gradient_of(mine, logp), gradient_of(plain, logp))


def test_a_clipped_row_has_no_gradient_however_far_out_it_is():
    logp = torch.tensor([89.0, 1e4, -89.0, -1e4]).requires_grad_()
    advantage = torch.tensor([1.0, 3.0, -1.0, -3.0])
    loss, _ = clipped_surrogate(logp, torch.zeros(4), advantage, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(loss.detach(), torch.tensor([-1.3, -3.9, 0.8, 2.4]))
    assert gradient_of(loss, logp).tolist() == [0.0] * 4


def test_a_masked_row_has_no_gradient_however_far_out_it_is():
    logp = torch.tensor([89.0, 1e4]).requires_grad_()
    loss, _ = masked_surrogate(logp, torch.zeros(2), torch.ones(2), torch.ones(2, dtype=torch.bool))
    assert loss.tolist() == [0.0, 0.0] and gradient_of(loss, logp).tolist() == [0.0, 0.0]


def test_a_ratio_without_clip_stands_still_beyond_the_bound_and_is_counted():
    logp = torch.tensor([19.0, 21.0, 1e4]).requires_grad_()
    advantage = torch.full((3,), -2.0)
    loss, _ = clipped_surrogate(logp, torch.zeros(3), advantage, clip_low=0.2, clip_high=0.3)
    assert loss.tolist() == pytest.approx([2 * math.exp(19), 2 * math.exp(20), 2 * math.exp(20)])
    assert gradient_of(loss, logp).tolist() == pytest.approx([2 * math.exp(19), 0, 0])
    metrics = RowMetrics()
    report_ratio(metrics, logp)
    total, count = metrics.sums["policy/ratio_bounded_fraction"]
    assert float(total) / count == pytest.approx(2 / 3)
    assert float(metrics.maxima["policy/ratio_max_abs_dev"]) == pytest.approx(math.exp(20))


def test_what_is_not_a_number_is_not_hidden():
    nan = torch.tensor([math.nan]).requires_grad_()
    one, outside = torch.ones(1), torch.ones(1, dtype=torch.bool)
    for loss in (
        clipped_surrogate(nan, one, one, clip_low=0.2, clip_high=0.3)[0],
        masked_surrogate(nan, one, one, outside)[0],
        sampled_kl(nan, one, "k3"),
    ):
        assert torch.isnan(loss).all()


def test_a_k3_beyond_the_bound_stands_still_and_is_counted():
    logp, metrics = torch.tensor([0.0, -19.0, -1e4]), RowMetrics()
    reference = ReferenceKL(cast(PolicyStore, None), coef=1.0, estimator="k3")
    kl = reference.of_actions(logp, torch.zeros(3), metrics)
    assert kl.tolist() == pytest.approx([0, math.exp(19) - 20, math.exp(MAX_LOG_RATIO) - 21])
    total, count = metrics.sums["policy/reference_kl_bounded_fraction"]
    assert float(total) / count == pytest.approx(1 / 3)


# Losses on velocities ------------------------------------------------------------------------------------------------

FIELDS = torch.tensor(list(itertools.product((0.0, 1e-4, 1e4, -1e4), repeat=6))).view(-1, 3, 2)
"""[R, 3, 2]: every combination of three velocities or latents of two elements."""


def test_losses_on_velocities_stay_finite_at_extreme_values():
    v, old, x0 = FIELDS.unbind(1)
    v = v.clone().requires_grad_()
    losses = [velocity_distance(v, old)]
    losses += [matching_logp(v, old, torch.ones(len(v)), weighting=weighting) for weighting in MATCHING_WEIGHTINGS]
    for sigma, advantage, is_adaptive in itertools.product((0.0, 1e-3, 1.0), (-1e4, 0.0, 1e4), (True, False)):
        losses.append(
            nft_loss(
                v,
                old,
                x0.flip(1),
                x0,
                torch.full((len(v),), sigma),
                optimality(torch.full((len(v),), advantage), advantage_max=5.0),
                beta=0.1,
                advantage_max=5.0,
                adaptive_weight=is_adaptive,
            ).loss_R
        )
    for loss in losses:
        assert torch.isfinite(loss).all() and torch.isfinite(gradient_of(loss, v)).all()


# Whole surrogates ----------------------------------------------------------------------------------------------------

NOTHING = cast(PolicyStore, None)
TRANSITION_ALGORITHMS: dict[str, Callable[[], TransitionAlgorithm]] = {
    "Flow-GRPO": lambda: DiffusionGRPO(cast(DiffusionPipeline, None), NOTHING),
    "GRPO-Guard": lambda: GRPOGuard(cast(DiffusionPipeline, None), NOTHING),
    "Flow-DPPO": lambda: FlowDPPO(cast(DiffusionPipeline, None), NOTHING),
    "CPPO": lambda: CPPO(cast(DiffusionPipeline, None), NOTHING, prefix_threshold=1e-6),
    "DDPO": lambda: DDPO(cast(DiffusionPipeline, None), NOTHING),
    "REINFORCE": lambda: DDPO(cast(DiffusionPipeline, None), NOTHING, estimator="score_function"),
    "DPOK": lambda: DPOK(cast(DiffusionPipeline, None), NOTHING, kl_coef=0.1),
}
TOKEN_ALGORITHMS: dict[str, Callable[[], TokenAlgorithm]] = {
    "GRPO": lambda: ARGRPO(cast(AutoregressivePipeline, None), NOTHING),
    "CISPO": lambda: ARCISPO(cast(AutoregressivePipeline, None), NOTHING),
    "DPPO by tv": lambda: ARDPPO(cast(AutoregressivePipeline, None), NOTHING),
    "DPPO by kl": lambda: ARDPPO(cast(AutoregressivePipeline, None), NOTHING, divergence="kl"),
    "DRPO": lambda: ARDRPO(cast(AutoregressivePipeline, None), NOTHING),
    "GMPO": lambda: ARGMPO(cast(AutoregressivePipeline, None), NOTHING),
    "VESPO": lambda: ARVESPO(cast(AutoregressivePipeline, None), NOTHING),
    "DRO": lambda: ARDRO(cast(AutoregressivePipeline, None), NOTHING),
    "SAPO": lambda: ARSAPO(cast(AutoregressivePipeline, None), NOTHING),
    "REINFORCE": lambda: ARReinforce(cast(AutoregressivePipeline, None), NOTHING),
}


def assert_finite(loss: Tensor, leaves: list[Tensor], metrics: RowMetrics) -> None:
    assert torch.isfinite(loss).all()
    for gradient in torch.autograd.grad(loss.sum(), leaves, allow_unused=True):
        assert gradient is None or torch.isfinite(gradient).all()
    assert all(math.isfinite(total) for total, _ in metrics.sums.values())
    assert all(math.isfinite(value) for value in metrics.maxima.values())


@pytest.mark.parametrize("name", TRANSITION_ALGORITHMS)
@pytest.mark.parametrize("std", [1e-3, 1.0])
def test_surrogates_of_transitions_and_their_metrics_stay_finite(name: str, std: float):
    num_rows = LOGP.numel()
    logp, mean = LOGP.clone().requires_grad_(), ANCHOR[:, None].repeat(1, 2).requires_grad_()
    rows = TransitionRows(
        policy=Stats(logp, mean, torch.full((num_rows,), std), torch.ones(num_rows), -torch.ones(num_rows)),
        anchor_logp_R=ANCHOR,
        anchor_mean=torch.zeros(num_rows, 2),
        advantage_R=ADVANTAGE,
        delta_sigma_R=torch.full((num_rows,), 0.1),
        sample_R=torch.arange(num_rows),
        step_R=torch.zeros(num_rows, dtype=torch.long),
        progress=0.5,
    )
    loss, metrics = TRANSITION_ALGORITHMS[name]().surrogate(rows)
    assert_finite(loss, [logp, mean], metrics)


@pytest.mark.parametrize("name", TOKEN_ALGORITHMS)
def test_surrogates_of_tokens_and_their_metrics_stay_finite(name: str):
    logp, anchor = (-LOGP.abs()).requires_grad_(), -ANCHOR.abs()
    lengths = torch.tensor([logp.numel()])
    rows = TokenRows(
        logp_M=logp,
        anchor_logp_M=anchor,
        log_ratio_M=importance_log_ratio(logp, anchor, lengths, level="token"),
        advantage_M=ADVANTAGE,
        lengths_B=lengths,
        progress=0.5,
    )
    loss, metrics = TOKEN_ALGORITHMS[name]().surrogate(rows)
    report_ratio(metrics, rows.log_ratio_M)
    assert_finite(loss, [logp], metrics)


# The engine's gap, and advantages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask", "reject"])
def test_weights_without_an_upper_bound_stay_finite(level, mode):
    gap, lengths = torch.tensor([1e4, 0.0, -1e4, 90.0, 0.1]), torch.tensor([1, 2, 2])
    weights = RolloutCorrection(level=level, mode=mode, lower=0.5, upper=None).weights(gap, lengths, None)
    assert torch.isfinite(weights).all() and float(weights.max()) <= MAX_WEIGHT
    assert (weights == MAX_WEIGHT).any() == (mode != "reject")


def test_weights_within_the_bound_are_the_plain_exponential():
    gap = torch.linspace(-20, 20, 501)
    weights = correction_weights(gap, torch.tensor([501]), level="token", mode="truncate", lower=0.0, upper=None)
    assert torch.equal(weights, gap.exp())


@pytest.mark.parametrize(
    ("center", "scale"),
    [("group", "group"), ("group", "batch"), ("group", "residual"), ("batch", "batch"), ("batch", "residual")],
)
@pytest.mark.parametrize("ddof", [0, 1])
def test_equal_rewards_and_no_eps_give_exactly_zero(center, scale, ddof):
    # In float64 the mean of three times 0.1 is not 0.1.
    rewards = torch.full((6,), 0.1, dtype=torch.float64)
    advantages = normalized_advantages(rewards, list("aaabbb"), center=center, scale=scale, ddof=ddof, eps=0.0)
    assert torch.equal(advantages, torch.zeros(6))


@pytest.mark.parametrize(("center", "scale"), [("none", "group"), ("none", "batch"), ("batch", "group")])
def test_no_eps_is_refused_where_equal_rewards_would_be_divided_by_zero(center, scale):
    with pytest.raises(ConfigError, match=rf"eps = 0 with center = {center} and scale = {scale} .* Set advantages.eps"):
        AdvantageConfig(center=center, scale=scale, eps=0.0)


@pytest.mark.parametrize("eps", [-1e-8, math.nan, math.inf])
def test_an_eps_that_is_no_size_is_refused(eps: float):
    with pytest.raises(ConfigError, match="eps"):
        AdvantageConfig(eps=eps)
