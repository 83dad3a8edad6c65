"""The differentiable shapes scorer on the world's own drawings: right ones, near misses, and the strict verifier."""

from __future__ import annotations

import numpy as np
import torch

from unirl.reward.worlds.shapes import score_shapes
from unirl.reward.worlds.shapes_gradient import log_probability
from unirl.reward.worlds.shapes_grammar import CATEGORIES, parse_prompt
from unirl.worlds.shapes import world


def scored(layouts: list[world.Layout], prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and the strict verdict of drawn layouts."""
    rng = np.random.default_rng(3)
    pixels = torch.from_numpy(np.stack([world.render(layout, rng) for layout in layouts])).float() / 255
    logp = torch.cat(
        [
            log_probability(part, [parse_prompt(prompt) for prompt in prompts[start : start + 64]])
            for start, part in zip(range(0, len(prompts), 64), pixels.split(64), strict=True)
        ]
    )
    return logp, score_shapes(pixels, prompts)[0] > 0.5


def area_under_curve(right: torch.Tensor, wrong: torch.Tensor) -> float:
    """Probability that a right one scores above a wrong one."""
    return (right[:, None] > wrong[None, :]).float().mean().item()


def test_it_tells_drawings_from_near_misses_and_agrees_with_the_strict_verifier() -> None:
    rng = np.random.default_rng(2)
    prompts = world.all_prompts()[::2]
    specs = [parse_prompt(prompt) for prompt in prompts]
    right, right_strict = scored([world.sample_layout(spec, rng, near_miss_fraction=0.0) for spec in specs], prompts)
    wrong, wrong_strict = scored([world.near_miss(spec, rng) for spec in specs], prompts)
    assert area_under_curve(right, wrong) >= 0.999
    agrees = torch.cat([(right > np.log(0.5)) == right_strict, (wrong > np.log(0.5)) == wrong_strict]).float()
    assert agrees.mean() >= 0.99
    for category in CATEGORIES:
        rows = torch.tensor([spec.category == category for spec in specs])
        assert area_under_curve(right[rows], wrong[rows]) >= 0.99
        assert agrees[rows.repeat(2)].mean() >= 0.95


def test_its_layouts_are_those_of_the_world() -> None:
    """Drawings of every layout that satisfies a prompt are probable, of every other small layout improbable."""
    rng = np.random.default_rng(4)
    for prompt in ("a red circle left of a blue square", "two green triangles", "a yellow square and a red square"):
        spec = parse_prompt(prompt)
        fitting = world.layouts_for(spec)
        others = [layout for layout in world.all_layouts() if layout not in fitting]
        others = [others[index] for index in rng.choice(len(others), 60, replace=False)]
        logp, _ = scored(fitting + others, [prompt] * (len(fitting) + len(others)))
        assert logp[: len(fitting)].min() > logp[len(fitting) :].max()
        assert logp[: len(fitting)].exp().median() > 0.8 and logp[len(fitting) :].exp().median() < 0.01
