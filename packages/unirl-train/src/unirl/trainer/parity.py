"""Compares engine and trainer by what they sample: the same held-out prompts, one scorer, a paired test.

Equal log-probs of an engine's samples do not say that it samples as the trainer would: with another guidance, solver or
decoder each transition may be right and the images are others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unirl.data.data_source import PromptRow
from unirl.distributed.runtime import Runtime
from unirl.trainer.held_out import scored_batches
from unirl.trainer.request import pinned_request
from unirl.trainer.samples import scores_of
from unirl.types.copies import Copies
from unirl.types.rollout import RolloutReq

TRAINER_ENGINE = "trainer_engine"
"""Role of what samples with the model that trains, next to an engine with separate weights."""
PARITY_ROLLOUT_ID = -3
"""Part of every draw's key, so that samples differ from those of training and of evaluations."""


@dataclass(frozen=True)
class Parity:
    """The comparison of engine and trainer on some prompts.

    rows: held-out prompts, one sample each. params: the evaluation's sampling parameters, without noise where possible,
    so that engines with other random numbers can be compared.
    """

    rows: Sequence[PromptRow]
    params: Any  # Any: of the run's sampling
    batch_size: int

    def run(self, runtime: Runtime, policy: Copies, track: str | None) -> dict[str, float]:
        """Mean rewards of both and what the difference is worth, see `parity_metrics`. The engine has the weights.

        policy: named copy of the weights; None is the policy being trained. track: whose media are scored.
        """
        engine = self._rewards(runtime, "engine", policy, track)
        trainer = self._rewards(runtime, TRAINER_ENGINE, policy, track)
        both = [row for row in engine if row in trainer]
        return parity_metrics([engine[row] for row in both], [trainer[row] for row in both])

    def _rewards(self, runtime: Runtime, role: str, policy: Copies, track: str | None) -> Mapping[str, float]:
        """Prompt -> reward of its sample; without those that could not be scored."""

        def build(part: list[PromptRow]) -> RolloutReq:
            return pinned_request(runtime, part, self.params, PARITY_ROLLOUT_ID)

        found: dict[str, float] = {}
        batches = scored_batches(
            self.rows,
            build,
            runtime,
            batch_size=self.batch_size,
            policy=policy,
            samples_per_prompt=1,
            track=track,
            engine=role,
        )
        for batch in batches:
            for number, row in enumerate(batch.rows):
                if batch.track.reward_errors[number] is None:
                    found[row.prompt_id] = scores_of(batch.track, number)["reward"]
        return found


def parity_metrics(engine: Sequence[float], trainer: Sequence[float]) -> dict[str, float]:
    """Mean rewards, the standard error of their difference over prompts, and the spread of the trainer's rewards.

    engine, trainer: rewards of the same prompts in the same order. {} for fewer than two, which have no spread.
    """
    if len(engine) < 2:
        return {}
    gaps = [one - other for one, other in zip(engine, trainer, strict=True)]
    return {
        "parity/engine_reward": statistics.fmean(engine),
        "parity/trainer_reward": statistics.fmean(trainer),
        "parity/gap_stderr": statistics.stdev(gaps) / math.sqrt(len(gaps)),
        "parity/reward_std": statistics.stdev(trainer),
    }
