"""Which samples of a batch are trained on, and on which device."""

from __future__ import annotations

from typing import Any

from unirl.algorithms.selection import SampleSelection, zero_variance_groups
from unirl.distributed.held import Held
from unirl.distributed.runtime import Runtime
from unirl.trainer.balance import balanced_order
from unirl.trainer.modality import Modality
from unirl.trainer.roles import StackRole
from unirl.trainer.settings import TrainerSettings
from unirl.types.errors import ConfigError
from unirl.types.rollout import RolloutTrack


class BatchSelection:
    """Selects samples by their advantages and balances what they cost to train over the devices."""

    def __init__(
        self,
        runtime: Runtime,
        settings: TrainerSettings,
        modality: Modality[Any],  # Any: only its costs are asked
        stack: StackRole,
        selection: SampleSelection,
    ) -> None:
        self._runtime = runtime
        self._settings = settings
        self._modality = modality
        self._stack = stack
        self._selection = selection

    def uninformative_groups(self, track: RolloutTrack) -> set[str]:
        """Groups of equal rewards, which dynamic sampling replaces; none without it."""
        if not self._selection.dynamic_sampling:
            return set()
        return zero_variance_groups(track.scored_rewards, track.group_ids)

    def thin_children(self, resp: Held) -> None:
        """Leave the samples of later stages that are trained on, in every trained track of these."""
        if self._selection.best_of_children is None:
            return
        for name in resp.meta.tracks:
            track = resp.meta.track(name)
            if track.parent_track is not None and track.advantages is not None:
                rows = self._selection.child_rows(track.advantages, track.group_ids)
                if rows is not None:
                    resp.keep(name, rows)

    def rows(self, resp: Held, root: str) -> list[int] | None:
        """The rows to train on in the order in which devices get them; None: all rows in their order.

        root: the track whose advantages decide. Raises ConfigError if the rows do not divide over devices and updates.
        """
        track = resp.meta.track(root)
        divisor = self._runtime.num_shards * self._settings.num_updates
        rows = self._selection.rows(track.known_advantages, track.group_ids, divisor)
        if rows is not None and len(rows) % divisor:
            raise ConfigError(
                f"selection keeps {len(rows)} samples, which do not divide over {self._runtime.num_shards} devices x "
                f"{self._settings.num_updates} updates. Change batch_size, selection.best_of or "
                "stack.num_updates_per_batch."
            )
        return self._balanced(resp, root, rows)

    def _balanced(self, resp: Held, root: str, rows: list[int] | None) -> list[int] | None:
        costs = self._modality.training_costs(resp, root) if self._runtime.num_shards > 1 else None
        if costs is None:
            return rows
        in_order = list(range(len(costs)))
        own = in_order if rows is None else rows
        order = balanced_order(
            [costs[row] for row in own],
            self._runtime.num_shards,
            self._settings.num_updates,
            self._stack.samples_per_unit(),
        )
        arranged = [own[place] for place in order]
        return None if arranged == in_order else arranged
