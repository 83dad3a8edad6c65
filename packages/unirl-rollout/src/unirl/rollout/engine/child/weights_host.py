"""What the hosts of all engines do alike: messages about weights and memory, of which each engine does its own part."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    WakeUp,
)
from unirl.rollout.engine.push import CompletePush, PushReceiver
from unirl.types.bucket_files import MappedBuckets
from unirl.types.errors import ConfigError, ContractError
from unirl.types.weights import WeightBucket


class WeightsHost(ABC):
    """Answers the messages of pushes, adapters and memory with an engine that a subclass has started."""

    called: ClassVar[str] = "a running engine"
    """As errors name it."""
    _pushes: PushReceiver
    """Made by the subclass, which knows the engine's model."""

    @cached_property
    def _mapped(self) -> MappedBuckets:
        """The files of pushes."""
        return MappedBuckets()

    @property
    def _takes_adapters(self) -> bool:
        """Whether the engine was started for adapters."""
        return True

    @abstractmethod
    def _begin_push(self) -> None:
        """Forget what was kept of the last push."""

    @abstractmethod
    def _keep(self, path: str, bucket: WeightBucket) -> None:
        """Keep a bucket, which lies in a file until the push ends."""

    @abstractmethod
    def _load_kept(self, push: CompletePush) -> int:
        """Load everything that was kept; how many parameters took a value."""

    @abstractmethod
    def _act_with(self, adapter: SentAdapter) -> int | None:
        """Act with an adapter instead of the last; how many layers it changes, None where nobody counts."""

    @abstractmethod
    def _sleep(self, level: int) -> None:
        """Free memory, see `Sleep`."""

    @abstractmethod
    def _wake_up(self) -> None:
        """Undo `_sleep`."""

    def answer_weights(self, message: Message) -> Done | Loaded:
        """Do what a message asks. Raises ContractError for one that is not about weights or memory."""
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
