"""Base of hosts that sample latents: answers messages, and verifies that pushes take effect."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from unirl.rollout.engine.child.messages import Message, Start
from unirl.rollout.engine.child.weights_host import WeightsHost
from unirl.rollout.engine.push import CompletePush, PushReceiver
from unirl.rollout.engine.served_latents.call import SampledLatents, SampleLatents
from unirl.rollout.engine.served_latents.folder import pushed_shapes
from unirl.types.errors import WeightSyncError
from unirl.types.weights import WeightBucket, WeightSpec


class LatentsHost(WeightsHost):
    """Answers the messages of `ServedLatentsEngine` with an engine that a subclass has started.

    dtype: of the engine's weights, such as "torch.bfloat16". shapes: of the tensors that a push must have; None takes
        those of a pipeline's transformers.
    """

    engine: ClassVar[str]
    """Name of the engine in errors."""

    def __init__(self, start: Start, dtype: str, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self._scratch = Path(start.scratch_dir)
        self._shapes = pushed_shapes(Path(start.model)) if shapes is None else shapes
        """Tensor name -> shape of what a push brings."""
        self._pushes = PushReceiver(self._shapes, dtype, start.policy_version)
        self._paths: list[str] = []
        self._sent: dict[str, str] = {}
        """Checksum of every tensor of the current push."""
        self._loaded: tuple[dict[str, str], Sequence[str]] | None = None
        """Checksums of the last push, and the engine's own checksums after it."""
        self._num_answers = 0

    @abstractmethod
    def denoise(self, call: SampleLatents) -> SampledLatents:
        """Sample all rows of a call in one batch."""

    @abstractmethod
    def _checksums(self) -> Sequence[str]:
        """The engine's own checksum of its weights, one per rank."""

    @abstractmethod
    def _load(self, paths: Sequence[str]) -> int:
        """Load the tensors of files on every rank; returns how many parameters took one, summed over ranks."""

    def answer(self, message: Message) -> Message:
        """Answer a message."""
        if isinstance(message, SampleLatents):
            self._pushes.require_usable()
            return self.denoise(message)
        return self.answer_weights(message)

    def _next_answer(self) -> Path:
        """A new file for the tensors of an answer."""
        self._num_answers += 1
        return self._scratch / f"answer-{self._num_answers}.safetensors"

    def _begin_push(self) -> None:
        self._paths, self._sent = [], {}

    def _keep(self, path: str, bucket: WeightBucket) -> None:
        self._paths.append(path)
        self._note_sent(bucket.specs)

    def _note_sent(self, specs: Sequence[WeightSpec]) -> None:
        self._sent.update({spec.name: spec.checksum for spec in specs})

    def _load_kept(self, push: CompletePush) -> int:
        del push
        num_bound = self._load(self._paths) if self._paths else self._num_taken()
        self._prove_effect()
        return num_bound

    def _num_taken(self) -> int:
        """How many parameters took a value from buckets of this push that were loaded one by one, summed over ranks."""
        raise WeightSyncError("a push ended that brought no tensor")

    def _prove_effect(self) -> None:
        """Raise WeightSyncError if the engine's weights did not change on some rank although other tensors were sent
        than last time, or changed although the same were sent. An engine may report both as a success."""
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
