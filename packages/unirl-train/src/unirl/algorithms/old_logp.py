"""Where the log-probs of the policy before the first update come from: a replay, or the rollout itself."""

from __future__ import annotations

from typing import Literal

from unirl.algorithms.reference import PenalisedAlgorithm, ReferenceKL
from unirl.algorithms.rollout_correction import RolloutCorrection
from unirl.types.errors import ConfigError

OldLogpSource = Literal["auto", "rollout", "replay"]
REPLAYED = "replay (the first update: its own forward)"
"""What `StageAlgorithm.old_logp` says of algorithms that always replay."""


class RatioAlgorithm(PenalisedAlgorithm):
    """Base of the algorithms on ratios to the policy before the first update.

    old_logp_source: "replay" takes the old log-probs at the very slices of training, before the first update; that
        update takes them from its own forward, so its ratio is exactly 1. "rollout" trusts the engine's log-probs.
        "auto" takes the engine's after the first update where they are a replay's up to float32 rounding, and replays
        elsewhere.
    rollout_correction: weights for the gap between engine and trainer; None has none.
    Raises ConfigError for another word, or a correction of the log-probs that are trusted.
    """

    def __init__(
        self,
        reference: ReferenceKL,
        *,
        seed: int,
        old_logp_source: OldLogpSource,
        rollout_correction: RolloutCorrection | None,
    ) -> None:
        if rollout_correction is not None and old_logp_source == "rollout":
            raise ConfigError(
                "algorithm.rollout_correction compares a replay with the rollout. "
                "Set algorithm.old_logp_source: replay."
            )
        super().__init__(reference, seed=seed)
        self.rollout_correction = rollout_correction
        self.old_logp_source: OldLogpSource = old_logp_source
        self.replays_old = old_logp_source != "rollout"
        """True if updates after the first take their old log-probs from a replay."""
        self.uses_anchor = self.replays_old

    @property
    def needs_replay(self) -> bool:
        """True if updates after the first need more of a replay than the log-probs that a rollout has."""
        return self.rollout_correction is not None

    def trust_rollout(self) -> None:
        """Under "auto", use the rollout's log-probs after the first update, where they are all that is needed."""
        if self.old_logp_source == "auto" and not self.needs_replay:
            self.uses_anchor = self.replays_old = False

    @property
    def starts_at_ratio_one(self) -> bool:
        """True if the first update takes the old log-probs from its own forward."""
        return self.old_logp_source != "rollout"

    @property
    def old_logp(self) -> str:
        """Where the old log-probs come from, in a few words for the head of a run."""
        if self.old_logp_source == "rollout":
            return "the rollout's"
        if self.old_logp_source == "replay":
            return REPLAYED
        if self.replays_old:
            return "replay (auto: other weights, precision or quantities; the first update: its own forward)"
        return "the rollout's (auto: same weights, float32; the first update: its own forward)"
