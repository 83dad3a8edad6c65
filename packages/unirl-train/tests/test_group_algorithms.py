"""DGPO and CRD: their losses against the published forms, whole groups, shared noise, and what is refused."""

from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import AffineField, displace, rollout, sampling, setup
from torch import Tensor

from unirl.algorithms.base import MicroBatch
from unirl.algorithms.crd import CRD
from unirl.algorithms.dgpo import DGPO
from unirl.algorithms.losses import (
    centred_reward_loss,
    group_preference_loss,
    implicit_reward,
    optimality,
    preference_loss,
    velocity_distance,
)
from unirl.types.errors import ContractError

GROUP, NUM_PROMPTS = 4, 3
PARAMS = sampling(eta=0.0, samples_per_prompt=GROUP)
ADVANTAGES = torch.randn(GROUP * NUM_PROMPTS, generator=torch.Generator().manual_seed(1))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradient_of(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), leaf)[0]


def test_a_group_of_two_is_diffusion_dpo():
    distance = drawn(5, 2).requires_grad_()
    signs = torch.tensor([[1.0, -1.0]], dtype=torch.float64).expand(5, 2)
    ours = group_preference_loss(distance, signs, beta=3.0)
    theirs = preference_loss(distance[:, 0] - distance[:, 1], beta=3.0) / 3.0
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient_of(ours, distance), gradient_of(theirs, distance))


@pytest.mark.parametrize("beta", [1e-9, 10.0, 1000.0])
def test_the_gradient_of_dgpo_is_advantage_weighted_matching_that_fades(beta: float):
    """The published code weighs A times the matching error by the group's sigmoid, without a gradient through that."""
    distance, advantage = drawn(6, GROUP).requires_grad_(), drawn(6, GROUP, seed=1)
    weight = torch.sigmoid(beta * (advantage * distance).mean(dim=1, keepdim=True)).detach()
    published = (weight * advantage * distance).mean(dim=1)
    ours = group_preference_loss(distance, advantage, beta=beta)
    torch.testing.assert_close(gradient_of(ours, distance), gradient_of(published, distance))
    if beta == 1e-9:
        torch.testing.assert_close(weight, torch.full_like(weight, 0.5))


def test_the_gradient_of_crd_is_that_with_a_constant_centre_and_vanishes_at_the_optimum():
    implicit, reward = drawn(6, GROUP).requires_grad_(), drawn(6, GROUP, seed=1)
    centre = implicit.mean(dim=1, keepdim=True).detach()
    published = (2.0 * (implicit - centre) - (reward - reward.mean(dim=1, keepdim=True))).square().mean(dim=1)
    published = 5.0 / 2.0 * published  # the authors' code multiplies by adv_clip_max / beta
    ours = centred_reward_loss(implicit, reward, beta=2.0, advantage_max=5.0)
    torch.testing.assert_close(ours, published)
    torch.testing.assert_close(gradient_of(ours, implicit), gradient_of(published, implicit))
    best = (reward / 2.0 + 7.0).requires_grad_()  # any constant of the prompt
    loss = centred_reward_loss(best, reward, beta=2.0, advantage_max=5.0)
    assert float(loss.detach().abs().max()) < 1e-24
    assert float(gradient_of(loss, best).abs().max()) < 1e-12


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_implicit_reward_is_the_fall_of_the_matching_error(adaptive: bool):
    v, v_old, target = drawn(3, 2, 4, 4), drawn(3, 2, 4, 4, seed=1), drawn(3, 2, 4, 4, seed=2)
    found = implicit_reward(v, v_old, target, adaptive_weight=adaptive)
    for row in range(3):
        errors = [(each[row] - target[row]).flatten() for each in (v, v_old)]
        sizes = [float(error.abs().mean()) if adaptive else 1.0 for error in errors]
        new, old = (float(error.square().mean()) / size for error, size in zip(errors, sizes, strict=True))
        assert float(found[row]) == pytest.approx(old - new, rel=1e-6)
    assert torch.equal(implicit_reward(v, v, target, adaptive_weight=adaptive), torch.zeros(3, dtype=torch.float64))


def made_with(kind: Any, **options: Any):
    options = {
        "model": AffineField(),
        "keep_reference": True,
        "num_timesteps": 2,
        "samples_per_group": GROUP,
        **options,
    }
    made = setup(kind, micro=options.pop("micro", GROUP), **options)
    return made, rollout(made.pipeline, PARAMS, num_prompts=NUM_PROMPTS)


@pytest.mark.parametrize("kind", [DGPO, CRD])
def test_the_loss_is_the_function_of_each_group_with_one_noise(kind: Any):
    made, resp = made_with(kind)
    made.algorithm.prepare()
    displace(made.backend, 0.1)
    track = resp.tracks["image"].replace(advantages=ADVANTAGES)
    micro = MicroBatch(track=track, anchor={}, update=0, progress=0.0)
    rows = [rows for _, rows in made.algorithm.forward_rows(micro)]
    assert [tuple(each.x0.shape[:1]) for each in rows] == [(2 * GROUP * NUM_PROMPTS,)]
    [row] = rows
    units = row.sample_R.view(-1, GROUP)
    assert units.tolist() == [list(range(p * GROUP, (p + 1) * GROUP)) for p in range(NUM_PROMPTS) for _ in range(2)]
    noise = (row.target + row.x0).unflatten(0, (-1, GROUP))
    torch.testing.assert_close(noise, noise[:, :1].expand_as(noise))
    sigma = row.sigma_R.view(-1, GROUP)
    assert torch.equal(sigma, sigma[:, :1].expand_as(sigma))

    with torch.no_grad():
        policies = made.algorithm._policies  # noqa: SLF001 (the other policy's velocity, as the algorithm asks for it)
        other = policies.reference_policy() if kind is DGPO else policies.using_policy("old")
        with other:
            v_other = row.velocity()
        v = row.velocity()
        if kind is DGPO:
            distance = velocity_distance(v, row.target) - velocity_distance(v_other, row.target)
            expected = group_preference_loss(distance.view(-1, GROUP), ADVANTAGES[units], beta=100.0)
        else:
            reward = optimality(ADVANTAGES, advantage_max=5.0)[units]
            implicit = implicit_reward(v, v_other, row.target, adaptive_weight=True)
            expected = centred_reward_loss(implicit.view(-1, GROUP), reward, beta=1.0, advantage_max=5.0)
    [part] = made.algorithm.losses(micro)
    assert part.num_terms == 2 * NUM_PROMPTS == made.algorithm.num_terms(track)
    torch.testing.assert_close(part.loss.detach(), expected.sum())


@pytest.mark.parametrize("kind", [DGPO, CRD])
def test_micro_batches_and_rows_per_forward_change_nothing(kind: Any):
    whole, resp = made_with(kind, micro=GROUP * NUM_PROMPTS, model=None)
    parts, _ = made_with(kind, micro=GROUP, rows_per_forward=GROUP, model=None)
    for made in (whole, parts):
        made.algorithm.prepare()
        displace(made.backend, 0.1)
        made.stack.train(with_advantages(resp, ADVANTAGES), progress=0.0)
    for name, expected in whole.backend.gradients[0].items():
        torch.testing.assert_close(parts.backend.gradients[0][name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [DGPO, CRD])
def test_groups_of_another_size_are_refused(kind: Any):
    made, resp = made_with(kind, samples_per_group=3, micro=3)
    with pytest.raises(ContractError, match=r"the 3 samples that (DGPO|CRD) compares must come from one group"):
        made.stack.train(with_advantages(resp, ADVANTAGES), progress=0.0)


def test_a_row_outside_the_trust_radius_learns_only_while_it_is_on_the_wrong_side():
    made, resp = made_with(DGPO, trust_radius=1.0, beta=3.0, advantage_clip=None)
    made.algorithm.prepare()
    displace(made.backend, 0.2)
    track = resp.tracks["image"].replace(advantages=ADVANTAGES)
    micro = MicroBatch(track=track, anchor={}, update=0, progress=0.0)
    [(_, rows)] = made.algorithm.forward_rows(micro)
    x_s, target = rows.x_t.double(), rows.target.double()
    leaves = [value.double().requires_grad_() for value in made.parameters.values()]
    v, v_reference = leaves[0] * x_s + leaves[1], 0.7 * x_s + 0.1
    errors, moved = (
        [(a - b).square().flatten(1).mean(dim=1) for a, b in pairs]
        for pairs in (((v, target), (v_reference, target)), ((v, v_reference),))
    )
    advantages, distance = ADVANTAGES[rows.sample_R].double(), errors[0] - errors[1]
    radius = made.algorithm.trust_radius = 1.0001 * float(moved[0].detach().median())  # between two rows
    is_far, is_right = moved[0].detach() > radius, (advantages * distance).detach() < 0
    for is_held in (is_far & is_right, is_far & ~is_right, ~is_far & is_right, ~is_far & ~is_right):
        assert is_held.any()
    learning = torch.where(is_far & is_right, distance.detach(), distance)
    loss = (1 + (3.0 * (advantages * learning).view(-1, GROUP).mean(dim=1)).exp()).log().mean() / 3.0
    expected = torch.autograd.grad(loss, leaves)
    metrics = made.stack.train(with_advantages(resp, ADVANTAGES), progress=0.0).metrics
    [found] = made.backend.gradients
    for value, wanted in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-4, atol=1e-7)
    assert metrics["dgpo/held_fraction"] == pytest.approx(float((is_far & is_right).double().mean()))
