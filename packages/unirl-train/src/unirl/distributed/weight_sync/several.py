"""Combines the weight syncs of several policies: each pushes its policy to its engine."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.distributed.group.remote_role import RemoteRole
from unirl.distributed.weight_sync.base import Metrics, WeightSync
from unirl.train.names import joined
from unirl.types.copies import Copies, copy_of
from unirl.types.roles import Collect, Dispatch, distributed


class PolicySyncs:
    """syncs, tracks: by policy; the track is that of its engine.

    names_metrics: prefix metrics with the policy (`<policy>/sync/...`), as in runs with several policies.
    """

    def __init__(
        self, syncs: Mapping[str, WeightSync], tracks: Mapping[str, str], *, names_metrics: bool = True
    ) -> None:
        self._syncs = dict(syncs)
        self._tracks = dict(tracks)
        self._names_metrics = names_metrics

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def connect_elsewhere(
        self, engines: RemoteRole, shares_device: bool, policy: str, *, keeps_former: bool = False
    ) -> None:
        """See `WeightSync.connect_elsewhere`. policy: the one that these engines receive."""
        self._syncs[policy].connect_elsewhere(engines, shares_device, keeps_former=keeps_former)

    def close(self) -> None:
        """Close the sync of every policy."""
        for sync in self._syncs.values():
            sync.close()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def prepare(self) -> None:
        for sync in self._syncs.values():
            sync.prepare()

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def push(self, policy: Copies = None, only: str | None = None) -> Metrics:
        """See `WeightSync.push`. policy: the named copy of each policy. only: the one policy to push; None: all."""
        pushed = {
            name: sync.push(copy_of(policy, self._tracks[name], name))
            for name, sync in self._syncs.items()
            if only in (None, name)
        }
        return joined(pushed) if self._names_metrics else next(iter(pushed.values()))
