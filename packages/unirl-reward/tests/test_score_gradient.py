"""Every differentiable scorer: value, gradient against finite differences, batching, and what must not train."""

import pytest
import torch
from torch import Tensor

from unirl.reward.base import LocalScorer
from unirl.reward.function import FunctionRewardScorer
from unirl.reward.service import RewardService
from unirl.types.errors import ConfigError, ContractError, RewardError
from unirl.types.media import Images, Texts
from unirl.types.reward import RewardRequest, request_for_track
from unirl.types.rollout import RolloutReq

from .model_folders import SHAPES_PROMPTS, differentiable_scorer

KINDS = ["clip", "pickscore", "hpsv2", "image_reward", "shapes_gradient"]
BYTE_NOISE = {"clip": 0.008, "pickscore": 0.008, "hpsv2": 0.002, "image_reward": 0.15, "shapes_gradient": 0.0}
"""What rounding pixels to bytes and resizing in bytes does to a score of these random models, twice over. They magnify
it; the input itself is compared in test_preprocess."""


@pytest.fixture(params=KINDS)
def scorer(request, clip_folder, tmp_path):
    return differentiable_scorer(request.param, clip_folder, tmp_path)


def request_of(pixels: Tensor, prompts: list[str] | None = None) -> RewardRequest:
    count = len(pixels)
    return RewardRequest(
        sample_ids=[f"s{i}" for i in range(count)],
        group_ids=["g"] * count,
        primitives={"text": Texts(texts=prompts or SHAPES_PROMPTS[:count])},
        generated={"image": Images(pixels=pixels)},
    )


def random_pixels(count: int = 4, height: int = 32, width: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    """Smooth random images inside (0.1, 0.9): white noise would average out when resized."""
    generator = torch.Generator().manual_seed(3)
    coarse = torch.rand(count, 3, 6, 6, generator=generator, dtype=torch.float64)
    fine = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    return (0.1 + 0.8 * fine).to(dtype)


def test_the_value_is_that_of_score(scorer):
    request = request_of(random_pixels())
    found = scorer.score_with_gradient(request)
    assert found.dtype == torch.float32 and found.shape == (4,)
    expected = scorer.score(request).rewards
    assert expected.std() > 4 * BYTE_NOISE[scorer.name]
    torch.testing.assert_close(
        found, expected, rtol=0, atol=BYTE_NOISE[scorer.name] + 1e-6 * expected.abs().max().item()
    )


def test_bytes_of_the_models_own_size_give_the_value_of_score_to_rounding(scorer):
    """Without rounding and resizing nothing is left to differ but float32 sums."""
    side = 32 if scorer.name == "shapes_gradient" else 16
    pixels = (random_pixels(height=side, width=side) * 255).round() / 255
    request = request_of(pixels)
    expected = scorer.score(request).rewards
    torch.testing.assert_close(scorer.score_with_gradient(request), expected, rtol=2e-5, atol=2e-5)


def test_the_gradient_is_that_of_finite_differences(scorer):
    for module in scorer.modules():
        module.double()
    pixels = random_pixels(2, dtype=torch.float64).requires_grad_()

    def value(pixels: Tensor) -> Tensor:
        return scorer.score_batch_with_gradient(request_of(pixels)).sum()

    (gradient,) = torch.autograd.grad(value(pixels), pixels)
    assert gradient.flatten(1).norm(dim=1).min() > 1e-6
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        direction = torch.randn(pixels.shape, generator=generator, dtype=torch.float64)
        step = 1e-5
        with torch.no_grad():
            measured = (value(pixels + step * direction) - value(pixels - step * direction)) / (2 * step)
        expected = (gradient * direction).sum()
        torch.testing.assert_close(measured, expected, rtol=1e-5, atol=1e-8)


def test_a_batch_is_its_samples_one_by_one(scorer):
    pixels = random_pixels(3).requires_grad_()
    together = scorer.score_with_gradient(request_of(pixels))
    (gradient,) = torch.autograd.grad(together.sum(), pixels)
    for row in range(3):
        one = pixels.detach()[row : row + 1].requires_grad_()
        alone = scorer.score_with_gradient(request_of(one, [SHAPES_PROMPTS[row]]))
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-5)
        (expected,) = torch.autograd.grad(alone.sum(), one)
        torch.testing.assert_close(gradient[row], expected[0], rtol=1e-3, atol=1e-5)


def test_a_reward_moves_with_its_own_picture_alone(scorer):
    pixels = random_pixels(3).requires_grad_()
    (gradient,) = torch.autograd.grad(scorer.score_with_gradient(request_of(pixels))[1], pixels)
    assert gradient[1].abs().sum() > 0 and gradient[[0, 2]].abs().sum() == 0


def test_parameters_get_no_gradient(scorer):
    scorer.score_with_gradient(request_of(random_pixels().requires_grad_())).sum().backward()
    parameters = [each for module in scorer.modules() for each in module.parameters()]
    assert all(not each.requires_grad and each.grad is None for each in parameters)
    assert all(not module.training for module in scorer.modules())


def test_pictures_that_are_not_square_have_gradients_too(scorer):
    if scorer.name == "shapes_gradient":
        with pytest.raises(ContractError, match="square with an even side, got 20 x 31"):
            scorer.score_with_gradient(request_of(random_pixels(1, 20, 31)))
        return
    pixels = random_pixels(2, 20, 31).requires_grad_()
    request = request_of(pixels)
    found = scorer.score_with_gradient(request)
    expected = scorer.score(request_of(pixels.detach())).rewards
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=BYTE_NOISE[scorer.name])
    (gradient,) = torch.autograd.grad(found.sum(), pixels)
    assert gradient.abs().sum() > 0


def test_pixels_outside_their_range_are_refused(scorer):
    with pytest.raises(ContractError, match=r"pixels must lie in \[0, 1\], got -1"):
        scorer.score_with_gradient(request_of(random_pixels() * 2 - 1.5))


class Brightness(LocalScorer):
    """Two components; NaN for a white image."""

    is_differentiable = True

    def __init__(self) -> None:
        super().__init__(name="bright", batch_size=2, component_weights={"red": 2.0, "blue": -1.0})

    def score_batch(self, request):
        return self.score_batch_with_gradient(request)

    def score_batch_with_gradient(self, request):
        red, _, blue = request.pixels.mean((2, 3)).unbind(1)
        return {"red": torch.where(red == 1, torch.nan, red), "blue": blue}


def test_component_weights_apply():
    pixels = random_pixels().requires_grad_()
    found = Brightness().score_with_gradient(request_of(pixels))
    (gradient,) = torch.autograd.grad(found.sum(), pixels)
    torch.testing.assert_close(gradient[0, :, 0, 0] * 32 * 32, torch.tensor([2.0, 0.0, -1.0]))


def test_the_service_weighs_scorers_and_leaves_out_those_of_weight_zero():
    def broken(images, prompts, metadata):
        raise AssertionError("a scorer of weight 0 is not needed for a gradient")

    scorers = {"a": Brightness(), "b": Brightness(), "judge": FunctionRewardScorer(broken, name="judge")}
    for aggregation, divisor in (("weighted_sum", 1.0), ("weighted_mean", 4.0)):
        service = RewardService(scorers, weights={"a": 1.0, "b": 3.0, "judge": 0.0}, aggregation=aggregation)
        pixels = random_pixels().requires_grad_()
        found = service.score_with_gradient(request_of(pixels))
        torch.testing.assert_close(found, 4.0 / divisor * Brightness().score(request_of(pixels.detach())).rewards)
        (gradient,) = torch.autograd.grad(found[0], pixels)
        torch.testing.assert_close(gradient[0, 0, 0, 0] * 32 * 32, torch.tensor(2.0 * 4.0 / divisor))


def test_scorers_without_a_gradient_are_named():
    judge = FunctionRewardScorer(lambda images, prompts, metadata: images.mean((1, 2, 3)), name="judge")
    with pytest.raises(ConfigError, match=r"scorers judge \(FunctionRewardScorer\) are not differentiable.*weight 0"):
        RewardService([Brightness(), judge]).score_with_gradient(request_of(random_pixels()))
    with pytest.raises(ConfigError, match=r"scorer judge \(FunctionRewardScorer\) is not differentiable"):
        judge.score_with_gradient(request_of(random_pixels()))


def test_what_is_not_finite_is_an_error_that_names_the_sample():
    white = random_pixels()
    white[2] = 1.0
    with pytest.raises(RewardError, match="scorer bright has no finite reward for 1 sample .s2: its value is nan"):
        Brightness().score_with_gradient(request_of(white))
    white[3, 0, 0, 0] = torch.inf
    with pytest.raises(RewardError, match="s3: its generated media holds non-finite numbers"):
        Brightness().score_with_gradient(request_of(white))


def test_an_offloaded_scorer_has_no_gradient(clip_folder, tmp_path):
    scorer = differentiable_scorer("clip", clip_folder, tmp_path)
    scorer.offload()
    with pytest.raises(RewardError, match="scorer clip is offloaded"):
        scorer.score_with_gradient(request_of(random_pixels()))


def test_a_request_made_of_a_track_asks_what_the_rollout_was_asked(make_request):
    asked = make_request()
    req = RolloutReq(
        sample_ids=asked.sample_ids,
        group_ids=asked.group_ids,
        primitives=asked.primitives,
        metadata=asked.metadata,
    )
    track = req.make_root_track(conditions={}, segment=None, decoded=None)
    assert request_for_track(track, asked.generated["image"]).equals(asked)
    with pytest.raises(ContractError, match="does not say what was asked for"):
        request_for_track(track.metadata_only(), asked.generated["image"])
    with pytest.raises(ContractError, match="decoded object cannot be scored"):
        request_for_track(track, object())  # ty: ignore[invalid-argument-type]
