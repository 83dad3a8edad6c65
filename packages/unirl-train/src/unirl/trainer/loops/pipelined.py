"""The pipelined loop: requests of one rollout are trained on while the next ones of it are generated and scored.

    engine     | request 0 | request 1 | request 2 | request 3 |            | push, request 4
    reward                 | 0 |       | 1 |       | 2 |       | 3 |
    training                   | 0         | 1         | 2         | 3 step |

The weights stay as they are until the step at the end, so that every sample is of the weights that train: gradients of
the requests add up in one update. Advantages compare samples of one group, which a request holds whole.
"""

from __future__ import annotations

import functools
from typing import Any

from unirl.trainer.loops.asynchronous import AsyncTrainer
from unirl.trainer.settings import TrainerSettings


class PipelinedTrainer(AsyncTrainer):
    """Trains on each request of a rollout as soon as it and those before it are scored.

    groups_per_request: prompts of one request, fewer than a rollout has. Other arguments: see `AsyncTrainer`.
    """

    def __init__(self, settings: TrainerSettings, *, groups_per_request: int, **parts: Any) -> None:  # Any: as Trainer
        super().__init__(settings, max_staleness=0, groups_per_request=groups_per_request, **parts)

    def step(self, rollout_id: int) -> dict[str, float]:
        """Push, and train on the requests of a rollout one after the other; returns its metrics."""
        pushed = self._pushed(rollout_id)
        parts, trained, count = [], {}, self._slots.per_rollout
        for number in range(count):
            request = rollout_id * count + number
            groups = self._threads.awaited(f"request {request}", functools.partial(self._slots.finished, request))
            with self._gauges.busy["learner"].call(), self._clock.about(request=request, rollout=rollout_id):
                show = self._shows(rollout_id) if number == 0 else None
                part = self.collector.part(rollout_id, number, groups, show=show)
                traced = self._record.recorded(rollout_id + 1) if number == 0 else ()
                trained = self._learner.train_part(part, count, traced)
                parts.append(part)
        slots = self._oldest(rollout_id)
        metrics, num_samples = self.collector.summed_up(parts)
        self._finish(rollout_id, [slot.number for slot in slots])
        self._record.note(trained, num_samples)
        return {**metrics, **pushed, **trained, **self._loop_metrics(slots, num_samples)}
