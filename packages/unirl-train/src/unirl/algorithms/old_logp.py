"""Where the log-probs of the policy before the first update come from: a replay, the rollout itself, or both.

In the words of decoupled PPO (arXiv 2505.24298): pi_prox is the policy before the first update, pi_b the one that
sampled, pi the one being trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from unirl.algorithms.base import MicroBatch
from unirl.algorithms.correction_rules import LOG_LINEAR_REPLAYS_NOTHING
from unirl.algorithms.reference import PenalisedAlgorithm, ReferenceKL
from unirl.algorithms.rollout_correction import RolloutCorrection, second_moment_cut
from unirl.types.errors import ConfigError
from unirl.types.protocols.training import PolicyStore

OldLogpSource = Literal["auto", "rollout", "replay", "log-linear"]
REPLAYED = "replay (the first update: its own forward)"
"""What `StageAlgorithm.old_logp` says of algorithms that always replay."""


def log_linear_logp(logp_M: Tensor, rollout_logp_M: Tensor, share_M: Tensor) -> Tensor:
    """log pi_prox = log pi_b + a (log pi - log pi_b), [M], without gradient; exactly log pi where a = 1, log pi_b where
    a = 0.

    logp_M: log pi. rollout_logp_M: log pi_b. share_M: a, see `proximal_share`.
    Source: the log-linear approximation of AReaL (arXiv 2505.24298's code), for which pi_prox is one version behind pi.
    """
    return torch.lerp(rollout_logp_M.to(logp_M), logp_M.detach(), share_M.to(logp_M))


def proximal_share(versions: Tensor, *, before: int, present: int) -> Tensor:
    """a = (v_prox - v_b) / (v - v_b) in [0, 1]: which part of the way from pi_b to pi was done when pi was pi_prox.

    1 where nothing was trained since, v = v_prox, so that the first ratio is 1; 0 for samples of pi_prox itself.
    versions: v_b, int64, of any shape. before: v_prox. present: v.
    """
    if present == before:
        return torch.ones(versions.shape, dtype=torch.float32, device=versions.device)
    return ((before - versions) / (present - versions).clamp(min=1)).clamp(0, 1)


class RatioAlgorithm(PenalisedAlgorithm):
    """Base of the algorithms on ratios to the policy before the first update.

    old_logp_source: "replay" takes the old log-probs at the very slices of training, before the first update; that
        update takes them from its own forward, so its ratio is exactly 1. "rollout" trusts the engine's log-probs.
        "auto" takes the engine's after the first update where they are a replay's up to float32 rounding, and replays
        elsewhere. "log-linear" puts them between the engine's and the present ones by versions, without a forward, see
        `log_linear_logp`.
    rollout_correction: weights for the gap between engine and trainer; None has none.
    Raises ConfigError for another word, a correction of the log-probs that are trusted, or "log-linear" where more than
    log-probs is needed before the first update.
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
        if old_logp_source == "log-linear" and self.freezes_fields:
            raise ConfigError(f"{type(self).__name__} {LOG_LINEAR_REPLAYS_NOTHING}")
        super().__init__(reference, seed=seed)
        self.rollout_correction = rollout_correction
        if old_logp_source == "log-linear" and self.judges_update:
            raise ConfigError(f"algorithm.rollout_correction.m2_threshold {LOG_LINEAR_REPLAYS_NOTHING}")
        self.old_logp_source: OldLogpSource = old_logp_source
        self.replays_old = old_logp_source in ("auto", "replay")
        """True if updates after the first take their old log-probs from a replay."""
        self.uses_anchor = self.replays_old

    def staleness(self, micro: MicroBatch, policies: PolicyStore, versions: Tensor | None = None) -> Tensor | None:
        """Optimizer steps between policies and the one before the first update; None if the engine gives no versions.

        versions: of the policies, of any shape; None: of those that began the samples [B].
        """
        versions = micro.track.policy_versions if versions is None else versions
        return None if versions is None else _version_before(micro, policies) - versions

    def log_linear_share(self, micro: MicroBatch, policies: PolicyStore, versions: Tensor | None = None) -> Tensor:
        """a of `log_linear_logp`, of `versions` as in `staleness`. Raises ConfigError if the engine gives none."""
        versions = micro.track.policy_versions if versions is None else versions
        if versions is None:
            raise ConfigError(
                "algorithm.old_logp_source = log-linear needs the version of the policy on every sample, which this "
                "engine does not give. Set old_logp_source: replay."
            )
        before = _version_before(micro, policies)
        return proximal_share(versions, before=before, present=policies.policy_version)

    @property
    def needs_replay(self) -> bool:
        """True if updates after the first need more of a replay than the log-probs that a rollout has."""
        return self.rollout_correction is not None

    def trust_rollout(self) -> None:
        """Under "auto", use the rollout's log-probs after the first update, where they are all that is needed."""
        if self.old_logp_source == "auto" and not self.needs_replay:
            self.uses_anchor = self.replays_old = False

    @property
    def judges_update(self) -> bool:
        """True under M2PO's mask."""
        return self.rollout_correction is not None and self.rollout_correction.m2_threshold is not None

    def judged(self, micros: Sequence[MicroBatch], gather: Callable[[Tensor], Tensor]) -> list[MicroBatch]:
        """Put the weight 0 on what M2PO masks among all that an update trains on, see `second_moment_cut`.

        Anchors hold `correction` and, for this, `gap` = log p_trainer - log p_engine; they get `m2_masked` too.
        """
        if self.rollout_correction is None or self.rollout_correction.m2_threshold is None:
            return super().judged(micros, gather)
        anchors = [micro.anchor for micro in micros]
        own = torch.cat([anchor["gap"][anchor["correction"] != 0].square() for anchor in anchors])
        cut = second_moment_cut(gather(own), self.rollout_correction.m2_threshold).to(own.device)
        found = []
        for micro, anchor in zip(micros, anchors, strict=True):
            is_masked = (anchor["correction"] != 0) & ~(anchor["gap"].square() < cut)
            weight = torch.where(is_masked, 0.0, anchor["correction"])
            found.append(replace(micro, anchor={**anchor, "correction": weight, "m2_masked": is_masked}))
        return found

    @property
    def starts_at_ratio_one(self) -> bool:
        """True if the first update takes the old log-probs from its own forward."""
        return self.old_logp_source != "rollout" and not self.judges_update

    @property
    def old_logp(self) -> str:
        """Where the old log-probs come from, in a few words for the head of a run."""
        if self.old_logp_source == "rollout":
            return "the rollout's"
        if self.old_logp_source == "log-linear":
            return "between the rollout's and the present ones, by versions"
        if self.judges_update:
            return "replay (m2_threshold: before the first update too)"
        if self.old_logp_source == "replay":
            return REPLAYED
        if self.replays_old:
            return "replay (auto: other weights, precision or quantities; the first update: its own forward)"
        return "the rollout's (auto: same weights, float32; the first update: its own forward)"


def _version_before(micro: MicroBatch, policies: PolicyStore) -> int:
    """Version of the policy before the first update."""
    return policies.policy_version if micro.policy_version is None else micro.policy_version
