"""Engines in the workers of another runtime, on this node or on others, as one target of a push."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.distributed.group.remote_role import RemoteRole
from unirl.distributed.tensor.transport import outgoing
from unirl.types.errors import WeightSyncError
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.weights import AdapterConfig, WeightBucket, WeightReceipt, WeightSpec


class RemoteEngines:
    """Every engine of a runtime behind the interface of one (PushTarget).

        training.role("sync").connect(RemoteEngines(rollouts.remote_role("engine")))

    Tensors travel as bytes through Ray's object store, so neither memory nor files are shared; a bucket leaves once and
    each node fetches it once. Every engine verifies what arrives at it.
    """

    def __init__(self, role: RemoteRole) -> None:
        self._role = role
        self._policy_version = -1

    @property
    def policy_version(self) -> int:
        """Version of the last push through this object; -1 before the first."""
        return self._policy_version

    def wait_until_ready(self) -> None:
        """See PushTarget; of all engines."""
        self._role.call("wait_until_ready")

    def begin_weights(self, policy_version: int, specs: Sequence[WeightSpec]) -> None:
        """See PushTarget; to all engines."""
        self._role.call("begin_weights", policy_version, list(specs))

    def receive_weights(self, bucket: WeightBucket) -> None:
        """See PushTarget; to all engines."""
        self._role.call("receive_weights", _packed(bucket))

    def finish_weights(self, policy_version: int, policy: str | None = None) -> WeightReceipt:
        """See PushTarget; of all engines."""
        return self._agreed(self._role.call("finish_weights", policy_version, policy))

    def load_adapter(self, bucket: WeightBucket, config: AdapterConfig, policy: str | None = None) -> WeightReceipt:
        """See PushTarget; to all engines."""
        return self._agreed(self._role.call("load_adapter", _packed(bucket), config, policy))

    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """Every engine's samples of the whole request, one engine after the other: a canary sees each of them."""
        answers = self._role.call("generate", req, policy)
        return RolloutResp.concat(
            [_of_engine(name, resp) for name, resp in zip(self._role.workers, answers, strict=True)]
        )

    def _agreed(self, receipts: list[WeightReceipt]) -> WeightReceipt:
        first = receipts[0]
        if any(receipt != first for receipt in receipts):
            found = "; ".join(f"{name}: {receipt}" for name, receipt in zip(self._role.workers, receipts, strict=True))
            raise WeightSyncError(f"engines took different weights. {found}")
        self._policy_version = first.policy_version
        return first


def _of_engine(name: str, resp: RolloutResp) -> RolloutResp:
    """The response with sample ids of its own, since all engines answer one request."""
    return RolloutResp(
        tracks={
            key: track.replace(sample_ids=[f"{name}: {sample}" for sample in track.sample_ids])
            for key, track in resp.tracks.items()
        }
    )


def _packed(bucket: WeightBucket) -> WeightBucket:
    """The bucket ready to leave its process: a tensor that is a part of another travels without the rest."""
    return WeightBucket(bucket.policy_version, outgoing(dict(bucket.tensors)), bucket.specs)
