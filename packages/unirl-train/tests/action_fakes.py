"""A policy that acts, as small as can be: a linear map from a state to the mean of a Gaussian over tokens' values.

It stands for a head with one term per number of the chunk: `log N(number; mean, 1)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unirl.types.actions import ActionSegment, DrawnChunks, Observations
from unirl.types.sampling import ActionSamplingParams
from unirl.types.segments import SegmentStatus

S, H, D = 3, 2, 1
PARAMS = ActionSamplingParams()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(S, H * D)
        with torch.no_grad():
            self.mean.weight.copy_(torch.tensor([[0.2, -0.1, 0.4], [0.1, 0.3, -0.2]]))
            self.mean.bias.zero_()

    def forward(self, states: Tensor) -> Tensor:
        return self.mean(states)


class NetBundle:
    block_class_names = ("Linear",)
    lora_target_modules = ("mean",)

    def __init__(self) -> None:
        self.net = Net()

    def trainable_modules(self) -> dict[str, nn.Module]:
        return {"policy": self.net}

    def export_lora(self, folder: str, lora_state: Mapping[str, Mapping[str, Tensor]], **_: Any) -> None:
        raise NotImplementedError

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Stats:
    logp_NL: Tensor
    entropy_NL: Tensor | None
    features_NW: Tensor


class NetPipeline:
    """chunk_shape H, D; features are the states themselves."""

    chunk_shape = (H, D)
    image_shape = None
    state_size = S

    def __init__(self, net: Net) -> None:
        self.net = net
        self.num_forwards = 0

    def draw(self, seen: Observations, params: ActionSamplingParams, *, noise_keys: Sequence[str]) -> DrawnChunks:
        raise NotImplementedError

    def log_probs(self, densities: Tensor, num_moves: Tensor) -> Tensor:
        is_executed = (torch.arange(H) < num_moves[:, None]).repeat_interleave(D, dim=1)
        return torch.where(is_executed, densities, 0.0)

    def segment_fields(self, params: ActionSamplingParams) -> dict[str, object]:
        return {}

    def replay(self, segment: ActionSegment, decision_N: Tensor, params: ActionSamplingParams) -> Stats:
        assert segment.states is not None and segment.tokens is not None
        self.num_forwards += 1
        states = segment.states[decision_N]
        mean = self.net(states)
        densities = -0.5 * (segment.tokens[decision_N].flatten(1) / 4 - mean).square()
        logp = self.log_probs(densities, segment.num_moves[decision_N])
        return Stats(logp, torch.ones_like(logp), states + 0 * mean.sum())

    def encode_prompts(self, texts: Sequence[str]) -> None:
        return None

    def features(self, seen: Observations) -> Tensor:
        assert seen.states is not None
        return seen.states

    def evaluating(self) -> Any:
        return nullcontext()


def episodes(
    lengths: Sequence[int] = (2, 1, 3, 2), *, net: Net | None = None, truncated: Sequence[int] = (2,)
) -> Any:  # Any: its optional fields are there
    """Episodes of these numbers of decisions, which a fresh net would have played."""
    count = sum(lengths)
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(count, S, generator=generator)
    tokens = torch.randint(-4, 5, (count, H, D), generator=generator)
    fields = {
        "states": states,
        "tokens": tokens,
        "rewards": torch.rand(count, generator=generator),
        "num_moves": torch.arange(count) % H + 1,
        "log_probs": torch.zeros(count, H * D),
    }
    segment = ActionSegment.pack(
        **{name: list(value.split(list(lengths))) for name, value in fields.items()},
        final_states=torch.randn(len(lengths), S, generator=generator),
        status=torch.tensor(
            [SegmentStatus.TRUNCATED if row in truncated else SegmentStatus.COMPLETED for row in range(len(lengths))]
        ),
        params=PARAMS,
    )
    pipeline = NetPipeline(Net())
    with torch.no_grad():
        replayed = pipeline.replay(segment, torch.arange(count), PARAMS).logp_NL
    return segment.replace(log_probs=replayed)
