"""Weights of samples by hand, and fine-tuning on them: likelihood of tokens, matching error of latents."""

from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import AffineField, displace, rollout, setup
from diffusion_fakes import sampling as image_sampling
from token_fakes import LMBundle, LMPipeline, response, sampling
from token_fakes import setup as token_setup
from torch import Tensor

from unirl.algorithms.ar_fine_tuning import ARFineTuning
from unirl.algorithms.base import MicroBatch
from unirl.algorithms.sample_weights import SampleWeights, accepted_weights, best_of_n_weights, reward_weights
from unirl.algorithms.selection import SampleSelection
from unirl.algorithms.tokens import text_segment
from unirl.algorithms.weighted_matching import WeightedMatching
from unirl.types.errors import ConfigError, ContractError

REWARDS = torch.tensor([1.0, 0.0, 3.0, 3.0, 2.0, 0.0])
GROUPS = ["a", "b", "a", "b", "a", "b"]
NUM_SAMPLES = 12


def weights_of(count: int) -> Tensor:
    """[count], some of them 0."""
    return torch.rand(count, generator=torch.Generator().manual_seed(5)) * (torch.arange(count) % 3 > 0)


def test_reward_weights_are_the_groups_softmax_with_mean_one():
    e, t = torch.e, 2.0
    total = e ** (1 / t) + e ** (3 / t) + e ** (2 / t)
    found = reward_weights(REWARDS, GROUPS, temperature=t)
    expected = torch.tensor([e ** (1 / t), e ** (3 / t), e ** (2 / t)]) * 3 / total
    torch.testing.assert_close(found[[0, 2, 4]], expected)
    torch.testing.assert_close(found[[1, 3, 5]].sum(), torch.tensor(3.0))
    shifted = reward_weights(REWARDS + 1000.0, GROUPS, temperature=t)  # a constant of the prompt changes nothing
    torch.testing.assert_close(shifted, found)
    torch.testing.assert_close(reward_weights(REWARDS, GROUPS, temperature=1e9), torch.ones(6))


def test_a_low_temperature_is_the_best_of_n():
    cold = reward_weights(REWARDS, GROUPS, temperature=1e-3) / 3
    torch.testing.assert_close(cold, best_of_n_weights(REWARDS, GROUPS, num_best=1))


def test_the_best_of_each_group_count_and_ties_go_to_the_earlier():
    assert best_of_n_weights(REWARDS, GROUPS, num_best=1).tolist() == [0, 0, 1, 1, 0, 0]
    assert best_of_n_weights(REWARDS, GROUPS, num_best=2).tolist() == [0, 1, 1, 1, 1, 0]
    assert best_of_n_weights(REWARDS, GROUPS, num_best=9).tolist() == [1] * 6


def test_what_lies_above_the_threshold_is_accepted():
    assert accepted_weights(REWARDS, GROUPS, threshold=2.0).tolist() == [0, 0, 1, 1, 0, 0]
    assert accepted_weights(REWARDS, GROUPS, threshold=-1.0).tolist() == [1] * 6


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "reward_weighted", "temperature": 0.5},
        {"kind": "best_of_n", "num_best": 2},
        {"kind": "accepted", "threshold": 0.0},
    ],
)
def test_weights_move_with_their_samples(options: dict[str, Any]):
    rewards = torch.tensor([0.3, 0.1, 0.9, 0.4, 0.2, -0.7])  # no ties, which go by place
    order = [3, 0, 5, 1, 4, 2]
    make = SampleWeights(**options)
    moved = make(rewards[order], [GROUPS[row] for row in order])
    torch.testing.assert_close(moved, make(rewards, GROUPS)[order])


def test_the_share_of_samples_that_count_is_reported():
    make = SampleWeights(kind="best_of_n", num_best=1)
    make(REWARDS, GROUPS)
    assert make.metrics(0.0) == {"advantage/effective_fraction": pytest.approx(2 / 6)}
    make = SampleWeights(kind="accepted", threshold=9.0)
    make(REWARDS, GROUPS)
    assert make.metrics(0.0) == {"advantage/effective_fraction": 0.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "best"}, "advantages.kind = 'best' must be one of reward_weighted, best_of_n, accepted"),
        ({"kind": "accepted"}, "advantages.kind = accepted takes advantages.threshold and no other number"),
        ({"kind": "best_of_n", "num_best": 1, "threshold": 0.5}, "takes advantages.num_best and no other number"),
        ({"kind": "reward_weighted", "temperature": 0.0}, "temperature"),
    ],
)
def test_wrong_numbers_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        SampleWeights(**options)


def test_rewards_that_are_not_finite_are_refused():
    with pytest.raises(ContractError, match="not finite"):
        SampleWeights(kind="best_of_n", num_best=1)(torch.tensor([1.0, torch.nan]), ["a", "a"])


def test_samples_of_weight_zero_need_not_train():
    weights = SampleWeights(kind="best_of_n", num_best=2)(REWARDS, GROUPS)
    rows = SampleSelection(drop_zero_variance=True).rows(weights, GROUPS, divisor=2)
    assert rows == [1, 2, 3, 4]


def test_the_gradient_of_tokens_is_that_of_the_weighted_likelihood():
    resp, weights = response(), weights_of(NUM_SAMPLES)
    made = token_setup(ARFineTuning, micro=5)
    made.stack.train(with_advantages(resp, weights), progress=0.0)
    model = LMBundle().model
    track = resp.tracks["text"]
    segment = text_segment(track)
    logp = LMPipeline(model).replay(track.conditions, segment, sampling()).logp_N
    per_token = weights.repeat_interleave(segment.lengths)
    trained = segment.trained
    (-(per_token * logp)[trained].sum() / trained.sum()).backward()
    for name, parameter in model.named_parameters():
        found = made.backend.gradients[0][f"transformer.{name}"]
        torch.testing.assert_close(found, parameter.grad, rtol=2e-5, atol=1e-6)  # float32 sums in another order


def test_later_updates_go_on_fitting_the_same_samples():
    resp = response()
    made = token_setup(ARFineTuning, updates=2)
    result = made.stack.train(with_advantages(resp, torch.ones(NUM_SAMPLES)), progress=0.0)
    assert len(result.updates) == 2
    assert result.updates[1]["train/grad_norm"] > 0


def test_the_loss_of_latents_is_the_weighted_matching_error():
    made = setup(WeightedMatching, model=AffineField(), num_timesteps=2)
    displace(made.backend, 0.1)
    resp = rollout(made.pipeline, image_sampling(eta=0.0), num_prompts=3)
    track = resp.tracks["image"]
    weights = weights_of(track.batch_size)
    micro = MicroBatch(track=track.replace(advantages=weights), anchor={}, update=0, progress=0.0)
    [(_, rows)] = made.algorithm.forward_rows(micro)
    with torch.no_grad():
        errors = (rows.velocity() - rows.target).flatten(1).square().mean(dim=1)
    [part] = made.algorithm.losses(micro)
    assert part.num_terms == 2 * track.batch_size == made.algorithm.num_terms(track)
    torch.testing.assert_close(part.loss.detach(), (weights.repeat_interleave(2) * errors).sum())


@pytest.mark.parametrize("kind", [ARFineTuning, WeightedMatching])
def test_a_weight_below_zero_is_refused(kind: Any):
    if kind is ARFineTuning:
        made, resp = token_setup(kind), response()
    else:
        made = setup(kind, num_timesteps=1)
        resp = rollout(made.pipeline, image_sampling(eta=0.0), num_prompts=3)
    weights = torch.ones(resp.batch_size)
    weights[1] = -0.5
    with pytest.raises(ConfigError, match="a weight of -0.5 is below 0"):
        made.stack.train(with_advantages(resp, weights), progress=0.0)
