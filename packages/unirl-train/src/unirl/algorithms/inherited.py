"""Advantages of a track that are those of the samples that it grew from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from unirl.types.errors import ConfigError
from unirl.types.rollout import RolloutTrack


@dataclass(frozen=True)
class InheritedAdvantages:
    """Every sample has the advantage of its parent: an image that of the thought that it was drawn from.

    So one number trains the tokens of a thought and the steps of its images, as in UniGRPO (arXiv 2603.23500). The
    parent's reward is its children's (`reward.credit`).
    """

    recipe_rules: ClassVar[str] = "unirl.algorithms.inherited_rules"
    needs_groups: ClassVar[bool] = False
    makes_weights: ClassVar[bool] = False
    centres_groups: ClassVar[bool] = False
    counts_tokens: ClassVar[bool] = False

    def __call__(
        self,
        rewards_B: Tensor,
        group_ids: Sequence[str],
        component_rewards: Mapping[str, Tensor] | None = None,
        *,
        progress: float = 0.0,
        num_tokens_B: Tensor | None = None,
    ) -> Tensor:
        """Raises ConfigError: what grows from no track with advantages has nothing to inherit."""
        raise ConfigError(
            "InheritedAdvantages are those of the track that a stage grows from, which has none: it is neither the "
            "first nor trained. Set advantages._target_: unirl.algorithms.advantages.AdvantageConfig."
        )

    def of_parents(self, track: RolloutTrack, parent: RolloutTrack, advantages_P: Tensor) -> Tensor:
        """Advantages float32 [B] of the samples of `track`, given those [P] of its parent's."""
        row_of = {sample: row for row, sample in enumerate(parent.sample_ids)}
        return advantages_P[[row_of[name] for name in track.group_ids]]

    def metrics(self, progress: float) -> dict[str, float]:
        """Nothing that the parent's do not report."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Empty: every rollout inherits by itself."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""
