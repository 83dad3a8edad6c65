from pathlib import Path

import torch
from my_algorithm import MyAlgorithm

from unirl.app.main import main

HERE = Path(__file__).parent


class Rows:
    """What `surrogate` reads of a mini-batch, at unchanged weights."""

    def __init__(self) -> None:
        self.advantage_R = torch.tensor([1.0, -2.0])
        self.log_ratio_R = torch.zeros(2, requires_grad=True)


def test_at_ratio_one_the_gradient_is_minus_the_advantage():
    rows = Rows()
    loss_R, _ = MyAlgorithm(pipeline=None, policies=None).surrogate(rows)
    loss_R.sum().backward()
    torch.testing.assert_close(rows.log_ratio_R.grad, -rows.advantage_R)


def test_the_recipe_has_no_mistakes(monkeypatch):
    monkeypatch.chdir(HERE)
    assert main(["check", "my_algorithm.yaml"]) == 0
