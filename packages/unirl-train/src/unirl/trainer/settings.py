"""Settings of a run that belong to no single component."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerSettings:
    """Settings shared by collector, learner and run record."""

    recipe: str
    seed: int
    batch_size: int
    """Prompts per rollout."""
    num_rollouts: int
    eval_interval: int = 0
    """Rollouts between evaluations; 0 evaluates only before and after."""
    eval_interval_cpu_s: float | None = None
    """Training CPU seconds between evaluations, instead of `eval_interval`."""
    max_cpu_s: float | None = None
    """Training ends with the rollout in which its CPU seconds (rollout, reward, train, other) exceed this. `progress`
    is still the fraction of `num_rollouts`, so that training does not depend on the machine's speed."""
    save_interval: int = 0
    """Rollouts between checkpoints; 0 saves only at the end."""
    media_interval: int = 0
    """Rollouts between images or tables of training samples; 0 shows none."""
    num_updates: int = 1
    """Optimizer steps per rollout; the trained samples must be divisible by it."""
    max_refills: int = 4
    """Attempts to replace dropped groups before the run stops."""
    best_metric: str = "reward"
    """Held-out mean that the best checkpoint is chosen by."""

    def progress(self, rollout_id: int) -> float:
        """Fraction of the run done when a rollout begins, in [0, 1]."""
        return rollout_id / max(1, self.num_rollouts - 1)


def is_due(count: int, interval: int) -> bool:
    """True if an event with this interval (0: never) happens at `count`."""
    return interval > 0 and count % interval == 0
