"""The optimal token baseline: a hand-worked case, what it minimises, what its weights are, and the algorithm around it.

Legend: B sequences, M trained tokens, G samples of a prompt, V words.
"""

import pytest
import torch
from token_fakes import response, setup
from torch import Tensor

from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.ar_otb import AROTB
from unirl.algorithms.base import MicroBatch
from unirl.algorithms.token_losses import optimal_token_advantages
from unirl.algorithms.tokens import text_segment
from unirl.types.errors import ContractError

LENGTHS = torch.tensor([2, 1, 3, 3, 2, 1])


def energies(seed: int = 0) -> Tensor:
    return torch.rand(int(LENGTHS.sum()), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def rewards() -> Tensor:
    return torch.tensor([1.0, 0.0, 0.5, -1.0, 2.0, 0.25], dtype=torch.float64)


def test_two_answers_worked_by_hand():
    """Energies 1 3 | 2: at the first token weights 1 and 2, of rewards 6 and 0 the baseline 2; the second is alone."""
    found = optimal_token_advantages(
        torch.tensor([6.0, 0.0]), torch.tensor([1.0, 3.0, 2.0]), torch.tensor([2, 1]), samples_per_group=2
    )
    assert found.tolist() == [4.0, 0.0, -2.0]


def test_later_tokens_weigh_by_what_has_gathered_so_far():
    """Weights 1, 1 + 2 = 3 against 4, 4 + 1 = 5: baselines of rewards 5 and 0 are 1 and 15 / 8."""
    found = optimal_token_advantages(
        torch.tensor([5.0, 0.0]), torch.tensor([1.0, 2.0, 4.0, 1.0]), torch.tensor([2, 2]), samples_per_group=2
    )
    assert found.tolist() == [4.0, 5 - 15 / 8, -1.0, -15 / 8]


def test_the_baseline_of_a_position_has_the_least_weighted_square():
    """What the estimator's variance is up to a constant, sum_i W_it (G_i - b)^2, over a grid of other baselines."""
    energy = energies()
    found = optimal_token_advantages(rewards(), energy, LENGTHS, samples_per_group=3)
    starts = (LENGTHS.cumsum(0) - LENGTHS).tolist()
    for group in (0, 3):
        for position in range(3):
            rows = [i for i in range(group, group + 3) if LENGTHS[i] > position]
            weight = torch.stack([energy[starts[i] : starts[i] + position + 1].sum() for i in rows])
            own = torch.stack([found[starts[i] + position] for i in rows])
            least = float((weight * own.square()).sum())
            assert float((weight * own).sum()) == pytest.approx(0, abs=1e-12)
            for shift in (-0.3, -0.01, 0.01, 0.3):
                assert float((weight * (own + shift).square()).sum()) > least


def test_a_constant_of_the_group_changes_nothing():
    shift = torch.tensor([3.0] * 3 + [-5.0] * 3, dtype=torch.float64)
    first, second = (
        optimal_token_advantages(v, energies(), LENGTHS, samples_per_group=3) for v in (rewards(), rewards() + shift)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def test_equal_energies_give_the_mean_of_those_still_going_on():
    found = optimal_token_advantages(rewards(), torch.ones(12).double(), LENGTHS, samples_per_group=3)
    assert found.tolist()[:3] == [0.5, 0.25, -0.5] and found.tolist()[3:6] == [0.0, -0.25, 0.0]


def test_answers_of_a_torn_group_are_refused():
    with pytest.raises(ContractError, match="6 sequences with 6 values are not groups of 4"):
        optimal_token_advantages(rewards(), energies(), LENGTHS, samples_per_group=4)


def test_the_energy_of_a_token_is_the_squared_length_of_its_score():
    """By autograd: d log p(word) / d logits."""
    logits = torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    probabilities = logits.softmax(0).detach()
    for word in range(7):
        (score,) = torch.autograd.grad(logits.log_softmax(0)[word], logits)
        energy = 1 - 2 * probabilities[word] + probabilities.square().sum()
        assert float(score.square().sum()) == pytest.approx(float(energy), rel=1e-12)


# The algorithm ------------------------------------------------------------------------------------------------------


def micro() -> MicroBatch:
    track = response().tracks["text"]
    advantages = torch.randn(track.batch_size, generator=torch.Generator().manual_seed(3))
    return MicroBatch(track=track.replace(advantages=advantages), anchor={}, update=0, progress=0.0)


def test_the_gradient_is_that_of_the_score_function_on_these_advantages():
    made = setup(AROTB, samples_per_group=3)
    given = micro()
    (part,) = made.algorithm.losses(given)
    (part.loss / part.num_terms).backward()
    found = {name: p.grad.clone() for name, p in made.backend.parameters.items() if p.grad is not None}
    made.backend.zero_grad()
    segment = text_segment(given.track)
    assert segment.params is not None
    stats = made.pipeline.replay(given.track.conditions, segment, segment.params)
    trained = made.algorithm._trained(given.track)
    energy = (1 - 2 * stats.logp_N.exp() + stats.collision_N).detach()[trained.chosen_N]
    advantage = optimal_token_advantages(given.advantages, energy, trained.lengths_B, samples_per_group=3)
    (-(advantage * stats.logp_N[trained.chosen_N]).sum() / part.num_terms).backward()
    for name, p in made.backend.parameters.items():
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-6)


def test_the_baseline_of_later_updates_is_that_before_the_first():
    made = setup(AROTB, samples_per_group=3)
    given = micro()
    anchor = made.algorithm.anchor(given)
    other = setup(AROTB, samples_per_group=3, displaced=0.3)
    later = MicroBatch(track=given.track, anchor=anchor, update=1, progress=0.0)
    (part,) = other.algorithm.losses(later)
    plain = setup(ARGRPO, displaced=0.3)
    (grpo,) = plain.algorithm.losses(later)
    assert made.algorithm.uses_anchor and torch.isfinite(part.loss)
    assert float(part.loss.detach()) != float(grpo.loss.detach())
    energy = part.metrics.sums["otb/score_energy"]
    assert float(energy[0]) == pytest.approx(float(anchor["energy"].sum()), rel=1e-6)
