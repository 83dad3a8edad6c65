"""Episodes as samples: packing, selection, masks of what was executed, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unirl.types.actions import ActionSegment
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.sampling import ActionSamplingParams
from unirl.types.segments import SegmentStatus
from unirl.types.storage import load_rollout, save_rollout

H, D = 3, 2
LENGTHS = (2, 1, 3)


def tokens(lengths=LENGTHS, **fields) -> ActionSegment:
    count = sum(lengths)
    whole = {
        "states": torch.arange(count * 4.0).view(count, 4),
        "tokens": torch.arange(count * H * D).view(count, H, D),
        "log_probs": torch.arange(count * H * D).view(count, H * D).float(),
        "rewards": torch.arange(float(count)),
        "num_moves": torch.arange(count) % H + 1,
    }
    packed = {name: list(value.split(list(lengths))) for name, value in (whole | fields).items()}
    return ActionSegment.pack(
        **packed,
        status=torch.tensor([SegmentStatus.COMPLETED, SegmentStatus.TRUNCATED, SegmentStatus.FAILED]),
        final_states=torch.zeros(len(lengths), 4),
    )


def chains(num_decisions: int = 2, **fields) -> ActionSegment:
    values = {
        "images": [torch.zeros(num_decisions, 3, 4, 4, dtype=torch.uint8)],
        "chains": [torch.zeros(num_decisions, 5, H, D)],
        "log_probs": [torch.zeros(num_decisions, 2)],
        "rewards": [torch.zeros(num_decisions)],
        "num_moves": [torch.full((num_decisions,), H)],
        "sigmas": torch.linspace(1, 0, 5),
        "sde_indices": [0, 2],
    }
    return ActionSegment.pack(**(values | fields))


def test_an_episode_is_a_sample_and_takes_its_decisions_along():
    segment = tokens()
    assert segment.batch_size == 3 and segment.num_decisions == 6
    assert segment.episode_N.tolist() == [0, 0, 1, 2, 2, 2]
    chosen = segment.select([2, 0])
    assert chosen.rewards.tolist() == [3, 4, 5, 0, 1]
    assert chosen.status is not None
    assert chosen.status.tolist() == [SegmentStatus.FAILED, SegmentStatus.COMPLETED]
    assert ActionSegment.concat([segment.slice(0, 1), segment.slice(1, 3)]).equals(segment)


def test_only_executed_moves_count():
    segment = tokens()
    assert segment.move_mask[:3].tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert segment.term_mask[1].tolist() == [True] * 4 + [False] * 2
    assert chains().term_mask.tolist() == [[True, True]] * 2


def test_terms_are_tokens_or_stochastic_steps():
    assert tokens().num_terms == H * D
    assert chains().num_terms == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"chains": None}, "one of the two"),
        ({"images": None}, "needs what the policy saw"),
        ({"sigmas": torch.linspace(1, 0, 4)}, "the K.1 of sigmas, which has 4"),
        ({"sde_indices": [0, 4]}, "must lie in 0..3"),
        ({"log_probs": [torch.zeros(2, 3)]}, "must have 2 terms per decision"),
        ({"rewards": [torch.zeros(2, dtype=torch.float64)]}, "rewards must be torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(fields, words):
    with pytest.raises(ContractError, match=words):
        chains(**fields)


def test_episodes_survive_a_file(tmp_path: Path):
    segment = chains().replace(params=ActionSamplingParams(eta=0.3))
    resp = RolloutResp(tracks={"action": RolloutTrack(sample_ids=["a"], segment=segment)})
    save_rollout(tmp_path / "x.safetensors", resp)
    assert load_rollout(tmp_path / "x.safetensors")[0].equals(resp)


def test_sampling_says_which_steps_are_stochastic():
    assert ActionSamplingParams(num_inference_steps=3).stochastic_steps == [0, 1, 2]
    assert ActionSamplingParams(sde_indices=[2, 0]).stochastic_steps == [0, 2]
    assert ActionSamplingParams(eta=0).stochastic_steps == []
    with pytest.raises(ConfigError, match=r"sde_indices \[4\] lie outside 0..3"):
        ActionSamplingParams(sde_indices=[4])
