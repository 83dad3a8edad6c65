from pathlib import Path

import torch
from my_reward import my_reward

from unirl.app.main import main

HERE = Path(__file__).parent


# This test is of the reward as it was written for you: change it with the function.
def test_the_image_nearer_to_the_target_has_the_higher_reward():
    images = torch.stack([torch.full((3, 8, 8), value) for value in (0.1, 0.5, 0.8)])
    rewards = my_reward(images, ["a", "b", "c"], [{}, {}, {}])
    assert rewards.shape == (3,)
    assert rewards[0] < rewards[1] < rewards[2] <= 0


def test_the_recipe_has_no_mistakes(monkeypatch):
    monkeypatch.chdir(HERE)
    assert main(["check", "my_reward.yaml"]) == 0
