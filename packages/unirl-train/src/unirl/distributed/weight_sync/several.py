"""The weight syncs of several policies as one: each pushes its own policy to its own engine."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.distributed.weight_sync.base import Metrics, WeightSync
from unirl.train.names import joined
from unirl.types.copies import copies_of
from unirl.types.roles import Collect, Dispatch, distributed


class PolicySyncs:
    """syncs: by policy. Metrics are called `<policy>/sync/...`."""

    def __init__(self, syncs: Mapping[str, WeightSync]) -> None:
        self._syncs = dict(syncs)

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def prepare(self) -> None:
        for sync in self._syncs.values():
            sync.prepare()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def push(self, policy: str | None = None) -> Metrics:
        """See `WeightSync.push`; policy: in the words of `unirl.types.copies`."""
        copies = copies_of(policy)
        return joined({name: sync.push(copies.get(name)) for name, sync in self._syncs.items()})
