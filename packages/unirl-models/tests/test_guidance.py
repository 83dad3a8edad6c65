"""Classifier-free guidance row by row: a hand-written `predict` that records its calls."""

from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.models.adapter import require_condition, select_rows
from unirl.models.guidance import Guidance, check_distilled_guidance, classifier_free, extrapolate
from unirl.types.conditions import Condition, ImageLatentCondition, TextEmbedCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import DiffusionSamplingParams

STEPS = torch.zeros(3, dtype=torch.int64)


def _condition(values: list[float]) -> TextEmbedCondition:
    return TextEmbedCondition(embeds=torch.tensor(values)[:, None, None])


def _text(values: list[float]) -> dict[str, Condition]:
    return {"text": _condition(values)}


class Recorder:
    """Predicts x * text + sigma and counts the rows of every call."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, x_R: Tensor, sigma_R: Tensor, conditions: Conditions) -> Tensor:
        self.rows.append(x_R.shape[0])
        text = require_condition(conditions, "text", TextEmbedCondition)
        return x_R * text.embeds[:, 0] + sigma_R[:, None]


def _run(guidance: Guidance, sigmas: list[float]) -> tuple[Tensor, list[int]]:
    predict = Recorder()
    velocity = classifier_free(predict, _text([1.0, 2.0, 3.0]), _text([0.5, 0.5, 0.5]), guidance)
    return velocity(torch.ones(3, 1), torch.tensor(sigmas), STEPS)[:, 0], predict.rows


def test_guided_rows_extrapolate_in_one_forward() -> None:
    found, rows = _run(Guidance(3.0), [0.0, 0.0, 0.0])
    assert rows == [6]
    assert found.tolist() == [2.0, 5.0, 8.0]  # 0.5 + 3 (text - 0.5)


def test_scale_one_runs_the_conditional_rows_alone() -> None:
    found, rows = _run(Guidance(1.0), [0.0, 0.0, 0.0])
    assert rows == [3] and found.tolist() == [1.0, 2.0, 3.0]


def test_an_interval_guides_only_its_rows() -> None:
    found, rows = _run(Guidance(3.0, interval=(0.25, 0.75)), [1.0, 0.5, 0.125])
    assert rows == [4]
    assert found.tolist() == [2.0, 5.5, 3.125]


def test_an_interval_without_rows_adds_none() -> None:
    _, rows = _run(Guidance(3.0, interval=(0.25, 0.75)), [1.0, 1.0, 1.0])
    assert rows == [3]


def test_rows_below_a_boundary_have_a_scale_of_their_own() -> None:
    """Alone or mixed, also where an interval leaves some out. At the boundary itself the first scale holds."""
    sigmas = [1.0, 0.5, 0.25]
    for interval, scales in (((0.0, 1.0), [3.0, 3.0, 2.0]), ((0.2, 0.9), [1.0, 3.0, 2.0])):
        found, _ = _run(Guidance(3.0, interval, boundary=0.5, scale_below=2.0), sigmas)
        expected = [_run(Guidance(scale), sigmas)[0][row] for row, scale in enumerate(scales)]
        torch.testing.assert_close(found, torch.stack(expected))


def test_gradients_flow_through_both_halves() -> None:
    text, negative = _condition([1.0, 2.0]), _condition([0.5, 0.5])
    text.embeds.requires_grad_()
    negative.embeds.requires_grad_()
    velocity = classifier_free(Recorder(), {"text": text}, {"text": negative}, Guidance(3.0, interval=(0.25, 0.75)))
    velocity(torch.ones(2, 1), torch.tensor([0.5, 1.0]), STEPS[:2]).sum().backward()
    assert text.embeds.grad is not None and text.embeds.grad.flatten().tolist() == [3.0, 1.0]
    assert negative.embeds.grad is not None and negative.embeds.grad.flatten().tolist() == [-2.0, 0.0]


def test_a_missing_unconditional_condition_is_an_error() -> None:
    for unconditional, message in (
        (None, r"2 conditional rows of \['text'\], unconditional None"),
        ({}, "unconditional None"),
        (_text([0.5]), r"unconditional \{'text': 1\}"),
        ({"negative_text": _condition([0.5, 0.5])}, r"unconditional \{'negative_text': 2\}"),
    ):
        with pytest.raises(ContractError, match=message):
            classifier_free(Recorder(), _text([1.0, 2.0]), unconditional, Guidance(2.0))


def _edit(x_R: Tensor, sigma_R: Tensor, conditions: Conditions) -> Tensor:
    """Velocity x text + reference: what an edit model reads, text and the latents of a reference image."""
    text = require_condition(conditions, "text", TextEmbedCondition)
    reference = require_condition(conditions, "reference", ImageLatentCondition)
    return x_R * text.embeds[:, 0] + reference.latents.flatten(1)


def test_two_conditions_of_two_kinds_are_guided_row_by_row() -> None:
    """Only the text is negated; the reference image of each row serves both of its forwards."""
    reference = ImageLatentCondition(latents=torch.tensor([10.0, 20.0, 30.0])[:, None, None, None])
    conditional = {**_text([1.0, 2.0, 3.0]), "reference": reference}
    guidance = Guidance(3.0, interval=(0.25, 0.75))
    sigma_R = torch.tensor([0.5, 1.0, 0.5])
    velocity = classifier_free(_edit, conditional, _text([0.5, 0.5, 0.5]), guidance)
    mixed = velocity(torch.ones(3, 1), sigma_R, STEPS)[:, 0]
    assert mixed.tolist() == [10.0 + 0.5 + 3 * 0.5, 20.0 + 2.0, 30.0 + 0.5 + 3 * 2.5]
    for row in range(3):
        alone = classifier_free(_edit, select_rows(conditional, [row]), _text([0.5]), guidance)
        assert alone(torch.ones(1, 1), sigma_R[[row]], STEPS[:1])[0].tolist() == [mixed[row].item()]


def test_a_reference_image_may_be_negated_too() -> None:
    reference = ImageLatentCondition(latents=torch.full((3, 1, 1, 1), 10.0))
    blank = ImageLatentCondition(latents=torch.zeros(3, 1, 1, 1))
    conditional = {**_text([1.0, 2.0, 3.0]), "reference": reference}
    unconditional = {**_text([0.5, 0.5, 0.5]), "reference": blank}
    found = classifier_free(_edit, conditional, unconditional, Guidance(3.0))(torch.ones(3, 1), STEPS.float(), STEPS)
    assert found[:, 0].tolist() == [0.5 + 3 * 10.5, 0.5 + 3 * 11.5, 0.5 + 3 * 12.5]


def test_a_family_may_rescale_its_guided_rows_and_no_others() -> None:
    """Qwen-Image gives the guided velocity the norm of the conditional one."""

    def keep_norm(cond_R: Tensor, uncond_R: Tensor, scale: float) -> Tensor:
        guided = extrapolate(cond_R, uncond_R, scale)
        return guided * cond_R.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)

    guidance = Guidance(3.0, interval=(0.25, 0.75))
    velocity = classifier_free(Recorder(), _text([1.0, 2.0]), _text([-4.0, 0.5]), guidance, combine=keep_norm)
    found = velocity(torch.full((2, 1), 2.0), torch.tensor([0.5, 1.0]), STEPS[:2])
    assert found[:, 0].tolist() == [2.5, 5.0]  # |2 * 1 + 0.5|, as large as without guidance; and 2 * 2 + 1


def test_the_interval_comes_from_sampler_kwargs() -> None:
    def params(interval: Any) -> DiffusionSamplingParams:
        return DiffusionSamplingParams(guidance_scale=4.0, sampler_kwargs={"guidance_interval": interval})

    assert Guidance.from_params(params([0.2, 0.8])) == Guidance(4.0, (0.2, 0.8))
    assert Guidance.from_params(DiffusionSamplingParams(guidance_scale=4.0)) == Guidance(4.0)
    with pytest.raises(ConfigError, match="0 <= low < high <= 1"):
        Guidance.from_params(params([0.8, 0.2]))
    with pytest.raises(ConfigError, match=r"must be two sigmas \[low, high\]"):
        Guidance.from_params(params(0.8))


def test_guidance_as_an_input_is_asked_for_where_the_checkpoint_takes_it_and_refused_elsewhere() -> None:
    given, absent = DiffusionSamplingParams(distilled_guidance_scale=3.5), DiffusionSamplingParams()
    check_distilled_guidance(given, "X", takes=True, released=3.5)
    check_distilled_guidance(absent, "X", takes=False, released=3.5)
    with pytest.raises(ConfigError, match=r"Set sampling.distilled_guidance_scale \(released with 3.5"):
        check_distilled_guidance(absent, "X", takes=True, released=3.5)
    with pytest.raises(ConfigError, match=r"distilled_guidance_scale = 3.5 means nothing to this X checkpoint"):
        check_distilled_guidance(given, "X", takes=False, released=3.5)
