"""Scores that come with the data, and the scorer for what does not."""

import pytest
import torch
from torch import nn

from unirl.reward.base import LocalScorer
from unirl.reward.local.images.labels import LabelScorer
from unirl.types.errors import ConfigError
from unirl.types.media import Images, Texts
from unirl.types.reward import RewardRequest

ROW = {"images": ["a.png", "b.png"], "scores": [1, -2.5]}


class Brightness(LocalScorer):
    """The mean pixel."""

    def __init__(self):
        super().__init__(name="brightness", batch_size=1)
        self.module = nn.Linear(1, 1)

    def score_batch(self, request):
        assert not self.is_offloaded
        return request.pixels.mean(dim=(1, 2, 3))

    def modules(self):
        return [self.module]


def request(*rows):
    ids = [f"g{i // 2}:sample:{i % 2}" for i in range(len(rows))]
    pixels = torch.arange(len(rows)).view(-1, 1, 1, 1).expand(-1, 3, 2, 2) / 10
    return RewardRequest(
        sample_ids=ids,
        group_ids=[name.split(":")[0] for name in ids],
        primitives={"text": Texts(texts=["cat"] * len(rows))},
        generated={"image": Images(pixels=pixels.contiguous())},
        metadata=list(rows),
    )


def test_a_sample_gets_the_score_of_its_place():
    scored = LabelScorer(batch_size=3).score(request(ROW, ROW, {**ROW, "scores": [0, 7]}, {**ROW, "scores": [0, 7]}))
    assert scored.rewards.tolist() == [1.0, -2.5, 0.0, 7.0]


def test_what_has_no_score_is_scored_otherwise():
    scored = LabelScorer(otherwise=Brightness()).score(request(ROW, ROW, {}, None))
    torch.testing.assert_close(scored.rewards, torch.tensor([1.0, -2.5, 0.2, 0.3]))


def test_what_has_no_score_and_no_other_scorer_is_an_error():
    with pytest.raises(ConfigError, match=r"the row of sample g0:sample:1 has no scores. Give the scorer `otherwise`"):
        LabelScorer().score(request(ROW, {}))


def test_the_other_scorer_moves_along():
    inner = Brightness()
    scorer = LabelScorer(otherwise=inner)
    assert scorer.modules() == [inner.module] and LabelScorer().modules() == []
    scorer.offload()
    assert inner.is_offloaded and scorer.is_offloaded
    scorer.onload()
    scorer.move_to("cpu")
    torch.testing.assert_close(scorer.score(request({}, {})).rewards, torch.tensor([0.0, 0.1]))
