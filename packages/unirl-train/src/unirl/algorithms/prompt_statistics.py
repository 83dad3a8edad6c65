"""Advantages by what each prompt has earned over the last rollouts: the normaliser of DDPO.

Legend: B samples.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from unirl.algorithms.advantages import finite_rewards, group_index
from unirl.types.bounds import NonNegative, PositiveInt, bounded
from unirl.types.errors import ConfigError

_OCCURRENCE = re.compile(r"^(?:refill\d+:)*(.*?)(?:#\d+)?$", re.DOTALL)


def prompt_of(group_id: str) -> str:
    """The prompt of a group id, without the marks of a refill and of a repeated prompt (see trainer/request.py)."""
    found = _OCCURRENCE.match(group_id)
    return found.group(1) if found else group_id


@bounded("advantages")
class PromptStatistics:
    """(reward - mean) / (std + eps) over the last rewards of the same prompt, with a memory over rollouts.

    buffer_size: rewards of a prompt that are remembered, this rollout's included; the oldest go first.
    min_count: a prompt with fewer than this uses mean and std of the whole batch instead.
    eps: added to the standard deviation, which is the population's.
    A prompt whose remembered rewards are all equal gets exactly 0. The memory is part of a checkpoint.
    Source: Black et al. 2023 (arXiv 2305.13301), per-prompt reward normalisation.
    """

    needs_groups: ClassVar[bool] = False
    makes_weights: ClassVar[bool] = False
    centres_groups: ClassVar[bool] = False

    def __init__(self, *, buffer_size: PositiveInt = 32, min_count: PositiveInt = 16, eps: NonNegative = 1e-6) -> None:
        if min_count > buffer_size:
            raise ConfigError(
                f"advantages.min_count = {min_count} must lie in 1 .. advantages.buffer_size = {buffer_size}"
            )
        self.buffer_size = buffer_size
        self.min_count = min_count
        self.eps = eps
        self._rewards: dict[str, deque[float]] = {}
        self._known_fraction = 0.0

    def __call__(
        self,
        rewards_B: Tensor,
        group_ids: Sequence[str],
        component_rewards: Mapping[str, Tensor] | None = None,
        *,
        progress: float = 0.0,
        num_tokens_B: Tensor | None = None,
    ) -> Tensor:
        """Advantages float32 [B] of one whole batch, computed in float64; remembers its rewards.

        the other arguments have no influence.
        """
        rewards = finite_rewards(rewards_B, len(group_ids))
        prompts = [prompt_of(group) for group in group_ids]
        index = group_index(prompts)
        advantages = torch.empty_like(rewards)
        num_known = 0
        for number, prompt in enumerate(dict.fromkeys(prompts)):
            own = index == number
            memory = self._rewards.setdefault(prompt, deque(maxlen=self.buffer_size))
            memory.extend(rewards[own].tolist())
            has_history = len(memory) >= self.min_count
            num_known += int(own.sum()) if has_history else 0
            known = torch.tensor(list(memory), dtype=torch.float64) if has_history else rewards
            std = known.std(correction=0)
            centred = rewards[own] - known.mean()
            advantages[own] = centred / (std + self.eps) if known.max() > known.min() else torch.zeros_like(centred)
        self._known_fraction = num_known / len(prompts)
        return advantages.to(torch.float32)

    @property
    def counts_tokens(self) -> bool:
        """False: samples count alike."""
        return False

    def metrics(self, progress: float) -> dict[str, float]:
        """Fraction of the last rollout's samples that were normalised by their own prompt's rewards."""
        return {"advantage/known_prompt_fraction": self._known_fraction}

    def state_dict(self) -> dict[str, Any]:
        """The remembered rewards by prompt, oldest first."""
        return {prompt: list(memory) for prompt, memory in self._rewards.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self._rewards = {prompt: deque(memory, maxlen=self.buffer_size) for prompt, memory in state.items()}
