"""The smooth verifier on images drawn here; calibration on the world's own drawings is with the trainer."""

import math

import pytest
import torch

from unirl.reward.worlds.shapes import score_shapes
from unirl.reward.worlds.shapes_gradient import NEGLIGIBLE, ShapesGradientScorer, log_probability
from unirl.reward.worlds.shapes_grammar import PALETTE, parse_prompt
from unirl.types.errors import ConfigError

CENTERS = ((8, 8), (8, 24), (24, 8), (24, 24))


def drawn(objects: dict[int, tuple[str, str]], side: int = 32, shift: float = 0.0) -> torch.Tensor:
    """Quadrant -> (colour, shape), drawn at four times the size and averaged; float32 [3, side, side]."""
    fine = torch.arange(side * 4).add(0.5) / 4 * 32 / side
    picture = torch.zeros(3, side * 4, side * 4)
    for place, (color, shape) in objects.items():
        y, x = (fine - CENTERS[place][0] - shift)[:, None] / 5.5, (fine - CENTERS[place][1] + shift)[None, :] / 5.5
        inside = {
            "circle": y**2 + x**2 <= 1,
            "square": (y.abs() <= 0.92) & (x.abs() <= 0.92),
            "triangle": (y.abs() <= 1) & (2 * x.abs() <= y + 1),
        }[shape]
        picture += inside * torch.tensor(PALETTE[color])[:, None, None]
    return torch.nn.functional.avg_pool2d(picture, 4)


RED, BLUE, GREEN = ("red", "circle"), ("blue", "square"), ("green", "triangle")
CASES = [
    ("a red circle", {2: RED}, True),
    ("a red circle", {2: ("red", "square")}, False),
    ("a red circle", {2: ("yellow", "circle")}, False),
    ("a red circle", {}, False),
    ("a red circle", {2: RED, 0: RED}, False),
    ("a red circle and a blue square", {0: RED, 3: BLUE}, True),
    ("a red circle and a blue square", {0: BLUE, 3: RED}, True),
    ("a red circle and a blue square", {0: ("blue", "circle"), 3: ("red", "square")}, False),
    ("three green triangles", {0: GREEN, 1: GREEN, 3: GREEN}, True),
    ("three green triangles", {0: GREEN, 1: GREEN}, False),
    ("three green triangles", {0: GREEN, 1: GREEN, 2: GREEN, 3: GREEN}, False),
    ("a red circle left of a blue square", {0: RED, 1: BLUE}, True),
    ("a red circle left of a blue square", {0: RED, 3: BLUE}, True),
    ("a red circle left of a blue square", {0: BLUE, 1: RED}, False),
    ("a red circle left of a blue square", {0: RED, 2: BLUE}, False),
    ("a red circle right of a blue square", {0: BLUE, 1: RED}, True),
    ("a red circle above a blue square", {0: RED, 2: BLUE}, True),
    ("a red circle above a blue square", {2: RED, 0: BLUE}, False),
    ("a red circle below a blue square", {2: RED, 0: BLUE}, True),
]


@pytest.mark.parametrize("shift", [0.0, 1.3])
def test_it_decides_as_the_strict_verifier(shift):
    pixels = torch.stack([drawn(objects, shift=shift) for _, objects, _ in CASES])
    prompts = [prompt for prompt, _, _ in CASES]
    wanted = torch.tensor([is_right for _, _, is_right in CASES])
    assert torch.equal(score_shapes(pixels, prompts)[0] > 0.5, wanted)
    found = log_probability(pixels, [parse_prompt(prompt) for prompt in prompts]).exp()
    assert found[wanted].min() > 0.8
    assert found[~wanted].max() < 0.1


@pytest.mark.parametrize(("prompt", "objects", "is_right"), CASES[5:8])
def test_a_larger_picture_means_the_same(prompt, objects, is_right):
    spec = parse_prompt(prompt)
    large, small = (log_probability(drawn(objects, side=side)[None], [spec]).exp() for side in (64, 32))
    torch.testing.assert_close(large, small, rtol=0, atol=0.05)
    assert bool(large > 0.5) == is_right


def test_clutter_makes_a_right_picture_improbable():
    picture = drawn({2: RED})
    cluttered = picture.clone()
    cluttered[:, 3:9, 20:26] = 0.8
    specs = [parse_prompt("a red circle")]
    assert log_probability(picture[None], specs).exp() > 0.8
    assert log_probability(cluttered[None], specs).exp() < 0.01


def test_probabilities_of_prompts_that_exclude_each_other_add_up_to_one():
    """Every layout of at most one object satisfies exactly one of these, or none where something else is there."""
    prompts = [f"a {color} {shape}" for color in PALETTE for shape in ("circle", "square", "triangle")]
    picture = drawn({1: ("yellow", "circle")}).expand(len(prompts), -1, -1, -1)
    total = log_probability(picture, [parse_prompt(prompt) for prompt in prompts]).exp().sum()
    assert 0.9 < total <= 1 + 1e-6


def test_the_logarithm_has_a_gradient_where_the_probability_has_none():
    pixels = torch.zeros(1, 3, 32, 32, requires_grad=True)
    specs = [parse_prompt("a red circle")]
    logp = log_probability(pixels, specs)
    (of_log,) = torch.autograd.grad(logp.sum(), pixels, retain_graph=True)
    (of_probability,) = torch.autograd.grad(logp.exp().sum(), pixels)
    assert of_log[:, 0].abs().max() > 0.1 and of_probability.abs().max() < 1e-12


def test_a_hopeless_picture_has_no_gradient_rather_than_a_denormal_one(make_request):
    """Denormal numbers take a CPU many times as long, in the whole backward pass after them."""
    pixels = torch.zeros(2, 3, 32, 32)
    pixels[1] = drawn({2: RED})
    pixels.requires_grad_()
    request = make_request(num_samples=2, prompts=["a red circle", "a red circle"], pixels=pixels)
    (gradient,) = torch.autograd.grad(ShapesGradientScorer().score_with_gradient(request).sum(), pixels)
    assert torch.equal(gradient[0], torch.zeros(3, 32, 32))
    assert gradient[1].abs().max() > 1e-4
    smallest_normal = torch.finfo(torch.float32).tiny
    assert not ((gradient != 0) & (gradient.abs() < smallest_normal)).any()


def test_following_the_gradient_from_nothing_draws_what_was_asked_for():
    prompts = ["a red circle left of a blue square", "three green triangles", "a yellow triangle", "four blue circles"]
    specs = [parse_prompt(prompt) for prompt in prompts]
    # A little noise: from exact black every quadrant would be drawn alike.
    pixels = 0.02 * torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    pixels.requires_grad_()
    for _ in range(60):
        (gradient,) = torch.autograd.grad(log_probability(pixels, specs).sum(), pixels)
        with torch.no_grad():
            pixels.add_(0.1 * gradient).clamp_(0, 1)
    assert torch.equal(score_shapes(pixels, prompts)[0], torch.ones(4))


def test_both_outputs_are_one_score(make_request):
    pixels = torch.stack([drawn(objects) for _, objects, _ in CASES])
    request = make_request(num_samples=len(CASES), prompts=[prompt for prompt, _, _ in CASES], pixels=pixels)
    logarithm = ShapesGradientScorer(output="log_probability").score(request).rewards
    probability = ShapesGradientScorer().score(request).rewards
    assert logarithm.max() <= 0 and logarithm.min() < -NEGLIGIBLE
    torch.testing.assert_close(probability, logarithm.exp(), rtol=1e-5, atol=math.exp(-NEGLIGIBLE))
    with pytest.raises(ConfigError, match="output = 'logit' must be one of"):
        ShapesGradientScorer(output="logit")  # ty: ignore[invalid-argument-type]
