"""Demonstrations played again: what was seen, where they end, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from walk_fakes import LENGTH, Steady

from unirl.rollout.engine.offline.episodes import OfflineEpisodesEngine
from unirl.rollout.environments.gymnasium import GymnasiumEnvironment
from unirl.types.actions import ActionSegment, DrawnChunks
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ActionSamplingParams
from unirl.types.segments import SegmentStatus


class Copying(Steady):
    """Tokens are hundredths of the moves that it is shown."""

    def given(self, moves: Tensor, params: ActionSamplingParams) -> DrawnChunks:
        return DrawnChunks(moves=moves, tokens=(moves * 100).round().long())

    def imitation_loss(self, segment: ActionSegment, decision_N: Tensor, **_: Any) -> Tensor:
        raise NotImplementedError


def engine(env_id: str = "fakes/Walk-v0") -> OfflineEpisodesEngine:
    return OfflineEpisodesEngine(Copying(), environment=GymnasiumEnvironment(env_id), forward_batch_size=4)


def request(*rows: dict[str, Any], rollout_id: int = 0) -> RolloutReq:
    return RolloutReq(
        sample_ids=[f"s{row}" for row in range(len(rows))],
        group_ids=[f"g{row}" for row in range(len(rows))],
        primitives={"text": Texts(texts=["go"] * len(rows))},
        metadata=list(rows),
        sampling_params=ActionSamplingParams(),
        rollout_id=rollout_id,
    )


def played(made: OfflineEpisodesEngine, asked: RolloutReq) -> Any:  # Any: a test knows which optional parts there are
    track = made.generate(asked).track("action")
    made.shutdown()
    return track


@pytest.mark.parametrize("env_id", ["fakes/Walk-v0", "fakes/WalkBatched-v0"])
def test_moves_are_played_from_their_seeds_until_they_or_the_environment_end(env_id):
    """The first episode ends by its environment, in the middle of a chunk; the second one's moves end before that."""
    rows = {"seed": 0, "moves": [[0.5]] * 9}, {"seed": 1, "moves": [[0.25], [-0.5], [1.0]]}
    track = played(engine(env_id), request(*rows))
    segment = track.segment
    assert segment.lengths.tolist() == [3, 2] and segment.log_probs is None
    assert segment.num_moves.tolist() == [2, 2, LENGTH - 4, 2, 1]
    assert segment.status.tolist() == [SegmentStatus.COMPLETED] * 2
    # [-1, 1] is stretched to [-1, 3]: 0.5 is a move by 2.
    assert segment.states.tolist() == [[0, 0, 0], [0, 2, 4], [0, 4, 8], [1, 0, 0], [1, 2, 1.5]]
    assert segment.tokens[3:, :, 0].tolist() == [[25, -50], [100, 0]]
    assert track.metadata[0]["episode"]["success"] == 1


def test_rows_without_moves_are_played_by_the_policy():
    assert played(engine(), request({"seed": 0}, {"seed": 1})).segment.log_probs is not None


@pytest.mark.parametrize(
    ("rows", "rollout_id", "error", "message"),
    [
        ([{"seed": 0, "moves": [[0.5]]}], -1, ConfigError, "the rows of eval.prompts bring moves"),
        ([{"seed": 0, "moves": [[0.5]]}, {"seed": 1}], 0, ContractError, "some rows bring moves; sample s1 has none"),
        ([{"seed": 0, "moves": [[0.5, 0.5]]}], 0, ConfigError, "s0: metadata.moves has the shape"),
        ([{"seed": 0, "moves": [[1.5]]}], 0, ConfigError, "each of 1 numbers in"),
    ],
)
def test_what_cannot_be_played_is_refused(rows, rollout_id, error, message):
    with pytest.raises(error, match=message):
        engine().generate(request(*rows, rollout_id=rollout_id))
