"""Classifier-free guidance row by row: a hand-written `predict` that records its calls."""

from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.models.guidance import Guidance, classifier_free
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.sampling import DiffusionSamplingParams

STEPS = torch.zeros(3, dtype=torch.int64)


def _condition(values: list[float]) -> TextEmbedCondition:
    return TextEmbedCondition(embeds=torch.tensor(values)[:, None, None])


class Recorder:
    """Predicts x * text + sigma and counts the rows of every call."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, x_R: Tensor, sigma_R: Tensor, text: TextEmbedCondition) -> Tensor:
        self.rows.append(x_R.shape[0])
        return x_R * text.embeds[:, 0] + sigma_R[:, None]


def _run(guidance: Guidance, sigmas: list[float]) -> tuple[Tensor, list[int]]:
    predict = Recorder()
    velocity = classifier_free(predict, _condition([1.0, 2.0, 3.0]), _condition([0.5, 0.5, 0.5]), guidance)
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


def test_gradients_flow_through_both_halves() -> None:
    text, negative = _condition([1.0, 2.0]), _condition([0.5, 0.5])
    text.embeds.requires_grad_()
    negative.embeds.requires_grad_()
    velocity = classifier_free(Recorder(), text, negative, Guidance(3.0, interval=(0.25, 0.75)))
    velocity(torch.ones(2, 1), torch.tensor([0.5, 1.0]), STEPS[:2]).sum().backward()
    assert text.embeds.grad is not None and text.embeds.grad.flatten().tolist() == [3.0, 1.0]
    assert negative.embeds.grad is not None and negative.embeds.grad.flatten().tolist() == [-2.0, 0.0]


def test_a_missing_unconditional_condition_is_an_error() -> None:
    with pytest.raises(ContractError, match="2 conditional, None unconditional"):
        classifier_free(Recorder(), _condition([1.0, 2.0]), None, Guidance(2.0))


def test_the_interval_comes_from_sampler_kwargs() -> None:
    def params(interval: Any) -> DiffusionSamplingParams:
        return DiffusionSamplingParams(guidance_scale=4.0, sampler_kwargs={"guidance_interval": interval})

    assert Guidance.from_params(params([0.2, 0.8])) == Guidance(4.0, (0.2, 0.8))
    assert Guidance.from_params(DiffusionSamplingParams(guidance_scale=4.0)) == Guidance(4.0)
    with pytest.raises(ConfigError, match="0 <= low < high <= 1"):
        Guidance.from_params(params([0.8, 0.2]))
    with pytest.raises(ConfigError, match=r"must be two sigmas \[low, high\]"):
        Guidance.from_params(params(0.8))
