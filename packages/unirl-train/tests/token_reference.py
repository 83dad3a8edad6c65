"""Losses on tokens in float64, written down a second time, and their gradients by differences.

Legend: M trained tokens of a response, in the order of its samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from token_fakes import TinyLM
from torch import Tensor

from unirl.types.conditions import PromptCondition
from unirl.types.rollout import RolloutResp
from unirl.types.segments import TextSegment

TEMPERATURE = 0.8
"""What `token_fakes.sampling` samples with."""


@dataclass(frozen=True)
class TrainedTokens:
    """What a response of `token_fakes` says of its trained tokens."""

    prompts: list[Tensor]
    completions: list[Tensor]
    is_trained_N: Tensor
    engine_logp_M: Tensor
    """float64."""
    sample_M: Tensor

    @classmethod
    def of(cls, resp: RolloutResp) -> TrainedTokens:
        """Those of the track `text`."""
        track = resp.tracks["text"]
        segment, prompt = track.segment, track.conditions["prompt"]
        assert isinstance(segment, TextSegment) and isinstance(prompt, PromptCondition)
        assert segment.log_probs is not None
        sample_N = torch.arange(track.batch_size).repeat_interleave(segment.lengths)
        return cls(
            prompt.unpack("tokens"),
            segment.unpack("tokens"),
            segment.trained,
            segment.log_probs.double()[segment.trained],
            sample_N[segment.trained],
        )

    def logp(self, model: TinyLM) -> Tensor:
        """log p [M], sample by sample."""
        found = []
        for start, end in zip(self.prompts, self.completions, strict=True):
            logits = model([torch.cat([start, end])])[0][0][len(start) - 1 : -1]
            found.append((logits / TEMPERATURE).log_softmax(1).gather(1, end[:, None])[:, 0])
        return torch.cat(found)[self.is_trained_N]


def in_float64(model: TinyLM) -> TinyLM:
    """A copy."""
    return copy.deepcopy(model).double()


@torch.no_grad()
def derivative(
    loss: Callable[[TinyLM], Tensor], model: TinyLM, *, step: float = 1e-5
) -> tuple[float, float, dict[str, Tensor]]:
    """Value of a loss of a float64 model, its derivative along a random direction by central differences, and that
    direction."""
    generator = torch.Generator().manual_seed(4)
    direction = {
        name: torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        for name, parameter in model.named_parameters()
    }

    def at(distance: float) -> float:
        moved = copy.deepcopy(model)
        for name, parameter in moved.named_parameters():
            parameter.add_(distance * direction[name])
        return float(loss(moved))

    return at(0.0), (at(step) - at(-step)) / (2 * step), direction


def along(gradients: Mapping[str, Tensor], direction: Mapping[str, Tensor]) -> float:
    """Derivative along `direction` that the gradients of a backend say."""
    return sum(float((gradients[f"transformer.{name}"].double() * part).sum()) for name, part in direction.items())
