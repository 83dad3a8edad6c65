"""DiffusionNFT: its draws, its first gradient, its old policy; and a toy on which both algorithms learn."""

from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import (
    AffineField,
    FieldEngine,
    FieldPipeline,
    Setup,
    displace,
    prompt_rows,
    rollout,
    sampling,
    setup,
    some_advantages,
)
from torch import Tensor

from unirl.algorithms.advantages import AdvantageConfig
from unirl.algorithms.base import MicroBatch
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.losses import nft_loss, optimality
from unirl.algorithms.old_policy import OLD
from unirl.algorithms.schedules import OldPolicyDecay
from unirl.train.configs import LoraConfig
from unirl.trainer.request import build_request
from unirl.types.conditions import Condition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.segments import LatentSegment, TextSegment

DETERMINISTIC = sampling(eta=0.0)
KEYS = ["r0:a", "r0:b", "r0:c"]


def segment_of(resp: RolloutResp) -> LatentSegment:
    segment = resp.tracks["image"].segment
    assert isinstance(segment, LatentSegment)
    return segment


def made_with(**options: Any) -> tuple[Setup, RolloutResp]:
    made = setup(DiffusionNFT, **options)
    return made, rollout(made.pipeline, DETERMINISTIC)


def gradient_of(options: dict[str, Any], advantages: Tensor, **more: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    made, resp = made_with(**options, **more)
    metrics = made.stack.train(with_advantages(resp, advantages), progress=0.0).metrics
    return made.backend.gradients[0], metrics


# Draws --------------------------------------------------------------------------------------------------------------


def test_levels_are_the_rollouts_own_without_repetition_and_without_the_terminal():
    made, resp = made_with(timestep_fraction=1.0)
    sigmas = segment_of(resp).sigmas
    levels = made.algorithm.levels([f"key {i}" for i in range(50)], segment_of(resp))
    assert levels.shape == (50, 4)
    for row in levels:
        assert torch.equal(row.sort(descending=True).values, sigmas[:-1])
    assert len({tuple(row.tolist()) for row in levels}) > 10
    # The default fraction drops one of the four, and not always the same.
    some = setup(DiffusionNFT).algorithm.levels([f"key {i}" for i in range(50)], segment_of(resp))
    assert some.shape == (50, 3) and set(some.flatten().tolist()) == set(sigmas[:-1].tolist())


def test_continuous_levels_lie_above_zero_and_up_to_one():
    for sampler in ("uniform", "logit_normal"):
        made, resp = made_with(timestep_sampler=sampler, num_timesteps=5)
        levels = made.algorithm.levels([f"key {i}" for i in range(100)], segment_of(resp))
        assert levels.shape == (100, 5) and float(levels.min()) > 0 and float(levels.max()) <= 1
        assert 0.4 < float(levels.mean()) < 0.6


@pytest.mark.parametrize("sampler", ["rollout", "uniform", "logit_normal"])
def test_levels_of_a_sample_depend_on_nothing_but_its_key_and_the_seed(sampler: str):
    made, resp = made_with(timestep_sampler=sampler, num_timesteps=2)
    levels = made.algorithm.levels(KEYS, segment_of(resp))
    assert torch.equal(made.algorithm.levels(KEYS[::-1], segment_of(resp)), levels.flip(0))
    assert torch.equal(made.algorithm.levels(KEYS[1:2], segment_of(resp)), levels[1:2])
    other, _ = made_with(timestep_sampler=sampler, num_timesteps=2, seed=1)
    many = [f"key {i}" for i in range(101)]
    alone = torch.cat([made.algorithm.levels([key], segment_of(resp)) for key in many])
    assert torch.equal(made.algorithm.levels(many, segment_of(resp)), alone)
    assert not torch.equal(
        other.algorithm.levels(many, segment_of(resp)), made.algorithm.levels(many, segment_of(resp))
    )


def noised_rows(made: Setup, resp: RolloutResp, micro: int) -> dict[str, set[tuple[float, ...]]]:
    """Latents that the velocity was asked at, by the sample's id, in one training of a shard."""
    track = resp.tracks["image"]
    rows: dict[str, set[tuple[float, ...]]] = {}
    for start in range(0, track.batch_size, micro):
        part = track.select(list(range(start, min(start + micro, track.batch_size))))
        made.pipeline.seen_x.clear()
        list(made.algorithm.losses(micro_of(part)))
        seen = made.pipeline.seen_x[0].flatten(1).tolist()
        per_sample = len(seen) // part.batch_size
        for row, values in enumerate(seen):
            rows.setdefault(part.sample_ids[row // per_sample], set()).add(tuple(values))
    return rows


def micro_of(track: RolloutTrack) -> MicroBatch:
    return MicroBatch(track=track.replace(advantages=torch.ones(track.batch_size)), anchor={}, update=0, progress=0.0)


def test_noise_does_not_depend_on_order_micro_batches_or_devices_and_changes_between_rollouts():
    made, resp = made_with(num_timesteps=2)
    whole = noised_rows(made, resp, 6)
    assert all(len(rows) == 2 for rows in whole.values()) and len(set.union(*whole.values())) == 12
    assert noised_rows(made, resp, 4) == whole
    turned = RolloutResp(tracks={"image": resp.tracks["image"].select([3, 5, 1, 0, 4, 2])})
    assert noised_rows(made, turned, 6) == whole
    shards = [noised_rows(made, resp.slice(start, start + 3), 2) for start in (0, 3)]
    assert {**shards[0], **shards[1]} == whole
    made.stack.train(with_advantages(resp, some_advantages(6)), progress=0.0)
    after = noised_rows(made, resp, 6)
    assert all(after[name].isdisjoint(rows) for name, rows in whole.items())


# Loss ---------------------------------------------------------------------------------------------------------------


def flow_matching_gradients(
    resp: RolloutResp, advantages: Tensor, num_timesteps: int, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Gradient of mean over (sample, level) of A mean (x0_hat - x0)^2 / w, row by row, by autograd."""
    made = setup(DiffusionNFT, num_timesteps=num_timesteps, **options)
    track = resp.tracks["image"]
    segment = segment_of(resp)
    keys = [f"r0:{name}" for name in track.sample_ids]
    levels = made.algorithm.levels(keys, segment)
    list(made.algorithm.losses(micro_of(track)))
    x_t = made.pipeline.seen_x[0].view(6, num_timesteps, *made.pipeline.shape)
    made.backend.zero_grad()
    for row in range(6):
        one: dict[str, Condition] = {name: item.select([row]) for name, item in track.conditions.items()}
        x0 = segment.clean_latents[row : row + 1]
        for k in range(num_timesteps):
            x, sigma = x_t[row, k][None], levels[row, k][None]
            v = made.pipeline.velocity(one, x, sigma, torch.zeros(1, dtype=torch.long), DETERMINISTIC)
            error = x - sigma * v - x0
            weight = error.detach().abs().mean().clamp(min=1e-5)
            (advantages[row] * (error.square() / weight).mean() / (6 * num_timesteps)).backward()
    return {name: p.grad for name, p in made.backend.parameters.items() if p.grad is not None}


@pytest.mark.parametrize("num_timesteps", [1, 2, 4])
def test_the_first_gradient_is_the_mean_over_samples_and_levels_for_any_number_of_levels_and_beta(num_timesteps: int):
    _, resp = made_with()
    advantages = some_advantages(6)
    expected = flow_matching_gradients(resp, advantages, num_timesteps, {})
    for beta in (0.1, 1.0):
        for micro in (2, 6):
            found, _ = gradient_of({"num_timesteps": num_timesteps, "beta": beta}, advantages, micro=micro)
            for name, gradient in expected.items():
                # Float32; A_max / beta times a difference of branches that nearly cancel.
                torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_the_loss_is_a_mean_whatever_the_number_of_levels():
    for num_timesteps in (1, 2, 4):
        made, resp = made_with(num_timesteps=num_timesteps, rows_per_forward=4)
        track = resp.tracks["image"]
        assert made.algorithm.num_terms(track) == 6 * num_timesteps
        parts = list(made.algorithm.losses(micro_of(track)))
        assert sum(part.num_terms for part in parts) == 6 * num_timesteps
        mean = sum(float(part.loss.detach()) for part in parts) / (6 * num_timesteps)
        metrics = made.stack.train(with_advantages(resp, torch.ones(6)), progress=0.0).metrics
        assert metrics["nft/optimality_mean"] == pytest.approx(0.6)
        branches = 5.0 * (0.6 * metrics["nft/positive_loss"] + 0.4 * metrics["nft/negative_loss"])
        assert metrics["policy/loss"] == pytest.approx(branches, rel=1e-5)
        assert mean == pytest.approx(branches, rel=1e-5)


def test_zero_advantages_at_the_old_policy_give_no_gradient():
    gradients, metrics = gradient_of({}, torch.zeros(6))
    # The two branches cancel up to float32 rounding of terms of order one.
    assert all(float(gradient.abs().max()) < 1e-6 for gradient in gradients.values())
    assert metrics["nft/policy_distance"] == 0.0
    assert metrics["nft/positive_loss"] == metrics["nft/negative_loss"] > 0


def test_the_branches_lie_around_the_old_policy():
    made, resp = made_with(model=AffineField(), num_timesteps=2, beta=0.5)
    displace(made.backend, 0.3)  # away from the old policy, v = 0.7 x + 0.1
    advantages = some_advantages(6)
    metrics = made.stack.train(with_advantages(resp, advantages), progress=0.0).metrics
    x_t = made.pipeline.seen_x[0]
    segment = segment_of(resp)
    levels = made.algorithm.levels([f"r0:{name}" for name in resp.tracks["image"].sample_ids], segment)
    fresh = setup(DiffusionNFT, model=AffineField())
    displace(fresh.backend, 0.3)
    scale, shift = fresh.backend.parameters.values()
    v_new = scale * x_t + shift
    rows = nft_loss(
        v_new,
        0.7 * x_t + 0.1,
        x_t,
        segment.clean_latents.repeat_interleave(2, dim=0),
        levels.flatten(),
        optimality(advantages, advantage_max=5.0).repeat_interleave(2),
        beta=0.5,
        advantage_max=5.0,
    )
    rows.loss_R.mean().backward()
    assert metrics["policy/loss"] == pytest.approx(float(rows.loss_R.detach().mean()), rel=1e-5)
    distance = (v_new - 0.7 * x_t - 0.1).square().mean()
    assert metrics["nft/policy_distance"] == pytest.approx(float(distance.detach()), rel=1e-5)
    for name, parameter in fresh.backend.parameters.items():
        torch.testing.assert_close(made.backend.gradients[0][name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_modes_change_what_an_advantage_does():
    advantages = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5, 0.0])
    kept, _ = gradient_of({"advantage_mode": "positive_only"}, advantages)
    by_hand, _ = gradient_of({}, advantages.clamp(min=0))
    whole, _ = gradient_of({}, advantages)
    assert all(torch.equal(kept[name], by_hand[name]) for name in kept)
    assert any(not torch.equal(kept[name], whole[name]) for name in kept)


def test_the_penalty_pulls_towards_the_reference():
    at_reference, metrics = gradient_of({"kl_coef": 10.0}, some_advantages(6), keep_reference=True)
    plain, _ = gradient_of({}, some_advantages(6))
    assert metrics["policy/reference_kl"] == 0.0
    assert all(torch.equal(at_reference[name], plain[name]) for name in plain)

    # Away from the reference, with the old policy brought along, only the penalty is left. It is quadratic in the
    # displacement, so displacement times gradient is twice its value.
    made, resp = made_with(kl_coef=10.0, model=AffineField(), keep_reference=True)
    displace(made.backend, 0.3)
    made.backend.update_policy(OLD, 0.0)
    moved = {"transformer.scale": 0.7, "transformer.shift": 0.1}
    moved = {name: float(made.parameters[name]) - start for name, start in moved.items()}
    metrics = made.stack.train(with_advantages(resp, torch.zeros(6)), progress=0.0).metrics
    along = sum(moved[name] * float(made.backend.gradients[0][name]) for name in moved)
    assert along == pytest.approx(2 * 10.0 * metrics["policy/reference_kl"], rel=1e-4)
    assert along > 1e-2


def test_the_penalty_of_full_fine_tuning_needs_a_kept_reference():
    made, resp = made_with(kl_coef=1.0)
    with pytest.raises(ConfigError, match="keep_reference"):
        made.stack.train(with_advantages(resp, some_advantages(6)), progress=0.0)


# Old policy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decay", "follows"), [(0.0, 1.0), (1.0, 0.0), (0.25, 0.75)])
def test_the_old_policy_follows_as_the_decay_says(decay: float, follows: float):
    made, resp = made_with(decay=OldPolicyDecay(start=decay, rate=0.0, cap=1.0))
    start = {name: value.clone() for name, value in made.parameters.items()}
    metrics = made.stack.train(with_advantages(resp, some_advantages(6)), progress=0.0).metrics
    assert metrics["nft/old_policy_decay"] == decay
    old = made.backend.policies.values(OLD)
    for name, value in made.parameters.items():
        assert not torch.equal(value, start[name])
        expected = torch.lerp(start[name], value, follows)
        torch.testing.assert_close(old[name], expected, rtol=0, atol=1e-7 if decay == 0.25 else 0)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4.0)])
def test_rollouts_under_the_old_policy_leave_requires_grad_alone(lora: LoraConfig | None):
    made, resp = made_with(lora=lora, decay=OldPolicyDecay(start=1.0, rate=0.0, cap=1.0))
    flags = {name: p.requires_grad for name, p in made.pipeline.model.named_parameters()}
    assert any(flags.values()) and (lora is None) == all(flags.values())
    made.stack.train(with_advantages(resp, some_advantages(6)), progress=0.0)
    current = {name: value.clone() for name, value in made.parameters.items()}
    engine = FieldEngine(made.pipeline, made.backend)
    req = build_request(
        prompt_rows(2),
        DETERMINISTIC,
        sigmas=made.pipeline.sigmas(DETERMINISTIC),
        latent_shape=made.pipeline.shape,
        rollout_id=0,
    )
    old = engine.generate(req, policy=made.algorithm.rollout_policy)
    assert {name: p.requires_grad for name, p in made.pipeline.model.named_parameters()} == flags
    assert all(torch.equal(value, current[name]) for name, value in made.parameters.items())
    # Frozen at the start, so it samples what the fresh model sampled; the trained policy no longer does.
    assert torch.equal(segment_of(old).clean_latents, segment_of(resp).clean_latents)
    assert not torch.equal(segment_of(engine.generate(req)).clean_latents, segment_of(resp).clean_latents)
    made.stack.train(with_advantages(old, some_advantages(6)), progress=0.0)
    assert set(made.backend.gradients[1]) == set(made.parameters)


# Mistakes and state ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta = 0.0 must be above 0"),
        ({"advantage_max": -1.0}, "advantage_max = -1.0 must be above 0"),
        ({"advantage_mode": "raw"}, "advantage_mode = 'raw' must be one of all, positive_only"),
        ({"timestep_sampler": "sobol"}, "timestep_sampler = 'sobol' must be one of rollout, uniform, logit_normal"),
        ({"timestep_fraction": 0.0}, r"timestep_fraction = 0.0 must lie in \(0, 1\]"),
        ({"timestep_sampler": "uniform"}, "num_timesteps is needed with timestep_sampler: uniform"),
        ({"num_timesteps": 0}, "num_timesteps = 0 must be at least 1"),
        ({"kl_coef": -1.0}, "kl_coef = -1.0 must be at least 0"),
        ({"rows_per_forward": -2}, "rows_per_forward = -2 must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        setup(DiffusionNFT, **options)


def test_more_levels_than_the_rollout_has_and_other_tracks_are_refused():
    made, resp = made_with(num_timesteps=5)
    with pytest.raises(ConfigError, match="num_timesteps = 5 exceeds the 4 levels of the rollout"):
        made.stack.train(with_advantages(resp, some_advantages(6)), progress=0.0)
    text = TextSegment.pack(tokens=[torch.tensor([1, 2])])
    with pytest.raises(ConfigError, match="trains latent tracks, this one holds TextSegment"):
        made.algorithm.num_terms(RolloutTrack(sample_ids=["a"], segment=text))
    made = setup(DiffusionNFT, params=sampling(eta=0.0, seed=9))
    with pytest.raises(ContractError, match="seed: rollout 42, replay 9"):
        made.stack.train(with_advantages(resp, some_advantages(6)), progress=0.0)


def test_the_decay_goes_on_where_a_checkpoint_left_it():
    decay = OldPolicyDecay(start=0.1, rate=0.1, cap=0.9)
    made, resp = made_with(decay=decay)
    for expected in (0.1, 0.2):
        metrics = made.stack.train(with_advantages(resp, some_advantages(6)), progress=0.0).metrics
        assert metrics["nft/old_policy_decay"] == pytest.approx(expected)
    again, _ = made_with(decay=decay)
    again.stack.load_state_dict(made.stack.state_dict())
    metrics = again.stack.train(with_advantages(resp, some_advantages(6)), progress=0.0).metrics
    assert metrics["nft/old_policy_decay"] == pytest.approx(0.3)


# A toy with a known optimum -------------------------------------------------------------------------------------------

TARGET = 1.0
"""The reward is -mean (x0 - TARGET)^2: the best a constant shift of the samples can do is to centre them there."""


def toy_reward(resp: RolloutResp) -> Tensor:
    return -(segment_of(resp).clean_latents - TARGET).square().flatten(1).mean(1)


def toy_request(pipeline: FieldPipeline, rollout_id: int, num_prompts: int, eta: float) -> Any:
    params = sampling(eta=eta, samples_per_prompt=8, sde_indices=[0, 1, 2] if eta else None)
    sigmas = pipeline.sigmas(params)
    rows = prompt_rows(num_prompts)
    return build_request(rows, params, sigmas=sigmas, latent_shape=pipeline.shape, rollout_id=rollout_id)


def held_out(made: Setup) -> float:
    return float(toy_reward(FieldEngine(made.pipeline).generate(toy_request(made.pipeline, 10_000, 16, 0.0))).mean())


@pytest.mark.parametrize(
    ("kind", "eta", "lr", "options"),
    [
        (DiffusionGRPO, 0.7, 0.01, {"clip_range": 0.2}),
        (DiffusionNFT, 0.0, 0.01, {"decay": OldPolicyDecay(cap=0.0)}),
    ],
)
def test_both_algorithms_reach_a_known_optimum(kind: Any, eta: float, lr: float, options: dict[str, Any]):
    # Samples start around 0 with standard deviation e^-1: reward about -1.1, of which 1 is the distance to the target.
    made = setup(kind, model=AffineField(scale=1.0, shift=0.0), shape=(1, 1, 2), lr=lr, max_grad_norm=1.0, **options)
    engine = FieldEngine(made.pipeline, made.backend)
    advantages = AdvantageConfig(preset="flow_grpo")
    before = held_out(made)
    for rollout_id in range(150):
        req = toy_request(made.pipeline, rollout_id, 2, eta)
        resp = engine.generate(req, policy=made.algorithm.rollout_policy)
        made.stack.train(with_advantages(resp, advantages(toy_reward(resp), req.group_ids)), progress=0.0)
    after = held_out(made)
    assert -1.4 < before < -0.9
    assert after > before + 0.8
