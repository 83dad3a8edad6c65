"""Base of engine hosts: handles messages about weights and memory; each engine implements the loading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from unirl.rollout.engine.child.adapter import SentAdapter, read_adapter
from unirl.rollout.engine.child.messages import (
    BeginWeights,
    Done,
    FinishWeights,
    LoadAdapter,
    Loaded,
    Message,
    ReceiveWeights,
    Sleep,
    TakeWeights,
    WakeUp,
)
from unirl.rollout.engine.push import CompletePush, PushReceiver
from unirl.types.bucket_files import MappedBuckets
from unirl.types.errors import ConfigError, ContractError
from unirl.types.shared_buckets import Place
from unirl.types.weights import WeightBucket, WeightSpec


class WeightsHost(ABC):
    """Answers the messages of pushes, adapters and memory with an engine that a subclass has started."""

    called: ClassVar[str] = "a running engine"
    """Name of the engine in errors."""
    _pushes: PushReceiver
    """Set by the subclass, which knows the engine's model."""

    @cached_property
    def _mapped(self) -> MappedBuckets:
        """Mapped files of pushes."""
        return MappedBuckets()

    @property
    def _takes_adapters(self) -> bool:
        """True if the engine was started for adapters."""
        return True

    @abstractmethod
    def _begin_push(self) -> None:
        """Discard the buckets of the last push."""

    @abstractmethod
    def _keep(self, path: str, bucket: WeightBucket) -> None:
        """Keep a bucket, whose file exists until the push ends."""

    @abstractmethod
    def _load_kept(self, push: CompletePush) -> int:
        """Load all kept buckets; returns how many parameters took a value, in this push as a whole."""

    def _take(self, place: Place, specs: Sequence[WeightSpec]) -> None:
        """Verify the tensors of a bucket, and load them. Engines whose class says `shares_memory` have it."""
        del place, specs
        raise ContractError(f"{self.called} does not load a bucket before the others have come")

    @abstractmethod
    def _act_with(self, adapter: SentAdapter) -> int | None:
        """Use this adapter instead of the last one; returns how many layers it changes, None if the engine does not
        report it."""

    @abstractmethod
    def _sleep(self, level: int) -> None:
        """Free memory, see `Sleep`."""

    @abstractmethod
    def _wake_up(self) -> None:
        """Undo `_sleep`."""

    def answer_weights(self, message: Message) -> Done | Loaded:
        """Answer a message. Raises ContractError if it is not about weights or memory."""
        match message:
            case BeginWeights():
                self._pushes.announce(message.policy_version, message.specs)
                self._mapped.forget_removed()
                self._begin_push()
            case ReceiveWeights():
                tensors = self._mapped.tensors(message.path)
                bucket = WeightBucket(message.policy_version, tensors, tuple(message.specs))
                with self._pushes.receiving(bucket):
                    self._keep(message.path, bucket)
            case TakeWeights():
                with self._pushes.taking(message.policy_version, message.specs, message.num_bytes):
                    self._take(message.place, message.specs)
            case FinishWeights():
                return self._finish_push(message.policy_version)
            case LoadAdapter():
                return self._load_adapter(message)
            case Sleep():
                self._sleep(message.level)
            case WakeUp():
                self._wake_up()
            case other:
                raise ContractError(f"{self.called} does not take {type(other).__name__}")
        return Done()

    def _finish_push(self, policy_version: int) -> Loaded:
        push = self._pushes.finish(policy_version)
        with self._pushes.loading(push.policy_version):
            num_bound = self._load_kept(push)
        return Loaded(push.policy_version, push.num_tensors, push.num_bytes, num_bound)

    def _load_adapter(self, message: LoadAdapter) -> Loaded:
        if not self._takes_adapters:
            raise ConfigError("this engine was started without LoRA: set engine.max_lora_rank")
        adapter = read_adapter(message, self._pushes)
        with self._pushes.loading(adapter.policy_version):
            num_layers = self._act_with(adapter)
        return adapter.loaded(num_layers)
