"""Cloning of demonstrations: which decisions count how much, and that noise is named after what it is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from action_fakes import Net, NetPipeline, episodes
from torch import Tensor

from unirl.algorithms.action_fine_tuning import ActionFineTuning
from unirl.algorithms.base import MicroBatch
from unirl.types.actions import ActionSegment, DrawnChunks
from unirl.types.errors import ConfigError
from unirl.types.rollout import RolloutTrack
from unirl.types.sampling import ActionSamplingParams


class Imitating(NetPipeline):
    """The loss of a decision is its number plus 1."""

    def __init__(self) -> None:
        super().__init__(Net())
        self.keys: list[str] = []

    def given(self, moves: Tensor, params: ActionSamplingParams) -> DrawnChunks:
        raise NotImplementedError

    def imitation_loss(
        self, segment: ActionSegment, decision_N: Tensor, *, noise_keys: Sequence[str], seed: int
    ) -> Tensor:
        self.keys += noise_keys
        return decision_N + 1.0


def micro(weights: list[float], update: int = 0) -> MicroBatch:
    segment = episodes((2, 1, 3, 2))
    track: Any = RolloutTrack(sample_ids=["a", "b", "c", "d"], segment=segment, advantages=torch.tensor(weights))
    return MicroBatch(track=track, anchor={}, update=update, progress=0.0)


@pytest.mark.parametrize("size", [None, 3])
def test_the_loss_is_the_mean_over_decisions_weighed_by_episode(size):
    algorithm = ActionFineTuning(Imitating(), policies=None, decisions_per_forward=size)
    found = list(algorithm.losses(micro([1.0, 0.0, 2.0, 1.0])))
    assert sum(float(part.loss) for part in found) == 1 + 2 + 0 * 3 + 2 * (4 + 5 + 6) + 7 + 8
    assert algorithm.num_terms(micro([1.0] * 4).track) == 8


def test_noise_is_named_after_rollout_update_sample_and_decision():
    pipeline = Imitating()
    algorithm = ActionFineTuning(pipeline, policies=None)
    list(algorithm.losses(micro([1.0] * 4)))
    assert pipeline.keys == [
        f"r0:u0:{name}" for name in ("a::0", "a::1", "b::0", "c::0", "c::1", "c::2", "d::0", "d::1")
    ]
    algorithm.after_rollout()
    again = ActionFineTuning(pipeline, policies=None)
    again.load_state_dict(algorithm.state_dict())
    pipeline.keys = []
    list(again.losses(micro([1.0] * 4, update=2)))
    assert pipeline.keys[0] == "r1:u2:a::0"


def test_weights_below_0_are_refused():
    with pytest.raises(ConfigError, match="ActionFineTuning"):
        list(ActionFineTuning(Imitating(), policies=None).losses(micro([1.0, -1.0, 1.0, 1.0])))
