"""What the processes that own an engine of latents share: their messages, and pushes that are verified and proved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file
from torch import Tensor

from unirl.rollout.engine.checkpoint import checkpoint_shapes
from unirl.rollout.engine.child.adapter import read_adapter
from unirl.rollout.engine.child.messages import (
    BeginWeights,
    Done,
    FinishWeights,
    LoadAdapter,
    Loaded,
    Message,
    ReceiveWeights,
    Sleep,
    Start,
    WakeUp,
)
from unirl.rollout.engine.push import PushReceiver
from unirl.rollout.engine.served_latents.call import SampledLatents, SampleLatents
from unirl.types.errors import ContractError, WeightSyncError
from unirl.types.weights import WeightBucket

TRANSFORMER = "transformer"
"""The component that samples, and its folder."""


class LatentsHost(ABC):
    """Answers the messages of `ServedLatentsEngine` with an engine that a subclass has started.

    dtype: of the engine's weights, as torch writes it. shapes: of what a push must bring; None are those of the
        transformer of a pipeline.
    """

    engine: ClassVar[str]
    """As people call it."""

    def __init__(self, start: Start, dtype: str, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self._scratch = Path(start.scratch_dir)
        expected = checkpoint_shapes(Path(start.model) / TRANSFORMER) if shapes is None else shapes
        self._pushes = PushReceiver(expected, dtype, start.policy_version)
        self._paths: list[str] = []
        self._sent: dict[str, str] = {}
        """Checksum of every tensor of the push under way."""
        self._loaded: tuple[dict[str, str], Sequence[str]] | None = None
        """What was sent last, and the engine's own checksums with it."""
        self._num_answers = 0

    @abstractmethod
    def denoise(self, call: SampleLatents) -> SampledLatents:
        """Sample all rows of a call in one batch."""

    @abstractmethod
    def _checksums(self) -> Sequence[str]:
        """The engine's own of each of its ranks, of the weights that sample."""

    @abstractmethod
    def _load(self, paths: Sequence[str]) -> int:
        """Load the tensors of files on every rank; how many parameters took one, those of each rank counted."""

    @abstractmethod
    def _act_with(self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
        """Act with an adapter, in the place of the last; how many layers it changes. config: peft's own."""

    @abstractmethod
    def _sleep(self, level: int) -> None:
        """Give memory back."""

    @abstractmethod
    def _wake_up(self) -> None:
        """Take it again."""

    def answer(self, message: Message) -> Message:
        """Do what a message asks."""
        match message:
            case SampleLatents():
                self._pushes.require_usable()
                return self.denoise(message)
            case BeginWeights():
                self._paths, self._sent = [], {}
                self._pushes.announce(message.policy_version, message.specs)
                return Done()
            case ReceiveWeights():
                bucket = WeightBucket(message.policy_version, load_file(message.path), tuple(message.specs))
                with self._pushes.receiving(bucket):
                    self._paths.append(message.path)
                    self._sent.update({spec.name: spec.checksum for spec in message.specs})
                return Done()
            case FinishWeights():
                return self._finish_weights(message)
            case LoadAdapter():
                return self._load_adapter(message)
            case Sleep():
                self._sleep(message.level)
                return Done()
            case WakeUp():
                self._wake_up()
                return Done()
            case other:
                raise ContractError(f"a running engine does not take {type(other).__name__}")

    def _next_answer(self) -> Path:
        """A new file for the tensors of an answer."""
        self._num_answers += 1
        return self._scratch / f"answer-{self._num_answers}.safetensors"

    def _finish_weights(self, message: FinishWeights) -> Loaded:
        """Load everything, once everything is there."""
        push = self._pushes.finish(message.policy_version)
        with self._pushes.loading(push.policy_version):
            num_bound = self._load(self._paths)
            self._prove_effect()
        return Loaded(push.policy_version, push.num_tensors, push.num_bytes, num_bound)

    def _prove_effect(self) -> None:
        """Raise WeightSyncError where other tensors were sent than last time and the engine's weights are the same on
        some rank, or the same tensors and its weights are others: an engine may call either a success."""
        present = self._checksums()
        if self._loaded is not None:
            sent, last = self._loaded
            wrong = [
                rank
                for rank, (old, new) in enumerate(zip(last, present, strict=True))
                if (sent == self._sent) != (old == new)
            ]
            if wrong:
                changed = "the same" if sent == self._sent else "other"
                where = "" if len(present) == 1 else f" on rank {', '.join(map(str, wrong))} of {len(present)}"
                raise WeightSyncError(
                    f"{changed} tensors were sent as last time; {self.engine}'s weights say the contrary{where}"
                )
        self._loaded = self._sent, present

    def _load_adapter(self, message: LoadAdapter) -> Loaded:
        adapter = read_adapter(message, self._pushes)
        with self._pushes.loading(adapter.policy_version):
            num_layers = self._act_with(adapter.folder, adapter.tensors, adapter.config)
        return adapter.loaded(num_layers)
