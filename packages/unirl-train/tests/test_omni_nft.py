"""OmniNFT: each medium's loss from its own slice and advantages, against numbers by hand and against DiffusionNFT."""

from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import AffineField, Setup, displace, rollout, sampling, setup, some_advantages
from torch import Tensor

from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.omni_nft import OmniNFT
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutResp
from unirl.types.segments import LatentSegment

DETERMINISTIC = sampling(eta=0.0)
VIDEO, AUDIO = some_advantages(6), some_advantages(6, seed=4)
NUM_TIMESTEPS, BETA = 2, 0.5


def routed(resp: RolloutResp, **media: Tensor) -> RolloutResp:
    """With advantages by medium, and numbers that nothing may read as the only ones."""
    whole = with_advantages(resp, torch.full((6,), torch.nan))
    return whole.with_values(whole.root_name(), media_advantages=media)


def trained(video: Tensor = VIDEO, audio: Tensor = AUDIO, **options: Any) -> tuple[Setup, dict[str, float]]:
    """One update away from the old policy: the setup and its metrics."""
    made = setup(OmniNFT, model=AffineField(), num_timesteps=NUM_TIMESTEPS, **options)
    resp = rollout(made.pipeline, DETERMINISTIC)
    displace(made.backend, 0.3)
    return made, made.stack.train(routed(resp, video=video, audio=audio), progress=0.0).metrics


# By hand --------------------------------------------------------------------------------------------------------------


def loss_by_hand(
    parameters: tuple[float, float],
    x_t: Tensor,
    x0: Tensor,
    sigma: list[float],
    media: dict[str, tuple[slice, list[float], float]],
    weights_at: tuple[float, float],
) -> float:
    """The mean over rows in float64, number by number. Old policy: v = 0.7 x + 0.1. media: slice of channels, advantage
    of each row, share. weights_at: parameters of the adaptive weights, which carry no gradient."""

    def error(sign: int, at: tuple[float, float], x: Tensor, clean: Tensor, level: float) -> Tensor:
        v_old, v_new = 0.7 * x + 0.1, at[0] * x + at[1]
        return x - level * ((1 - sign * BETA) * v_old + sign * BETA * v_new) - clean

    total = 0.0
    for where, advantages, share in media.values():
        for row, advantage in enumerate(advantages):
            x, clean = x_t[row, where].double(), x0[row, where].double()
            good = min(max(advantage, -5.0), 5.0) / 10 + 0.5
            for sign, r in ((1, good), (-1, 1 - good)):
                size = float(error(sign, weights_at, x, clean, sigma[row]).abs().mean())
                square = float(error(sign, parameters, x, clean, sigma[row]).square().mean())
                total += share * 5.0 / BETA * r * square / max(size, 1e-5)
    return total / len(sigma)


def test_loss_and_gradient_are_those_of_a_hand_worked_case():
    made, metrics = trained(media_weights={"video": 3.0}, beta=BETA)
    fresh = setup(OmniNFT, model=AffineField(), num_timesteps=NUM_TIMESTEPS)
    track = rollout(fresh.pipeline, DETERMINISTIC).root_track()
    assert isinstance(track.segment, LatentSegment)
    displace(fresh.backend, 0.3)
    scale, shift = (float(value) for value in fresh.parameters.values())
    levels = fresh.algorithm.levels([f"r0:{name}" for name in track.sample_ids], track.segment)
    case: dict[str, Any] = {
        "x_t": made.pipeline.seen_x[0],
        "x0": track.segment.clean_latents.repeat_interleave(NUM_TIMESTEPS, dim=0),
        "sigma": levels.flatten().tolist(),
        "media": {
            "video": (slice(0, 2), VIDEO.repeat_interleave(NUM_TIMESTEPS).tolist(), 0.75),
            "audio": (slice(2, 3), AUDIO.repeat_interleave(NUM_TIMESTEPS).tolist(), 0.25),
        },
        "weights_at": (scale, shift),
    }
    # The fake computes in float32, about 1e-7 of terms of order ten.
    assert metrics["policy/loss"] == pytest.approx(loss_by_hand((scale, shift), **case), rel=1e-5)
    step = 1e-6
    for name, moves in {"transformer.scale": (step, 0.0), "transformer.shift": (0.0, step)}.items():
        up, down = (loss_by_hand((scale + sign * moves[0], shift + sign * moves[1]), **case) for sign in (1.0, -1.0))
        assert float(made.backend.gradients[0][name]) == pytest.approx((up - down) / (2 * step), rel=1e-4)


# Against DiffusionNFT -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"kl_coef": 0.3, "keep_reference": True}, {"rows_per_forward": 4, "micro": 4}])
def test_one_medium_of_weight_one_is_diffusion_nft_to_the_last_bit(options: dict[str, Any]):
    found = []
    for kind in (DiffusionNFT, OmniNFT):
        made = setup(kind, num_timesteps=NUM_TIMESTEPS, **options)
        made.pipeline.media = {"video": slice(0, 3)}
        resp = rollout(made.pipeline, DETERMINISTIC)
        own = routed(resp, video=VIDEO) if kind is OmniNFT else with_advantages(resp, VIDEO)
        # The second rollout trains away from the old policy and the reference.
        metrics = [made.stack.train(own, progress=0.0).metrics for _ in range(2)]
        found.append((made, metrics))
    (plain, expected), (omni, metrics) = found
    for first, second in zip(plain.backend.gradients, omni.backend.gradients, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(value, omni.parameters[name]) for name, value in plain.parameters.items())
    for own, theirs in zip(metrics, expected, strict=True):
        assert {key: own[key] for key in theirs if not key.startswith(("timing_s/", "perf/"))} == {
            key: value for key, value in theirs.items() if not key.startswith(("timing_s/", "perf/"))
        }
        assert own["nft/video/loss"] == own["policy/loss"]


def test_the_gradient_is_the_weighted_mean_over_the_media():
    both, _ = trained(media_weights={"video": 3.0})
    video, audio = (trained(media_weights={other: 0.0})[0].backend.gradients[0] for other in ("audio", "video"))
    for name, gradient in both.backend.gradients[0].items():
        torch.testing.assert_close(gradient, 0.75 * video[name] + 0.25 * audio[name], rtol=1e-5, atol=1e-5)


# Routing --------------------------------------------------------------------------------------------------------------


def test_advantages_of_the_sound_leave_the_loss_of_the_video_unchanged():
    _, before = trained()
    _, after = trained(audio=-AUDIO)
    assert before["nft/video/loss"] == after["nft/video/loss"]
    assert before["nft/video/optimality_mean"] == after["nft/video/optimality_mean"]
    assert before["nft/audio/loss"] != after["nft/audio/loss"]
    assert before["policy/loss"] == pytest.approx((before["nft/video/loss"] + before["nft/audio/loss"]) / 2, rel=1e-6)


def test_a_medium_of_weight_zero_has_no_say():
    first, _ = trained(media_weights={"audio": 0.0})
    second, _ = trained(audio=5 * AUDIO, media_weights={"audio": 0.0})
    assert all(torch.equal(first.parameters[name], value) for name, value in second.parameters.items())


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"video": -1.0}, r"algorithm.media_weights has weights below 0: {'video': -1.0}"),
        ({"smell": 1.0}, "algorithm.media_weights names smell; media of the latent are video, audio"),
        ({"video": 0.0, "audio": 0.0}, "leaves no medium to train. Set one above 0"),
    ],
)
def test_weights_that_cannot_work_are_refused(weights: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        trained(media_weights=weights)


def test_a_track_without_advantages_of_its_media_is_refused():
    made = setup(OmniNFT)
    resp = rollout(made.pipeline, DETERMINISTIC)
    with pytest.raises(ContractError, match=r"holds \['audio', 'video'\], the track has advantages of \[\]"):
        made.stack.train(with_advantages(resp, VIDEO), progress=0.0)
