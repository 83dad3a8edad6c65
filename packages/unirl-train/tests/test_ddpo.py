"""DDPO and DPOK against each other, float64 finite differences and their limits; DDPO's prompt statistics."""

import json
import math
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import AffineField, displace, rollout, sampling, setup, some_advantages
from torch import Tensor
from transition_cases import anchored, close, flow_transitions, run

from unirl.algorithms.advantages import normalized_advantages
from unirl.algorithms.ddpo import DDPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.dpok import DPOK
from unirl.algorithms.prompt_statistics import PromptStatistics, prompt_of
from unirl.data.data_source import PromptRow
from unirl.trainer.request import build_request
from unirl.types.errors import ConfigError, ContractError

SCORE: dict[str, Any] = {"estimator": "score_function"}
START = torch.tensor([0.7, 0.1], dtype=torch.float64)
"""Weights of the affine field before training."""


def differences(value: Any, theta: Tensor) -> Tensor:
    """Central differences of a scalar function of the two weights, float64."""
    steps = 1e-5 * torch.eye(2, dtype=torch.float64)
    return torch.stack([(value(theta + step) - value(theta - step)) / 2e-5 for step in steps])


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients["transformer.scale"], gradients["transformer.shift"]]).double()


# DDPO -----------------------------------------------------------------------------------------------------------------


def test_both_estimators_have_one_gradient_at_ratio_one():
    found = []
    for estimator in ("score_function", "importance_sampling"):
        made = setup(DDPO, estimator=estimator)
        track = rollout(made.pipeline).tracks["image"]
        found.append(run(made, anchored(made, track))[1])
    close(found[0], found[1], rtol=1e-6, atol=1e-9)


def test_the_score_function_has_the_gradient_of_float64_finite_differences():
    made = setup(DDPO, model=AffineField(), **SCORE)
    track = rollout(made.pipeline).tracks["image"]
    micro = anchored(made, track)

    def value(theta: Tensor) -> Tensor:
        return -(micro.advantages.double()[:, None] * flow_transitions(track, theta, 0.7)["logp"]).mean()

    # The kernel computes in float32.
    torch.testing.assert_close(flat(run(made, micro)[1]), differences(value, START), rtol=1e-4, atol=1e-6)


def test_importance_sampling_is_the_clipped_surrogate():
    value, gradients, metrics = [], [], []
    for kind in (DDPO, DiffusionGRPO):
        made = setup(kind, model=AffineField(), clip_range=2e-3)
        micro = anchored(made, rollout(made.pipeline).tracks["image"])
        displace(made.backend, 0.05)
        found = run(made, micro)
        value.append(found[0])
        gradients.append(found[1])
        metrics.append(found[2])
    assert value[0] == value[1] and metrics[0] == metrics[1] and metrics[0]["policy/clipfrac_high"] > 0
    close(gradients[0], gradients[1], rtol=0, atol=0)


def test_the_score_function_does_not_ask_for_the_anchor():
    options: dict[str, Any] = {"old_logp_source": "rollout", **SCORE}
    made = setup(DDPO, **options)
    assert not made.algorithm.uses_anchor
    result = made.stack.train(with_advantages(rollout(made.pipeline), some_advantages(6)), progress=0.0)
    assert result.metrics["policy/ratio_max_abs_dev"] < 1e-5
    plain = setup(DDPO, **SCORE)
    plain.stack.train(with_advantages(rollout(plain.pipeline), some_advantages(6)), progress=0.0)
    close(made.backend.gradients[0], plain.backend.gradients[0], rtol=0, atol=0)


def test_a_score_function_serves_one_update():
    made = setup(DDPO, updates=2, **SCORE)
    with pytest.raises(ContractError, match="serves one update per rollout"):
        made.stack.train(with_advantages(rollout(made.pipeline), some_advantages(6)), progress=0.0)
    setup(DDPO, updates=2).stack.train(with_advantages(rollout(made.pipeline), some_advantages(6)), progress=0.0)


# DPOK -----------------------------------------------------------------------------------------------------------------


def test_dpok_without_penalty_is_ddpo():
    found = []
    cases: list[tuple[Any, dict[str, Any]]] = [(DDPO, SCORE), (DPOK, {**SCORE, "kl_coef": 0.0, "reward_weight": 1.0})]
    for kind, options in cases:
        made = setup(kind, **options)
        found.append(run(made, anchored(made, rollout(made.pipeline).tracks["image"]))[:2])
    assert found[0][0] == found[1][0]
    close(found[0][1], found[1][1], rtol=0, atol=0)


def test_dpok_without_reward_pulls_to_the_reference_alone():
    options: dict[str, Any] = {"reward_weight": 0.0, "kl_coef": 0.3, "keep_reference": True, "model": AffineField()}
    made = setup(DPOK, **options)
    track = rollout(made.pipeline).tracks["image"]
    micro = anchored(made, track)
    at_reference = run(made, micro)
    assert at_reference[0] == 0 and all(not gradient.any() for gradient in at_reference[1].values())
    displace(made.backend, 0.2)
    value, gradients, _ = run(made, micro)
    away = torch.cat([parameter.double() for parameter in made.parameters.values()]) - START
    assert value > 0 and float(flat(gradients) @ away) > 0  # downhill leads back


@pytest.mark.parametrize("estimator", ["score_function", "importance_sampling"])
def test_dpok_has_the_gradient_of_float64_finite_differences(estimator: str):
    options: dict[str, Any] = {"estimator": estimator, "reward_weight": 2.0, "kl_coef": 0.5, "keep_reference": True}
    if estimator == "importance_sampling":
        options["clip_range"] = 0.9
    made = setup(DPOK, model=AffineField(), **options)
    track = rollout(made.pipeline).tracks["image"]
    micro = anchored(made, track)
    displace(made.backend, 0.2)
    old = flow_transitions(track, START, 0.7)

    def value(theta: Tensor) -> Tensor:
        new = flow_transitions(track, theta, 0.7)
        kl = (new["mean"] - old["mean"]).square().mean(-1) / (2 * new["std"].square())
        gain = new["logp"] if estimator == "score_function" else (new["logp"] - old["logp"]).exp()
        return (-2.0 * micro.advantages.double()[:, None] * gain + 0.5 * kl).mean()

    theta = torch.cat([parameter.double() for parameter in made.parameters.values()])
    torch.testing.assert_close(flat(run(made, micro)[1]), differences(value, theta), rtol=1e-3, atol=1e-5)


def test_the_balance_of_reward_and_penalty_is_that_of_the_sums_over_elements():
    """alpha (-A log p) + beta KL with sums over N elements is N times what DPOK computes with means."""
    made = setup(DPOK, model=AffineField(), reward_weight=10.0, kl_coef=0.01, keep_reference=True, **SCORE)
    track = rollout(made.pipeline).tracks["image"]
    micro = anchored(made, track)
    displace(made.backend, 0.2)
    theta = torch.cat([parameter.double() for parameter in made.parameters.values()])
    new, old = flow_transitions(track, theta, 0.7), flow_transitions(track, START, 0.7)
    summed_kl = ((new["mean"] - old["mean"]).square() / (2 * new["std"].square()[:, None])).sum(-1)
    num_elements = new["mean"].shape[-1]
    loss = -10.0 * micro.advantages.double()[:, None] * num_elements * new["logp"] + 0.01 * summed_kl
    assert run(made, micro)[0] * num_elements == pytest.approx(float(loss.mean()), rel=1e-4)


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            DDPO,
            {"estimator": "reinforce"},
            "estimator = 'reinforce' must be one of score_function, importance",
        ),
        (DDPO, {"clip_range": 1e-4, **SCORE}, "clip_range = 0.0001 does nothing with estimator = 'score_function'"),
        (DDPO, {"clip_range": 2.0}, r"clip_range = 2.0 must lie in \(0, 1\)"),
        (DPOK, {"kl_coef": 0.1, "reward_weight": -1.0}, "reward_weight = -1.0 must be at least 0"),
        (DPOK, {"kl_coef": -0.1}, "kl_coef = -0.1 must be at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(kind: Any, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        setup(kind, **options)


# Prompt statistics ----------------------------------------------------------------------------------------------------


def test_a_prompt_with_enough_rewards_is_normalised_by_them_and_others_by_the_batch():
    statistics = PromptStatistics(buffer_size=4, min_count=3, eps=0.0)
    first = statistics(torch.tensor([1.0, 3.0, 5.0, 7.0]), ["prompt:a", "prompt:a", "prompt:b", "prompt:b"])
    std = math.sqrt(5.0)  # of 1 3 5 7: no prompt has three yet
    torch.testing.assert_close(first, torch.tensor([-3.0, -1.0, 1.0, 3.0]) / std)
    assert statistics.metrics(0.0) == {"advantage/known_prompt_fraction": 0.0}
    second = statistics(torch.tensor([2.0, 9.0]), ["prompt:a", "prompt:c"])
    # a remembers 1 3 2: mean 2, population variance 2/3. c falls back to the batch 2 9: mean 5.5, deviation 3.5.
    torch.testing.assert_close(second, torch.tensor([0.0, 1.0]))
    assert statistics.metrics(0.0) == {"advantage/known_prompt_fraction": 0.5}
    third = statistics(torch.tensor([4.0, 6.0]), ["prompt:a", "prompt:a"])
    # The buffer of four holds 3 2 4 6: mean 3.75, population variance 2.1875.
    torch.testing.assert_close(third, torch.tensor([0.25, 2.25]) / math.sqrt(2.1875))


def test_one_rollout_of_large_groups_is_the_group_normalisation():
    rewards = torch.randn(40, generator=torch.Generator().manual_seed(0))
    groups = ["prompt:a"] * 20 + ["prompt:b"] * 20
    expected = normalized_advantages(rewards, groups, center="group", scale="group", ddof=0, eps=1e-6)
    torch.testing.assert_close(PromptStatistics()(rewards, groups), expected)


def test_rewards_that_are_all_equal_teach_nothing():
    statistics = PromptStatistics(min_count=2)
    assert not statistics(torch.full((3,), 0.1), ["prompt:a"] * 3).any()


def test_repetitions_and_refills_of_a_prompt_share_its_memory():
    params = sampling(samples_per_prompt=1)
    rows = [PromptRow("x", "p", {}), PromptRow("x", "p", {})]
    req = build_request(rows, params, sigmas=torch.tensor([1.0, 0.0]), latent_shape=(1,), rollout_id=0)
    assert [prompt_of(group) for group in req.group_ids] == ["prompt:p", "prompt:p"]
    assert prompt_of(f"refill12:{req.group_ids[1]}") == prompt_of(f"refill3:refill2:{req.group_ids[0]}") == "prompt:p"
    assert prompt_of("prompt:refill3:#x") == "prompt:refill3:#x"


def test_order_of_the_samples_does_not_matter():
    generator = torch.Generator().manual_seed(1)
    rewards, groups = torch.randn(12, generator=generator), [f"prompt:{i % 3}" for i in range(12)]
    order = torch.randperm(12, generator=generator).tolist()
    plain = PromptStatistics(min_count=4)(rewards, groups)
    shuffled = PromptStatistics(min_count=4)(rewards[order], [groups[i] for i in order])
    torch.testing.assert_close(shuffled, plain[order])


def test_a_resumed_memory_goes_on_bit_for_bit():
    generator = torch.Generator().manual_seed(4)
    batches = [torch.randn(6, generator=generator) for _ in range(4)]
    groups = ["prompt:a"] * 3 + ["prompt:b"] * 3
    whole, first, second = (PromptStatistics(buffer_size=5, min_count=4) for _ in range(3))
    expected = [whole(rewards, groups) for rewards in batches]
    for rewards in batches[:2]:
        first(rewards, groups)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for rewards, advantages in zip(batches[2:], expected[2:], strict=True):
        assert torch.equal(second(rewards, groups), advantages)


def test_statistics_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match=r"min_count = 9 must lie in 1 .. advantages.buffer_size = 8"):
        PromptStatistics(buffer_size=8, min_count=9)
    with pytest.raises(ConfigError, match="eps = -1.0 must be at least 0"):
        PromptStatistics(eps=-1.0)
    with pytest.raises(ContractError, match=r"rewards of samples \[0\] are not finite"):
        PromptStatistics()(torch.tensor([math.nan]), ["prompt:a"])
