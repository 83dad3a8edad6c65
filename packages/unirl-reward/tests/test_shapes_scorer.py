"""The verifier of shapes as a scorer: judged by the prompt, or by what a row says that it means."""

import pytest
import torch

from unirl.reward.worlds.shapes_scorer import ShapesRewardScorer
from unirl.types.errors import ConfigError


@pytest.fixture
def red_square():
    """A black image with a red square in a corner."""
    picture = torch.zeros(3, 32, 32)
    picture[0, 3:13, 3:13] = 0.95
    picture[1:, 3:13, 3:13] = 0.15
    return picture


def test_an_image_is_judged_by_what_its_prompt_means(make_request, red_square):
    request = make_request(2, prompts=["a crimson box", "a navy ball"], pixels=red_square.expand(2, 3, 32, 32))
    request.metadata = [{"meaning": "a red square"}, {"meaning": "a blue circle"}]
    found = ShapesRewardScorer(meaning="meaning").score_batch(request)
    plain = make_request(2, prompts=["a red square", "a blue circle"], pixels=request.pixels)
    expected = ShapesRewardScorer().score_batch(plain)
    assert found["strict"].tolist() == expected["strict"].tolist() == [1, 0]
    assert torch.equal(found["soft"], expected["soft"])


def test_a_row_without_a_meaning_is_named(make_request, red_square):
    request = make_request(2, prompts=["a crimson box", "a navy ball"], pixels=red_square.expand(2, 3, 32, 32))
    with pytest.raises(
        ConfigError, match="scorer shapes reads metadata.meaning, and the row of 'a crimson box' has No"
    ):
        ShapesRewardScorer(meaning="meaning").score_batch(request)
