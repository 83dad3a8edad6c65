"""Losses on tokens: equal to TRL's on the same tensors, to hand-worked cases and to float64 finite differences.

Legend: B sequences, T columns of the padded layout that TRL uses, N packed tokens.
"""

import math

import pytest
import torch
from torch import Tensor
from trl_reference import grpo_trainer_loss

from unirl.algorithms.losses import clipped_surrogate, masked_surrogate
from unirl.algorithms.reference import sampled_kl
from unirl.algorithms.rollout_correction import (
    CorrectionLevel,
    CorrectionMode,
    RolloutCorrection,
    correction_weights,
)
from unirl.algorithms.token_losses import (
    ImportanceLevel,
    LossAggregation,
    aggregation_weights,
    binary_divergence,
    gamma_weighted_loss,
    geometric_mean_loss,
    importance_log_ratio,
    quadratic_penalty_loss,
    regularised_loss,
    sequence_index,
    sequence_mean,
    sequence_sum,
    soft_gate_loss,
    truncated_ratio_loss,
)
from unirl.types.errors import ConfigError, ContractError

LENGTHS = torch.tensor([3, 1, 5])
MASK = torch.arange(5) < LENGTHS[:, None]
ADVANTAGES = torch.tensor([1.5, -0.7, -1.1], dtype=torch.float64)


def case(seed: int = 0, gap: float = 0.4) -> tuple[Tensor, Tensor]:
    """Padded log-probs [B, T] and older ones, so far apart that every clip binds somewhere."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(3, 5, generator=generator, dtype=torch.float64) * 3 - 0.05
    new = (old + gap * torch.randn(3, 5, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    return new, old


def gradient_of(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf)[0]


def reduced(loss_M: Tensor, mode: LossAggregation, horizon: int = 7) -> Tensor:
    weight_M, num_terms = aggregation_weights(LENGTHS, mode=mode, horizon=horizon)
    return (weight_M * loss_M).sum() / num_terms


def packed_loss(
    new: Tensor,
    old: Tensor,
    *,
    kind: str,
    level: ImportanceLevel,
    mode: LossAggregation,
    cap: float | None = None,
    horizon: int = 7,
) -> Tensor:
    logp_M, anchor_M = new[MASK], old[MASK]
    advantage_M = ADVANTAGES[sequence_index(LENGTHS)]
    log_ratio_M = importance_log_ratio(logp_M, anchor_M, LENGTHS, level=level)
    if kind == "cispo":
        loss_M = truncated_ratio_loss(log_ratio_M, logp_M, advantage_M, ratio_min=0.0, ratio_max=cap or 1.2)
    elif kind == "vespo":
        loss_M, _ = gamma_weighted_loss(log_ratio_M, logp_M, advantage_M, LENGTHS, positive=(2, 3), negative=(3, 2))
    elif kind == "gmpo":
        loss_M, _ = geometric_mean_loss(log_ratio_M, advantage_M, LENGTHS, clip_low=0.2, clip_high=0.28)
    elif kind == "sapo":
        loss_M, _ = soft_gate_loss(log_ratio_M, advantage_M, temperature_positive=1.0, temperature_negative=1.25)
    else:
        loss_M, _ = clipped_surrogate(
            log_ratio_M,
            torch.zeros_like(log_ratio_M),
            advantage_M,
            clip_low=0.2,
            clip_high=0.28,
            ratio_cap=math.inf if cap is None else cap,
        )
    return reduced(loss_M, mode, horizon)


TRL_CASES = [
    ("grpo", "ppo", "token", "seq-mean-token-mean", None),
    ("dapo", "ppo", "token", "token-mean", None),
    ("dapo", "ppo", "token", "token-mean", 1.4),
    ("dr_grpo", "ppo", "token", "seq-mean-token-sum-norm", None),
    ("grpo", "ppo", "sequence", "seq-mean-token-mean", None),
    ("grpo", "ppo", "sequence", "seq-mean-token-mean", 1.3),
    ("cispo", "cispo", "token", "token-mean", 1.2),
    ("sapo", "sapo", "token", "seq-mean-token-mean", None),
    ("vespo", "vespo", "token", "token-mean", None),
    ("gmpo", "gmpo", "token", "seq-mean-token-mean", None),
    ("luspo", "ppo", "sequence", "seq-mean-token-sum-norm", None),
]


@pytest.mark.parametrize(("loss_type", "kind", "level", "mode", "cap"), TRL_CASES)
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_equal_trl(
    loss_type: str, kind: str, level: ImportanceLevel, mode: LossAggregation, cap: float | None, seed: int
):
    new, old = case(seed)
    mine, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    loss = packed_loss(mine, old, kind=kind, level=level, mode=mode, cap=cap, horizon=1 if loss_type == "luspo" else 7)
    options = {"epsilon_high": cap} if kind == "cispo" else {"epsilon_high": 0.28, "delta": cap}
    expected = grpo_trainer_loss(
        theirs,
        old,
        ADVANTAGES,
        MASK.long(),
        loss_type=loss_type,
        importance_sampling_level=level,
        max_completion_length=7,
        **options,
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    gradient = gradient_of(loss, mine)
    # Sums run in another order.
    torch.testing.assert_close(gradient, gradient_of(expected, theirs), rtol=1e-12, atol=1e-14)
    assert float(gradient.abs().max()) > 0


def test_the_penalty_towards_the_reference_and_the_engine_correction_equal_trl():
    new, old = case()
    reference = case(5)[0]
    gap = (old - old * 0.9).where(MASK, 0.0)
    for level, mode, ratio in (
        ("token", "truncate", gap.exp().clamp(max=1.05)),
        ("sequence", "truncate", gap.sum(dim=1, keepdim=True).exp().clamp(max=1.05)),
    ):
        weight_M = correction_weights(gap[MASK], LENGTHS, level=level, mode=mode, lower=None, upper=1.05)
        loss_M, _ = clipped_surrogate(
            new[MASK], old[MASK], ADVANTAGES[sequence_index(LENGTHS)], clip_low=0.2, clip_high=0.2
        )
        mine = reduced(loss_M * weight_M + 0.3 * sampled_kl(new[MASK], reference[MASK], "k3"), "token-mean")
        theirs = grpo_trainer_loss(
            new, old, ADVANTAGES, MASK.long(), loss_type="dapo", beta=0.3, reference=reference, ratio=ratio
        )
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


# Limits and identities ----------------------------------------------------------------------------------------------


def test_a_sequence_of_one_token_has_the_same_ratio_at_every_level():
    logp, anchor = torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.2, -1.5]).double()
    lengths = torch.tensor([1, 1])
    for level in ("token", "sequence", "sequence-token"):
        assert torch.equal(importance_log_ratio(logp, anchor, lengths, level=level), logp - anchor)


def test_the_sequence_ratio_is_the_geometric_mean_and_spreads_its_gradient():
    logp = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    anchor = torch.tensor([-1.5, -2.5, -2.0], dtype=torch.float64)
    lengths = torch.tensor([2, 1])
    ratio = importance_log_ratio(logp, anchor, lengths, level="sequence")
    torch.testing.assert_close(ratio.detach(), torch.tensor([0.5, 0.5, -1.0], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(ratio[0], logp)
    assert gradient.tolist() == [0.5, 0.5, 0.0]
    token = importance_log_ratio(logp, anchor, lengths, level="sequence-token")
    assert torch.equal(token.detach(), ratio.detach())
    (gradient,) = torch.autograd.grad(token[0], logp)
    assert gradient.tolist() == [1.0, 0.0, 0.0]


def test_gspo_and_gspo_token_have_one_gradient_where_all_tokens_share_the_advantage():
    new, old = case()
    gradients = []
    for level in ("sequence", "sequence-token"):
        logp = new.clone().requires_grad_()
        loss = packed_loss(logp, old, kind="ppo", level=level, mode="seq-mean-token-mean")
        gradients.append(gradient_of(loss, logp))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-7, atol=1e-9)


def test_the_three_aggregations_agree_where_all_sequences_are_as_long_as_the_horizon():
    values, lengths = torch.arange(12.0, dtype=torch.float64), torch.tensor([4, 4, 4])
    means = []
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        weight_M, num_terms = aggregation_weights(lengths, mode=mode, horizon=4)
        means.append(float((weight_M * values).sum() / num_terms))
    assert means == [5.5, 5.5, 5.5]


def test_a_sequence_without_tokens_counts_as_a_sequence_and_adds_nothing():
    lengths = torch.tensor([2, 0, 1])
    weight_M, num_terms = aggregation_weights(lengths, mode="seq-mean-token-mean", horizon=1)
    assert weight_M.tolist() == [0.5, 0.5, 1.0]
    assert num_terms == 3
    assert sequence_sum(torch.tensor([1.0, 2.0, 4.0]), lengths).tolist() == [3.0, 0.0, 4.0]
    assert sequence_mean(torch.tensor([1.0, 2.0, 4.0]), lengths).tolist() == [1.5, 0.0, 4.0]


def test_cispo_keeps_the_gradient_of_every_token_where_ppo_cuts_it():
    logp = torch.tensor([math.log(0.9)], dtype=torch.float64, requires_grad=True)
    anchor = torch.tensor([math.log(0.3)], dtype=torch.float64)
    advantage = torch.ones(1, dtype=torch.float64)
    kept = truncated_ratio_loss(logp - anchor, logp, advantage, ratio_min=0.0, ratio_max=1.2)
    assert gradient_of(kept.sum(), logp).tolist() == pytest.approx([-1.2])
    cut, _ = clipped_surrogate(logp, anchor, advantage, clip_low=0.2, clip_high=0.2)
    assert gradient_of(cut.sum(), logp).tolist() == [0.0]


def test_a_weight_of_sequences_is_one_at_one_and_highest_where_power_meets_decay():
    ratio = torch.tensor([1.0, 1.5, 0.2, 4.0], dtype=torch.float64)
    lengths, logp = torch.ones(4, dtype=torch.long), torch.full((4,), -1.0, dtype=torch.float64)
    for sign, (power, decay) in ((1.0, (2.0, 3.0)), (-1.0, (3.0, 2.0))):
        loss, weight = gamma_weighted_loss(
            ratio.log(), logp, sign * torch.ones(4).double(), lengths, positive=(2.0, 3.0), negative=(3.0, 2.0)
        )
        torch.testing.assert_close(weight, ratio**power * (decay * (1 - ratio)).exp())
        torch.testing.assert_close(loss, sign * weight)
        best = torch.tensor([power / decay * factor for factor in (0.99, 1.0, 1.01)], dtype=torch.float64)
        _, around = gamma_weighted_loss(
            best.log(), logp[:3], sign * torch.ones(3).double(), lengths[:3], positive=(2.0, 3.0), negative=(3.0, 2.0)
        )
        assert float(around[1]) > float(around[0]) and float(around[1]) > float(around[2])


def test_a_quadratic_penalty_pulls_as_much_as_the_advantage_at_their_quotient():
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    advantage, beta = torch.tensor([0.5, -0.25], dtype=torch.float64), 0.5
    anchor = logp.detach() - advantage / beta
    loss, penalty = quadratic_penalty_loss(logp - anchor, logp, advantage, beta=beta)
    torch.testing.assert_close(loss, -advantage * logp + beta / 2 * (advantage / beta).square())
    torch.testing.assert_close(penalty, beta / 2 * (advantage / beta).square())
    torch.testing.assert_close(gradient_of(loss.sum(), logp), torch.zeros(2, dtype=torch.float64))


def test_a_token_that_is_clipped_leaves_the_mean_of_its_sequence_to_the_others():
    log_ratio = torch.tensor([0.9, 0.1, -0.9, -0.1], dtype=torch.float64, requires_grad=True)
    lengths, advantage = torch.tensor([2, 2]), torch.tensor([2.0, 2.0, -1.0, -1.0], dtype=torch.float64)
    loss, measured = geometric_mean_loss(log_ratio, advantage, lengths, clip_low=0.4, clip_high=0.4)
    good, bad = math.exp((0.4 + 0.1) / 2), math.exp((-0.4 - 0.1) / 2)
    torch.testing.assert_close(loss.detach(), torch.tensor([-2 * good, -2 * good, bad, bad], dtype=torch.float64))
    assert measured["clipped_high"].tolist() == [1, 0, 0, 0] and measured["clipped_low"].tolist() == [0, 0, 1, 0]
    gradient = gradient_of(reduced_pairs(loss), log_ratio)
    torch.testing.assert_close(gradient, torch.tensor([0.0, -good, 0.0, bad / 2], dtype=torch.float64) / 2)


def reduced_pairs(loss_M: Tensor) -> Tensor:
    """Mean over two sequences of two tokens."""
    return loss_M.view(2, 2).mean(1).mean()


def test_the_gate_of_sapo_is_open_at_one_and_closes_on_both_sides():
    log_ratio = torch.tensor([0.0, 0.7, -0.7, 30.0], dtype=torch.float64, requires_grad=True)
    for advantage, tau in ((1.0, 2.0), (-1.0, 3.0)):
        loss, gate = soft_gate_loss(
            log_ratio,
            torch.full((4,), advantage, dtype=torch.float64),
            temperature_positive=2.0,
            temperature_negative=3.0,
        )
        ratio = log_ratio.detach().exp()
        p = 1 / (1 + torch.exp(-tau * (ratio - 1)))
        expected = -advantage * 4 * p * (1 - p) * ratio
        expected[3] = 0.0  # the gate is shut, and the ratio beyond its bound
        torch.testing.assert_close(gradient_of(loss.sum(), log_ratio), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gate, 4 * p * (1 - p), rtol=1e-12, atol=1e-12)
        assert float(gate[0]) == 1.0


def test_the_cap_bounds_the_loss_of_a_bad_token_that_became_likely_and_stops_its_gradient():
    logp = torch.tensor([0.0, 0.0], dtype=torch.float64, requires_grad=True)
    anchor = torch.tensor([-2.0, -2.0], dtype=torch.float64)
    advantage = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    loss, _ = clipped_surrogate(logp, anchor, advantage, clip_low=0.2, clip_high=0.2, ratio_cap=3.0)
    assert loss.tolist() == pytest.approx([3.0, -1.2])
    assert gradient_of(loss.sum(), logp).tolist() == [0.0, 0.0]


# DPPO and DRPO ------------------------------------------------------------------------------------------------------


def test_binary_divergences_against_distributions_of_two_outcomes():
    p, old = torch.tensor([0.3, 0.999, 1e-6]).double(), torch.tensor([0.5, 0.9, 0.2]).double()
    tv = binary_divergence(p.log(), old.log(), kind="tv")
    torch.testing.assert_close(tv, (p - old).abs(), rtol=1e-9, atol=1e-12)
    both, both_old = torch.stack([p, 1 - p]), torch.stack([old, 1 - old])
    kl = binary_divergence(p.log(), old.log(), kind="kl")
    torch.testing.assert_close(kl, (both_old * (both_old / both).log()).sum(0), rtol=1e-6, atol=1e-12)
    assert torch.isfinite(binary_divergence(torch.zeros(1), torch.zeros(1), kind="kl")).all()
    assert float(binary_divergence(torch.zeros(1), torch.zeros(1), kind="kl")) == 0.0


def test_the_binary_mask_lets_rare_tokens_move_far_in_ratio_and_holds_common_ones():
    old = torch.tensor([0.001, 0.5], dtype=torch.float64).log()
    logp = torch.tensor([0.003, 0.8], dtype=torch.float64).log().requires_grad_()
    is_outside = binary_divergence(logp, old, kind="tv") > 0.2
    assert is_outside.tolist() == [False, True]  # ratios 3 and 1.6: a clip at 1.2 would stop both
    loss, _ = masked_surrogate(logp, old, torch.ones(2, dtype=torch.float64), is_outside)
    assert gradient_of(loss.sum(), logp).tolist() == pytest.approx([-3.0, 0.0])


def test_drpo_weighs_the_gradient_by_how_far_the_probability_moved():
    probability, old = torch.tensor([0.6, 0.1, 0.5]).double(), torch.tensor([0.4, 0.3, 0.5]).double()
    advantage, epsilon = torch.tensor([2.0, 2.0, -1.0]).double(), 0.5
    logp = probability.log().requires_grad_()
    loss, measured = regularised_loss(logp - old.log(), old.log(), advantage, epsilon=epsilon, is_weighted=True)
    gradient = gradient_of(loss.sum(), logp)
    ratio = probability / old
    weight = 1 - (advantage * (ratio - 1)).sign() * (probability - old).abs() / epsilon
    torch.testing.assert_close(gradient, -advantage * ratio * weight)
    torch.testing.assert_close(loss.detach(), -advantage * ratio + measured["penalty"])
    assert float(gradient[2]) == 1.0  # at ratio one the gradient is -A


def test_drpo_without_penalty_is_importance_sampling():
    new, old = case()
    logp, anchor, advantage = new[MASK], old[MASK], ADVANTAGES[sequence_index(LENGTHS)]
    for is_weighted in (True, False):
        loss, _ = regularised_loss(logp - anchor, anchor, advantage, epsilon=1e12, is_weighted=is_weighted)
        torch.testing.assert_close(loss, -advantage * (logp - anchor).exp(), rtol=1e-9, atol=1e-9)


def test_drpo_survives_a_ratio_that_leaves_float32():
    loss, _ = regularised_loss(
        torch.tensor([90.0]), torch.tensor([-90.0]), torch.ones(1), epsilon=12.5, is_weighted=True
    )
    assert torch.isfinite(loss).all()


LOSSES = {
    "ppo": lambda logp, anchor, adv: clipped_surrogate(logp, anchor, adv, clip_low=0.2, clip_high=0.28, ratio_cap=3.0)[
        0
    ],
    "drpo": lambda logp, anchor, adv: regularised_loss(logp - anchor, anchor, adv, epsilon=2.0, is_weighted=True)[0],
    "spo": lambda logp, anchor, adv: regularised_loss(logp - anchor, anchor, adv, epsilon=2.0, is_weighted=False)[0],
    "gspo": lambda logp, anchor, adv: clipped_surrogate(
        importance_log_ratio(logp, anchor, LENGTHS, level="sequence"),
        torch.zeros_like(anchor),
        adv,
        clip_low=0.2,
        clip_high=0.28,
    )[0],
    "k3": lambda logp, anchor, adv: sampled_kl(logp, anchor, "k3"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_finite_differences(name: str):
    new, old = case(3)
    logp, anchor, advantage = new[MASK].clone().requires_grad_(), old[MASK], ADVANTAGES[sequence_index(LENGTHS)]
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, anchor, advantage), (logp,), eps=1e-7, atol=1e-5)


# Correction of the engine's gap -------------------------------------------------------------------------------------

GAP = torch.tensor([0.1, -0.3, 0.9, 2.0, -0.2], dtype=torch.float64)
TWO = torch.tensor([3, 2])


@pytest.mark.parametrize(
    ("level", "mode", "expected"),
    [
        ("token", "truncate", [math.exp(0.1), math.exp(-0.3), 2.0, 2.0, math.exp(-0.2)]),
        ("token", "mask", [math.exp(0.1), math.exp(-0.3), 0.0, 0.0, math.exp(-0.2)]),
        ("token", "reject", [1.0, 1.0, 0.0, 0.0, 1.0]),
        ("sequence", "truncate", [2.0] * 3 + [2.0] * 2),
        ("geometric", "truncate", [math.exp(0.7 / 3)] * 3 + [2.0] * 2),
        ("geometric", "reject", [1.0] * 3 + [0.0] * 2),
    ],
)
def test_correction_weights_by_hand(level: CorrectionLevel, mode: CorrectionMode, expected: list[float]):
    got = correction_weights(GAP, TWO, level=level, mode=mode, lower=0.5, upper=2.0)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_the_expectation_under_the_engine_becomes_that_under_the_trainer():
    engine = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    trainer = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    value = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)
    gap = (trainer / engine).log()
    weight = correction_weights(
        gap, torch.ones(3, dtype=torch.long), level="token", mode="truncate", lower=None, upper=9.0
    )
    torch.testing.assert_close((engine * weight * value).sum(), (trainer * value).sum())


def test_samples_of_a_policy_too_far_behind_get_no_weight():
    correction = RolloutCorrection(max_staleness=1)
    got = correction.weights(torch.zeros(5), TWO, torch.tensor([1, 2])[sequence_index(TWO)])
    assert got.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="max_staleness"):
        correction.weights(torch.zeros(5), TWO, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "word"}, "level = 'word'"),
        ({"mode": "drop"}, "mode = 'drop'"),
        ({"upper": 0.5}, "upper = 0.5"),
        ({"lower": None, "upper": None}, "at least one"),
        ({"max_staleness": -1}, "max_staleness = -1"),
    ],
)
def test_impossible_corrections_are_refused(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        RolloutCorrection(**options)


def test_lengths_that_do_not_sum_to_the_tokens_are_named():
    with pytest.raises(ContractError, match="lengths sum to 3, there are 4 tokens"):
        sequence_sum(torch.zeros(4), torch.tensor([1, 2]))
