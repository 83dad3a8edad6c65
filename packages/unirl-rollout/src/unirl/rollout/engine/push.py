"""Receiving side of a weight push: tracks what was announced, what has arrived, and which policy the engine has.

    announce -> receiving or taking (per bucket) -> finish -> loading -> the new version

Any step may raise WeightSyncError. Until `taking` or `loading` begins the engine keeps its policy. If a push fails
later, the weights are incomplete, and `require_usable` raises until one succeeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from unirl.rollout.engine.checkpoint import adapter_specs, full_specs
from unirl.types.deltas import with_delta
from unirl.types.errors import WeightSyncError
from unirl.types.weights import WeightBucket, WeightSpec, checksums_as, diff_specs

_MAX_LINES = 20


@dataclass
class _OpenPush:
    policy_version: int
    announced: dict[str, WeightSpec]
    received: set[str] = field(default_factory=set)
    num_bytes: int = 0


@dataclass(frozen=True)
class CompletePush:
    """A push of which every announced tensor has arrived."""

    policy_version: int
    num_tensors: int
    """Includes the tensors that the engine kept."""
    num_bytes: int
    """Size of the tensors that arrived."""


class PushReceiver:
    """Checks the pushes to one engine, and tracks the version of its policy.

    shapes: tensor name -> shape of the checkpoint that the engine was started from (`checkpoint_shapes`).
    dtype: of the engine's weights as torch writes it, such as "torch.bfloat16".
    policy_version: of the policy that the engine was started with.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: str, policy_version: int) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._policy_version = policy_version
        self._policy: str | None = None
        self._push: _OpenPush | None = None
        self._defect: str | None = None

    @property
    def policy_version(self) -> int:
        """Version of the last loaded policy."""
        return self._policy_version

    def announce(self, policy_version: int, specs: Sequence[WeightSpec]) -> None:
        """Open a push of the whole model; an unfinished one is dropped.

        Raises WeightSyncError if the version is older than the engine's, or the tensors are not the checkpoint's.
        """
        self._push = None
        self._refuse_stale(policy_version)
        refuse("the weights do not fit the engine's model", diff_specs(specs, full_specs(self._shapes, self._dtype)))
        self._push = _OpenPush(policy_version, {spec.name: spec for spec in specs})

    @contextmanager
    def receiving(self, bucket: WeightBucket, own: Mapping[str, Tensor] = {}) -> Generator[None]:
        """Context in which the caller stores the bucket's tensors; they count as received if it raises nothing.

        own: the engine's current weights, for tensors that the bucket does not bring whole.
        Raises WeightSyncError if no push is open, or if the bucket has another version, was made for an engine with
        another version, has tensors that were not announced or have already arrived, or wrong checksums.
        """
        specs = (*bucket.specs, *bucket.kept)
        push = self._expecting(bucket.policy_version, specs)
        refuse_other_base(bucket, self._policy_version)
        bucket.verify()
        made = checksums_as(bucket.kept, (_made_of(own, bucket, spec.name) for spec in bucket.kept))
        changed = [
            f"changed: {spec.name}"
            for spec, checksum in zip(bucket.kept, made, strict=True)
            if spec.of(own[spec.name], checksum) != spec
        ]
        refuse("the engine does not have what was left out of the push; push again, and all is sent", changed)
        yield
        push.received.update(spec.name for spec in specs)
        push.num_bytes += bucket.num_bytes

    @contextmanager
    def taking(self, policy_version: int, specs: Sequence[WeightSpec], num_bytes: int) -> Generator[None]:
        """Context in which the caller verifies a bucket and loads it at once; it counts as received if that raises
        nothing. From the first one on the engine's weights are no whole policy.

        Raises as `receiving`, but leaves checksums to the caller.
        """
        push = self._expecting(policy_version, specs)
        self.invalidate(f"the push of version {policy_version}, loaded bucket by bucket, did not end")
        yield
        push.received.update(spec.name for spec in specs)
        push.num_bytes += num_bytes

    def finish(self, policy_version: int) -> CompletePush:
        """Close the push; it is dropped if this raises.

        Raises WeightSyncError if no push is open, the version is not the announced one, or tensors are missing.
        """
        push = self._require_open()
        self._push = None
        if policy_version != push.policy_version:
            raise WeightSyncError(f"version {push.policy_version} was announced, {policy_version} is finished")
        missing = sorted(set(push.announced) - push.received)
        refuse("announced tensors did not arrive", [f"missing: {name}" for name in missing])
        return CompletePush(push.policy_version, len(push.received), push.num_bytes)

    def check_adapter(self, bucket: WeightBucket, rank: int) -> None:
        """Raise WeightSyncError if an adapter is older than the engine's policy, does not fit its model, or does not
        match its checksums."""
        self._refuse_stale(bucket.policy_version)
        expected = adapter_specs(list(bucket.tensors), self._shapes, self._dtype, rank)
        refuse("the adapter does not fit the engine's model", diff_specs(bucket.specs, expected))
        bucket.verify()

    @contextmanager
    def loading(self, policy_version: int, policy: str | None = None) -> Generator[None]:
        """Context in which the caller changes the engine's weights; the engine has the new version of the named policy
        if it raises nothing."""
        self.invalidate(f"loading the weights of version {policy_version} did not end well")
        yield
        self._defect = None
        self._policy_version = policy_version
        self._policy = policy

    def invalidate(self, reason: str) -> None:
        """Refuse to generate until a push succeeds. reason: used in the error."""
        self._defect = reason

    def require(self, policy: str | None) -> None:
        """Raise WeightSyncError unless the engine's weights are complete and of the requested policy."""
        self.require_usable()
        refuse_other(policy, self._policy)

    def require_usable(self) -> None:
        """Raise WeightSyncError if the engine's weights are incomplete."""
        if self._defect is not None:
            raise WeightSyncError(
                f"this engine cannot generate: {self._defect}. Its weights are no whole policy; push them again."
            )

    def _refuse_stale(self, version: int) -> None:
        if version < self._policy_version:
            raise WeightSyncError(
                f"version {version} of the policy is older than the engine's version {self._policy_version}"
            )

    def _expecting(self, policy_version: int, specs: Sequence[WeightSpec]) -> _OpenPush:
        """The open push. Raises WeightSyncError if tensors of a bucket were not announced or have already arrived."""
        push = self._require_open()
        if policy_version != push.policy_version:
            raise WeightSyncError(
                f"version {push.policy_version} was announced, the bucket is of version {policy_version}"
            )
        announced = [push.announced[spec.name] for spec in specs if spec.name in push.announced]
        times = Counter([*push.received, *(spec.name for spec in specs)])
        twice = [f"twice: {name}" for name, count in times.items() if count > 1]
        refuse("a bucket is not what was announced", diff_specs(specs, announced) + twice)
        return push

    def _require_open(self) -> _OpenPush:
        if self._push is None:
            raise WeightSyncError("no push is under way: begin_weights comes first, and again after a failure")
        return self._push


def _made_of(own: Mapping[str, Tensor], bucket: WeightBucket, name: str) -> Tensor:
    """What a tensor of the engine is after a push that does not bring it whole."""
    tensor, delta = own[name], bucket.tensors.get(name)
    try:
        return tensor if delta is None else with_delta(tensor, delta)
    except WeightSyncError as error:
        raise WeightSyncError(f"{name} arrived changed: {error}") from error


def refuse_other_base(bucket: WeightBucket, present: int) -> None:
    """Raise WeightSyncError if a bucket has the changes since another version than the engine's current one."""
    if bucket.base_version not in (None, present):
        raise WeightSyncError(
            f"the push brings what changed since version {bucket.base_version}, but the engine has version {present}; "
            "push again, and all is sent"
        )


def refuse_other(asked: str | None, pushed: str | None) -> None:
    """Raise WeightSyncError if the requested policy is not the last pushed one; None is the policy being trained."""
    if asked != pushed:
        names = ["the policy that trains" if name is None else f"the policy {name!r}" for name in (pushed, asked)]
        raise WeightSyncError(f"{names[0]} was pushed last, and samples of {names[1]} are asked for. Push it first.")


def check_version(answered: int, pushed: int) -> None:
    """Raise WeightSyncError if samples come from another version of the policy than the last pushed one."""
    if answered != pushed:
        raise WeightSyncError(
            f"the engine sampled with policy version {answered}, but version {pushed} was pushed last. "
            "The samples are refused."
        )


def refuse(what: str, lines: Sequence[str]) -> None:
    """Raise WeightSyncError with the first lines and their total number; does nothing if there are none."""
    if lines:
        rest = f"\n  and {len(lines) - _MAX_LINES} more" if len(lines) > _MAX_LINES else ""
        raise WeightSyncError(f"{what} ({len(lines)}):\n  " + "\n  ".join(lines[:_MAX_LINES]) + rest)
