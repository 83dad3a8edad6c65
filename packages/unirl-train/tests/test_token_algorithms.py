"""Algorithms on tokens under the real stack and backend: scaling, masks, anchors, correction, values, two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from ranks import results_of_ranks
from token_fakes import (
    BALANCED,
    CASES,
    WIDTH,
    LMBundle,
    LMPipeline,
    advantages_of,
    response,
    sampling,
    setup,
    train_all,
    trained,
)
from torch import Tensor

from unirl.algorithms.ar_cispo import ARCISPO
from unirl.algorithms.ar_dppo import ARDPPO
from unirl.algorithms.ar_dro import ARDRO
from unirl.algorithms.ar_drpo import ARDRPO
from unirl.algorithms.ar_gmpo import ARGMPO
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.ar_ppo import ARPPO
from unirl.algorithms.ar_reinforce import ARReinforce
from unirl.algorithms.ar_sapo import ARSAPO
from unirl.algorithms.ar_vespo import ARVESPO
from unirl.algorithms.base import MicroBatch
from unirl.algorithms.critic import TokenCritic
from unirl.algorithms.rollout_correction import RolloutCorrection
from unirl.train.configs import OptimizerConfig
from unirl.trainer.balance import balanced_order
from unirl.trainer.text import count_tokens
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutResp
from unirl.types.segments import SegmentStatus, TextSegment

NUM_SAMPLES = 12


def segment_of(resp: RolloutResp) -> TextSegment:
    segment = resp.tracks["text"].segment
    assert isinstance(segment, TextSegment)
    return segment


def with_segment(resp: RolloutResp, **changes: Any) -> RolloutResp:
    track = resp.tracks["text"]
    return RolloutResp(tracks={"text": track.replace(segment=segment_of(resp).replace(**changes))})


def one_update(
    kind: Any, resp: RolloutResp | None = None, **options: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    made = setup(kind, **options)
    resp = resp if resp is not None else response()
    result = made.stack.train(with_advantages(resp, advantages_of(resp.batch_size)), progress=0.0)
    return made.backend.gradients[0], result.metrics


def close(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        # float32 sums of the same tokens in another order.
        torch.testing.assert_close(
            mine[name], gradient, rtol=2e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("case", CASES)
def test_gradients_do_not_depend_on_the_sizes_of_micro_batches(case: str):
    whole = trained(case, micro=NUM_SAMPLES)
    for micro in (1, 4, 5):
        parts = trained(case, micro=micro)
        for mine, theirs in zip(parts["gradients"], whole["gradients"], strict=True):
            close(mine, theirs)
        for name, value in whole["metrics"].items():
            if not name.startswith(("timing_s/", "perf/")):
                assert parts["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_two_ranks_train_as_one_process_even_where_the_last_micro_batch_of_one_trains_nothing(tmp_path: Path):
    ranks = results_of_ranks(train_all, tmp_path)
    # Samples that are dealt by their tokens change which rank has them, not what an update is made of.
    names = {case: case for case in CASES} | {"balanced": BALANCED}
    assert balanced_order(count_tokens(response(), "text"), 2, 2) != list(range(NUM_SAMPLES))
    for results in ranks:
        for name, case in names.items():
            alone = trained(case, micro=3)
            for mine, theirs in zip(results[name]["gradients"], alone["gradients"], strict=True):
                close(mine, theirs)
            assert results[name]["metrics"]["policy/loss"] == pytest.approx(
                alone["metrics"]["policy/loss"], rel=1e-3, abs=1e-6
            )


def test_the_first_ratio_is_exactly_one_with_a_replayed_anchor():
    made = setup(ARGRPO, updates=2, micro=4)
    result = made.stack.train(with_advantages(response(), advantages_of(NUM_SAMPLES)), progress=0.0)
    assert result.updates[0]["policy/ratio_max_abs_dev"] == 0.0
    assert result.updates[1]["policy/ratio_max_abs_dev"] > 0.0


def test_the_gap_to_the_engine_is_reported():
    _, metrics = one_update(ARGRPO)
    assert metrics["mismatch/logp_absdiff/max"] < 1e-5
    _, metrics = one_update(ARGRPO, displaced=0.1)
    assert metrics["mismatch/logp_absdiff/mean"] > 1e-3


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_masked_tokens_count_in_neither_numerator_nor_denominator(mode: str):
    resp = response()
    horizon = {"horizon": 6} if mode == "seq-mean-token-sum-norm" else {}
    gradients, _ = one_update(ARGRPO, resp, loss_agg_mode=mode, **horizon)
    model = LMBundle().model
    segment, pipeline = segment_of(resp), LMPipeline(model)
    logp = pipeline.replay(resp.tracks["text"].conditions, segment, sampling()).logp_N
    losses = []
    for own, mask, advantage in zip(
        logp.split(segment.lengths.tolist()), segment.unpack("loss_mask"), advantages_of(NUM_SAMPLES), strict=True
    ):
        token_losses = -advantage * (own - own.detach()).exp()[mask]
        if mode == "token-mean":
            losses.append(token_losses.sum() / segment.trained.sum())
        elif mode == "seq-mean-token-mean":
            losses.append(token_losses.sum() / max(int(mask.sum()), 1) / NUM_SAMPLES)
        else:
            losses.append(token_losses.sum() / 6 / NUM_SAMPLES)
    torch.stack(losses).sum().backward()
    close(gradients, {f"transformer.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None})


def test_what_a_masked_token_was_sampled_with_does_not_matter():
    resp = response()
    logp = segment_of(resp).log_probs
    assert logp is not None
    broken = torch.where(segment_of(resp).trained, logp, torch.nan)
    expected, _ = one_update(ARGRPO, resp, old_logp_source="rollout")
    found, metrics = one_update(ARGRPO, with_segment(resp, log_probs=broken), old_logp_source="rollout")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(value == value for value in metrics.values())


def test_an_update_in_which_no_token_trains_leaves_the_gradient_zero():
    resp = with_segment(response(), loss_mask=torch.zeros(segment_of(response()).tokens.numel(), dtype=torch.bool))
    for gradients, metrics in (one_update(ARGRPO, resp), one_update(ARPPO, resp, critic_seed=1)):
        assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients.values())
        assert metrics["train/grad_norm"] == 0.0


def test_truncated_samples_can_be_left_out():
    resp = response(masked=False)
    status = segment_of(resp).status
    assert status is not None and 0 < int((status == SegmentStatus.TRUNCATED).sum()) < NUM_SAMPLES
    found, metrics = one_update(ARGRPO, resp, mask_truncated=True)
    is_kept = (status != SegmentStatus.TRUNCATED).repeat_interleave(segment_of(resp).lengths)
    expected, _ = one_update(ARGRPO, with_segment(resp, loss_mask=is_kept))
    close(found, expected)
    assert metrics["response/truncated_fraction"] == pytest.approx(float((status == 2).double().mean()))


def test_the_penalty_is_zero_at_the_reference_and_pulls_back_elsewhere():
    _, metrics = one_update(ARGRPO, kl_coef=0.5, keep_reference=True)
    assert metrics["policy/reference_kl"] == pytest.approx(0.0, abs=1e-9)
    made = setup(ARGRPO, kl_coef=0.5, keep_reference=True, updates=2, lr=0.1)
    made.stack.train(with_advantages(response(), advantages_of(NUM_SAMPLES)), progress=0.0)
    result = made.stack.train(with_advantages(response(), torch.zeros(NUM_SAMPLES)), progress=0.0)
    assert result.updates[0]["policy/reference_kl"] > result.updates[1]["policy/reference_kl"] > 0


# Correction ---------------------------------------------------------------------------------------------------------


def test_correction_scales_losses_by_the_truncated_ratio_of_trainer_to_engine():
    resp = response(masked=False)
    logp = segment_of(resp).log_probs
    assert logp is not None
    shifted = with_segment(resp, log_probs=logp - 0.2)  # the trainer finds every token exp(0.2) times as likely
    plain, _ = one_update(ARGRPO, resp)
    scaled, metrics = one_update(ARGRPO, shifted, rollout_correction=RolloutCorrection(upper=2.0))
    close(scaled, {name: gradient * 2.718281828**0.2 for name, gradient in plain.items()})
    assert metrics["mismatch/correction/mean"] == pytest.approx(2.718281828**0.2, rel=1e-5)
    cut, _ = one_update(ARGRPO, shifted, rollout_correction=RolloutCorrection(upper=1.1))
    close(cut, {name: gradient * 1.1 for name, gradient in plain.items()})


def test_stale_samples_are_left_out_and_counted():
    made = setup(ARGRPO, rollout_correction=RolloutCorrection(max_staleness=1))
    for expected in (0.0, 0.0, 1.0):
        metrics = made.stack.train(with_advantages(response(), advantages_of(NUM_SAMPLES)), progress=0.0).metrics
        assert metrics["mismatch/correction/dropped_fraction"] == expected
    assert metrics["mismatch/staleness/max"] == 2.0


# Each algorithm -----------------------------------------------------------------------------------------------------


def test_at_ratio_one_all_surrogates_have_one_gradient():
    expected, _ = one_update(ARGRPO)
    for kind in (ARCISPO, ARDPPO, ARDRO, ARDRPO, ARReinforce, ARSAPO, ARVESPO):
        found, _ = one_update(kind)
        close(found, expected)


def test_the_score_function_serves_one_update():
    made = setup(ARReinforce, updates=2)
    with pytest.raises(ContractError, match="num_updates_per_batch: 1"):
        made.stack.train(with_advantages(response(), advantages_of(NUM_SAMPLES)), progress=0.0)


def test_a_critic_that_knows_nothing_leaves_the_reward_as_advantage():
    critic: dict[str, Any] = {"critic": TokenCritic(WIDTH), "critic_optimizer": OptimizerConfig(learning_rate=1e-2)}
    found, metrics = one_update(ARPPO, lam=1.0, **critic)
    expected, _ = one_update(ARGRPO)
    close(found, expected)
    assert metrics["ppo/value_mean"] == 0.0


def test_the_critic_learns_what_the_prompt_says_of_the_reward_and_leaves_the_policy_alone():
    made = setup(ARPPO, critic_seed=3, critic_lr=5e-2, lr=1e-12, value_clip=None, lam=1.0)
    rewards = torch.tensor([1.0, -1.0, 0.5, -0.5]).repeat_interleave(3)
    resp = response(masked=False)
    explained = [
        made.stack.train(with_advantages(resp, rewards), progress=0.0).metrics["ppo/explained_variance"]
        for _ in range(100)
    ]
    assert explained[0] < 0.1
    assert explained[-1] > 0.6


def test_the_value_loss_reaches_the_language_model_only_where_asked():
    rewards_alone, _ = one_update(ARPPO, critic_seed=3, value_coef=0.0)
    apart, _ = one_update(ARPPO, critic_seed=3, value_coef=0.5)
    shared, _ = one_update(ARPPO, critic_seed=3, value_coef=0.5, value_trains_policy=True)
    close(apart, rewards_alone)
    assert max(float((shared[name] - apart[name]).abs().max()) for name in apart) > 1e-3


def test_a_penalty_in_the_reward_makes_unlikely_tokens_worth_more():
    made = setup(ARPPO, critic_seed=3, kl_coef=0.3, keep_reference=True, kl_in_reward=True, lam=1.0, lr=0.1)
    with torch.no_grad():
        for parameter in (made.algorithm.critic.value.weight, made.algorithm.critic.value.bias):
            parameter.zero_()
    made.stack.train(with_advantages(response(), advantages_of(NUM_SAMPLES)), progress=0.0)
    track = response().tracks["text"]
    micro = MicroBatch(track=track.replace(advantages=torch.zeros(NUM_SAMPLES)), anchor={}, update=0, progress=0.0)
    with torch.no_grad():
        for parameter in (made.algorithm.critic.value.weight, made.algorithm.critic.value.bias):
            parameter.zero_()
    fields = made.algorithm.anchor(micro)
    reference = made.pipeline.__class__(LMBundle().model).replay(track.conditions, segment_of(response()), sampling())
    k1 = fields["logp"] - reference.logp_N[segment_of(response()).trained]
    lengths = [int(mask.sum()) for mask in segment_of(response()).unpack("loss_mask")]
    expected = torch.cat([-0.3 * own.flip(0).cumsum(0).flip(0) for own in k1.split(lengths)])
    torch.testing.assert_close(fields["advantage"], expected.detach(), rtol=1e-4, atol=1e-6)
    [part] = made.algorithm.losses(micro)
    assert "policy/reference_kl" in part.metrics.sums


@pytest.mark.parametrize("kind", [ARGRPO, ARCISPO, ARDPPO, ARDRO, ARDRPO, ARGMPO, ARReinforce, ARSAPO, ARVESPO])
def test_every_algorithm_finds_the_token_that_is_rewarded(kind: Any):
    made = setup(kind, lr=3e-2)
    params = sampling(samples_per_prompt=8, max_new_tokens=1, temperature=1.0)
    pipeline = LMPipeline(made.pipeline.model)
    for turn in range(40):
        resp = response(2, masked=False, params=params)
        track = resp.tracks["text"]
        with pipeline.evaluating():
            segment = pipeline.generate(
                track.conditions, params, noise_keys=[f"{turn}/{name}" for name in track.sample_ids]
            )
        rewards = (segment.tokens == 4).float()
        made.stack.train(
            with_advantages(RolloutResp(tracks={"text": track.replace(segment=segment)}), rewards - rewards.mean()),
            progress=0.0,
        )
    assert float(rewards.mean()) > 0.8


# Mistakes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ARGRPO, {"loss_agg_mode": "mean"}, "loss_agg_mode = 'mean'"),
        (ARGMPO, {"importance_level": "sequence"}, "ARGMPO reduces the ratios of tokens itself"),
        (ARVESPO, {"importance_level": "sequence"}, "ARVESPO reduces the ratios of tokens itself"),
        (ARGRPO, {"loss_agg_mode": "seq-mean-token-sum-norm"}, "horizon = None"),
        (ARGRPO, {"horizon": 8}, "horizon = 8 with algorithm.loss_agg_mode = token-mean"),
        (ARGRPO, {"importance_level": "word"}, "importance_level = 'word'"),
        (ARGRPO, {"clip_range": 0.0}, "clip_range = 0.0"),
        (ARGRPO, {"clip_range": 0.2, "ratio_cap": 1.1}, "ratio_cap = 1.1"),
        (ARGRPO, {"kl_estimator": "exact"}, "kl_estimator = 'exact'"),
        (ARGRPO, {"old_logp_source": "rollout", "rollout_correction": RolloutCorrection()}, "old_logp_source: replay"),
        (ARGRPO, {"rollout_correction": RolloutCorrection(noise_floor=0.1)}, "noise_floor leaves out denoising steps"),
        (ARGRPO, {"entropy_coef": -1.0}, "entropy_coef = -1.0"),
        (ARCISPO, {"ratio_max": 0.5}, "ratio_max = 0.5"),
        (ARDPPO, {"importance_level": "sequence"}, "must be token"),
        (ARDPPO, {"threshold": 0.0}, "threshold = 0.0"),
        (ARDRPO, {"epsilon": 0.0}, "epsilon = 0.0"),
        (ARPPO, {"critic_seed": 1, "lam": 2.0}, "lam = 2.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(kind: Any, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        setup(kind, **options)


def test_log_probs_that_are_absent_or_not_numbers_are_named():
    with pytest.raises(ContractError, match="returned no log-probs"):
        one_update(ARGRPO, with_segment(response(), log_probs=None), old_logp_source="rollout")
    logp = segment_of(response(masked=False)).log_probs
    assert logp is not None
    logp[0] = torch.nan
    with pytest.raises(ContractError, match="not finite for 1 tokens of .'prompt:0:sample:0'"):
        one_update(ARGRPO, with_segment(response(masked=False), log_probs=logp), old_logp_source="rollout")


def test_a_temperature_of_another_rollout_is_named():
    with pytest.raises(ContractError, match=r"temperature: rollout 0.8, replay 1.0"):
        one_update(ARGRPO, params=sampling(temperature=1.0))


def test_a_critic_of_another_width_is_named():
    critic: dict[str, Any] = {"critic": TokenCritic(WIDTH + 1), "critic_optimizer": OptimizerConfig(learning_rate=1e-2)}
    with pytest.raises(ContractError, match=f"hidden_size = {WIDTH + 1}, the model's hidden states have {WIDTH}"):
        one_update(ARPPO, **critic)
