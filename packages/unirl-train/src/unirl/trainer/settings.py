"""The numbers of a run that belong to no component."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerSettings:
    """What collector, learner and run record must agree on."""

    recipe: str
    seed: int
    batch_size: int
    """Prompts per rollout."""
    num_rollouts: int
    eval_interval: int = 0
    """Rollouts between evaluations; 0 evaluates only before and after."""
    eval_interval_cpu_s: float | None = None
    """Training CPU seconds between evaluations, in place of `eval_interval`."""
    max_cpu_s: float | None = None
    """Training ends with the rollout in which its CPU seconds (rollout, reward, train, other) exceed this. `progress`
    stays the fraction of `num_rollouts`, so that what a rollout learns never depends on the speed of the machine."""
    save_interval: int = 0
    """Rollouts between checkpoints; 0 saves only at the end."""
    media_interval: int = 0
    """Rollouts between images or tables of training samples; 0 shows none."""
    num_updates: int = 1
    """Optimizer steps per rollout; what is trained on divides by it."""
    max_refills: int = 4
    """Attempts to replace dropped groups before the run stops."""
    best_metric: str = "reward"
    """Held-out mean that the best checkpoint is chosen by."""

    def progress(self, rollout_id: int) -> float:
        """Fraction of the run done when a rollout begins, in [0, 1]."""
        return rollout_id / max(1, self.num_rollouts - 1)


def is_due(count: int, interval: int) -> bool:
    """Whether something that happens every `interval` times (0: never) happens at the `count`-th."""
    return interval > 0 and count % interval == 0
