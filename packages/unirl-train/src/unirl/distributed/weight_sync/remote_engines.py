"""Presents the engines of another runtime's workers, on any node, as one target of a push."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from unirl.distributed.group.remote_role import RemoteRole
from unirl.distributed.weight_sync.transports.base import (
    NUM_UNDER_WAY,
    ObjectTransport,
    Parcel,
    WeightTransport,
)
from unirl.types.errors import UniRLError, WeightSyncError
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.weights import AdapterConfig, WeightBucket, WeightReceipt, WeightSpec

Wait = Callable[[], list[Any]]  # Any: as the component's methods


class RemoteEngines:
    """All engines of a runtime behind the interface of one (PushTarget).

        training.role("sync").connect_elsewhere(rollouts.remote_role("engine"))

    transport: how tensors are sent; None uses Ray's object store. While the engines load one bucket, the next is
    gathered and packed, so an engine's error may be raised one call later. Every engine verifies what it receives.
    """

    def __init__(self, role: RemoteRole, transport: WeightTransport | None = None) -> None:
        self._role = role
        self._transport = transport or ObjectTransport()
        self._on_their_way: deque[tuple[int, Wait]] = deque()
        self._num_sent = 0
        self._policy_version = -1

    @property
    def policy_version(self) -> int:
        """Version of the last push through this object; -1 before the first."""
        return self._policy_version

    @property
    def bucket_device(self) -> torch.device:
        """Where the transport brings tensors to."""
        return self._transport.device

    def wait_until_ready(self) -> None:
        """See PushTarget; of all engines."""
        self._role.call("wait_until_ready")

    def begin_weights(self, policy_version: int, specs: Sequence[WeightSpec]) -> None:
        """See PushTarget; to all engines."""
        self._num_sent = 0
        with self._dropping():
            self._role.call("begin_weights", policy_version, list(specs))

    def receive_weights(self, bucket: WeightBucket) -> None:
        """See PushTarget; to all engines. Returns once the bucket is being sent."""
        with self._dropping():
            self._send("receive_weights", bucket)

    def receive_parcel(self, number: int, parcel: Parcel) -> None:
        """Announce a bucket that several ranks have written, and will send with the transport's `depart`."""
        with self._dropping():
            self.make_way()
            self._on_their_way.append((number, self._role.submit("receive_weights", parcel)))

    def finish_weights(self, policy_version: int, policy: str | None = None) -> WeightReceipt:
        """See PushTarget; of all engines."""
        with self._dropping():
            while self._on_their_way:
                self._take_answers()
            return self._agreed(self._role.call("finish_weights", policy_version, policy))

    def load_adapter(self, bucket: WeightBucket, config: AdapterConfig, policy: str | None = None) -> WeightReceipt:
        """See PushTarget; to all engines."""
        self._num_sent = 0
        with self._dropping():
            self._send("load_adapter", bucket, config, policy)
            return self._agreed(self._take_answers())

    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """Every engine's samples of the whole request, concatenated, so that the canary checks each engine."""
        answers = self._role.call("generate", req, policy)
        return RolloutResp.concat(
            [_of_engine(name, resp) for name, resp in zip(self._role.workers, answers, strict=True)]
        )

    def close(self) -> None:
        """Free what the transport holds: files, memory, connections."""
        self._on_their_way.clear()
        self._transport.drop()

    def _send(self, method: str, bucket: WeightBucket, *args: object) -> None:
        self.make_way()
        number = self._num_sent
        self._num_sent += 1
        parcel = self._transport.pack(bucket, number)
        self._on_their_way.append((number, self._role.submit(method, parcel, *args)))
        self._transport.depart(number)

    def make_way(self) -> None:
        """Wait until another bucket may be sent. Raises the engines' errors about earlier buckets."""
        with self._dropping():
            while len(self._on_their_way) >= NUM_UNDER_WAY:
                self._take_answers()

    def _take_answers(self) -> list[Any]:  # Any: as the component's methods
        """Wait for the engines' answers to the oldest bucket."""
        number, wait = self._on_their_way.popleft()
        answers = wait()
        self._transport.arrived(number)
        return answers

    @contextmanager
    def _dropping(self) -> Generator[None]:
        """Context: if it fails, all buckets in flight are dropped."""
        try:
            yield
        except UniRLError:
            self._on_their_way.clear()
            self._transport.drop()
            raise

    def _agreed(self, receipts: list[WeightReceipt]) -> WeightReceipt:
        first = receipts[0]
        if any(receipt != first for receipt in receipts):
            found = "; ".join(f"{name}: {receipt}" for name, receipt in zip(self._role.workers, receipts, strict=True))
            raise WeightSyncError(f"engines took different weights. {found}")
        self._policy_version = first.policy_version
        return first


def _of_engine(name: str, resp: RolloutResp) -> RolloutResp:
    """The response with sample ids made unique, since all engines answer the same request."""
    return RolloutResp(
        tracks={
            key: track.replace(sample_ids=[f"{name}: {sample}" for sample in track.sample_ids])
            for key, track in resp.tracks.items()
        }
    )
