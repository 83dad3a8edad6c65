"""OmniNFT's weights of regions: numbers by hand, ones that change no bit, and what is refused."""

import math
from typing import Any

import pytest
import torch
from advantaged import with_advantages
from diffusion_fakes import AffineField, FieldPipeline, Setup, displace, rollout, sampling, setup, some_advantages
from torch import Tensor

from unirl.algorithms.losses import nft_loss
from unirl.algorithms.omni_nft import OmniNFT
from unirl.algorithms.regions import element_weights, region_weights
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutResp
from unirl.types.segments import LatentSegment

MAPS = torch.rand(6, 1, 2, 2, generator=torch.Generator().manual_seed(3))
"""One frame of the fake's four places; its video is two channels of them."""


def noted(pipeline: FieldPipeline, maps: Tensor | None) -> RolloutResp:
    """A rollout with advantages of both media, whose samples bring maps of the video."""
    resp = with_advantages(rollout(pipeline, sampling(eta=0.0)), torch.full((6,), torch.nan))
    media = {"video": some_advantages(6), "audio": some_advantages(6, seed=4)}
    track = resp.root_track()
    segment = track.segment
    assert isinstance(segment, LatentSegment)
    if maps is not None:
        segment = segment.replace(regions={"video": maps})
    return RolloutResp(tracks={resp.root_name(): track.replace(segment=segment, media_advantages=media)})


def trained(maps: Tensor | None = MAPS, num_rollouts: int = 1, **options: Any) -> tuple[Setup, list[dict[str, float]]]:
    """Some updates away from the old policy, with their metrics."""
    made = setup(OmniNFT, model=AffineField(), num_timesteps=2, **options)
    displace(made.backend, 0.3)
    resp = noted(made.pipeline, maps)
    return made, [made.stack.train(resp, progress=0.0).metrics for _ in range(num_rollouts)]


# Weights --------------------------------------------------------------------------------------------------------------


def test_weights_are_those_of_a_hand_worked_case():
    maps = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]], [[5.0, 5.0], [5.0, 5.0]]]])
    found = region_weights(maps, 1.5)
    # Mean 3, deviations -2 -1 0 3, variance (4 + 1 + 0 + 9) / 3; in the second frame no place stands out.
    deviation = math.sqrt(14 / 3)
    by_hand = [1 + 0.5 / (1 + math.exp(-0.5 * z / deviation)) for z in (-2, -1, 0, 3)]
    torch.testing.assert_close(found[0, 0].flatten(), torch.tensor(by_hand), rtol=1e-6, atol=0)
    assert found[0, 1].flatten().tolist() == [1.25] * 4
    assert bool((found >= 1).all()) and bool((found <= 1.5).all())


def test_weights_do_not_depend_on_the_scale_of_a_map_or_on_its_other_frames():
    maps = torch.rand(2, 3, 2, 4, generator=torch.Generator().manual_seed(0))
    whole = region_weights(maps, 2.0)
    torch.testing.assert_close(region_weights(maps * torch.tensor([1.0, 7.0, 0.1]).view(3, 1, 1), 2.0), whole)
    torch.testing.assert_close(region_weights(maps[:, 1:2], 2.0), whole[:, 1:2])


def test_elements_of_every_channel_have_the_weight_of_their_place():
    weights = torch.tensor([[[[1.0, 3.0]]], [[[1.0, 1.0]]]])
    found = element_weights(weights, torch.zeros(2, 6))
    assert found.tolist() == [[0.5, 1.5] * 3, [1.0] * 6]
    with pytest.raises(ContractError, match=r"a slice \(2, 5\) is no number of maps \(1, 1, 2\)"):
        element_weights(weights, torch.zeros(2, 5))


def test_frames_of_one_place_are_refused():
    with pytest.raises(ConfigError, match=r"maps \(2, 3, 1, 1\) have frames of one place.*algorithm.region_weight: 1"):
        region_weights(torch.ones(2, 3, 1, 1), 1.5)


# Loss -----------------------------------------------------------------------------------------------------------------


def test_the_weighted_loss_is_that_of_a_hand_worked_case():
    """One sample of one channel and two places of weights 1 and 3; v_new differs from v_old in the second place."""
    x_t, x0, sigma = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 1.0]]), torch.tensor([0.5])
    v_old, v_new = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 2.0]])
    weight = element_weights(torch.tensor([[[[1.0, 3.0]]]]), x0)
    found = nft_loss(
        v_new, v_old, x_t, x0, sigma, torch.tensor([0.75]), beta=1.0, advantage_max=5.0, place_weight=weight
    )
    # x0+ = x_t - v_new / 2 = (1, 1), errors (.5, 0), w+ = .25: (1 (.25 / .25) + 3 (0)) / 4 = .25
    # v- = 2 v_old - v_new = (0, 0), x0- = (1, 2), errors (.5, 1), w- = .75: (1 (.25 / .75) + 3 (1 / .75)) / 4 = 13 / 12
    assert found.positive_R.tolist() == pytest.approx([0.25])
    assert found.negative_R.tolist() == pytest.approx([13 / 12])
    assert found.loss_R.tolist() == pytest.approx([5 * (0.75 * 0.25 + 0.25 * 13 / 12)])


def test_weights_of_ones_change_no_bit_of_loss_and_gradient():
    generator = torch.Generator().manual_seed(0)
    v_old, x_t, x0 = (torch.randn(3, 24, generator=generator) for _ in range(3))
    ones = element_weights(region_weights(torch.rand(3, 2, 2, 2, generator=generator), 1.0), x0)
    found = []
    for weight in (None, ones):
        for adaptive in (True, False):
            v_new = (v_old + 0.1).requires_grad_()
            loss = nft_loss(
                v_new,
                v_old,
                x_t,
                x0,
                torch.tensor([0.2, 0.5, 0.9]),
                torch.tensor([0.1, 0.5, 0.8]),
                beta=0.5,
                advantage_max=5.0,
                adaptive_weight=adaptive,
                place_weight=weight,
            )
            loss.loss_R.sum().backward()
            found.append((loss.loss_R.detach(), v_new.grad))
    for (plain, gradient), (weighted, own) in zip(found[:2], found[2:], strict=True):
        assert torch.equal(plain, weighted) and gradient is not None and own is not None
        assert torch.equal(gradient, own)


def test_a_map_that_is_the_same_everywhere_trains_bit_for_bit_as_without_weights():
    (plain, expected), (even, metrics) = trained(None), trained(torch.full_like(MAPS, 0.25), region_weight=1.5)
    assert all(torch.equal(value, even.parameters[name]) for name, value in plain.parameters.items())
    assert metrics[0]["policy/loss"] == expected[0]["policy/loss"]
    assert metrics[0]["nft/video/region_weight_max"] == 1


def test_the_video_is_weighed_and_the_sound_and_the_penalty_are_not():
    options: dict[str, Any] = {"kl_coef": 0.3, "keep_reference": True}
    (_, [plain]), (_, [weighed]) = trained(None, **options), trained(region_weight=1.5, **options)
    assert weighed["nft/video/loss"] != plain["nft/video/loss"]
    assert weighed["nft/audio/loss"] == plain["nft/audio/loss"]
    assert weighed["policy/reference_kl"] == plain["policy/reference_kl"]
    # Of places with mean 1, the largest of any map.
    largest = (region_weights(MAPS, 1.5) / region_weights(MAPS, 1.5).mean(dim=(1, 2, 3), keepdim=True)).max()
    assert weighed["nft/video/region_weight_max"] == pytest.approx(float(largest))
    assert "nft/audio/region_weight_max" not in weighed


def test_rows_in_several_forwards_have_the_weights_of_their_samples():
    (whole, _), (cut, _) = (trained(region_weight=3.0, rows_per_forward=rows) for rows in (None, 5))
    for name, gradient in whole.backend.gradients[0].items():
        torch.testing.assert_close(gradient, cut.backend.gradients[0][name], rtol=1e-5, atol=1e-6)


def test_the_weight_grows_over_the_first_rollouts():
    _, warm = trained(num_rollouts=4, region_weight=2.0, region_warmup=2)
    _, full = trained(num_rollouts=1, region_weight=2.0)
    largest = [metrics["nft/video/region_weight_max"] for metrics in warm]
    assert largest[0] == 1 and 1 < largest[1] < largest[2]
    assert largest[2] == largest[3] == full[0]["nft/video/region_weight_max"]


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_samples_without_maps_are_refused():
    with pytest.raises(
        ContractError, match=r"region_weight = 1.5 needs maps of attention of \['audio', 'video'\], the s"
    ):
        trained(None, region_weight=1.5)


def test_a_warmup_of_nothing_and_a_weight_below_one_are_refused():
    with pytest.raises(ConfigError, match=r"algorithm.region_warmup = 4 does nothing with algorithm.region_weight = 1"):
        trained(region_warmup=4)
    with pytest.raises(ConfigError, match=r"region_weight = 0.5"):
        trained(region_weight=0.5)
