"""Messages between the trainer's process and an engine's process: frozen dataclasses of plain values, sent as JSON.

Large tensors are not part of messages: a message says where they lie, in memory that both sides map.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unirl.types.errors import ContractError
from unirl.types.weights import SumKind, WeightSpec

PROTOCOL = 14
"""Version of the messages, incremented with every change. Both sides compare it."""


@dataclass(frozen=True)
class Start:
    """First message to the new process."""

    model: str
    engine_args: dict[str, Any]  # Any: keyword arguments of the engine's own constructor
    policy_version: int
    scratch_dir: str
    """Folder for the files of this process's answers."""
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True)
class EngineReady:
    """First message back, sent when the model is loaded. Engines add their own fields."""

    version: str
    """Version of the engine's package."""
    torch_version: str
    dtype: str
    """Dtype of the sampling model, such as "torch.float32"."""
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Abort:
    """End a running call early. Has no answer; ignored if the call has already ended."""

    number: int


@dataclass(frozen=True)
class Beat:
    """A sign of life of the engine's process, which it gives by itself; see `unirl.types.heartbeat.Report`."""

    doing: str | None
    since_s: float
    stack: str


@dataclass(frozen=True)
class BeginWeights:
    """Announce a push of the whole model."""

    policy_version: int
    specs: list[WeightSpec]


@dataclass(frozen=True)
class ReceiveWeights:
    """Some of the announced tensors, in a file of `unirl.types.bucket_files` that lasts until the next push begins."""

    policy_version: int
    path: str
    specs: list[WeightSpec]


@dataclass(frozen=True)
class TakeWeights:
    """Some of the announced tensors, loaded before the answer, since the next ones are written over them
    (`unirl.types.shared_buckets`)."""

    policy_version: int
    place: dict[str, Any]  # Any: see `unirl.types.shared_buckets.Place`
    num_bytes: int
    specs: list[WeightSpec]


@dataclass(frozen=True)
class FinishWeights:
    """Load the received tensors."""

    policy_version: int


@dataclass(frozen=True)
class LoadAdapter:
    """A LoRA adapter in a folder as peft writes it."""

    policy_version: int
    folder: str
    specs: list[WeightSpec]


@dataclass(frozen=True)
class Loaded:
    """Answer to `FinishWeights` and `LoadAdapter`."""

    policy_version: int
    num_tensors: int
    num_bytes: int
    num_bound: int | None
    """Parameters of the engine's model that took a value; None if the engine does not report it."""


@dataclass(frozen=True)
class Sleep:
    """Free device memory. Level 1 keeps the weights in host memory, level 2 drops them."""

    level: int


@dataclass(frozen=True)
class WakeUp:
    """Undo `Sleep`."""


@dataclass(frozen=True)
class Done:
    """Answer to a message that returns nothing."""


@dataclass(frozen=True)
class Failed:
    """Answer to a message that failed."""

    kind: str
    """Class name of an error in unirl.types.errors."""
    text: str
    traceback_text: str = field(default="")


Message = Any
"""A dataclass of this module, or one that an engine adds; Any because engines name their own."""

_COMMON = (
    Start,
    Abort,
    Beat,
    BeginWeights,
    ReceiveWeights,
    TakeWeights,
    FinishWeights,
    LoadAdapter,
    Loaded,
    Sleep,
    WakeUp,
    Done,
    Failed,
)


class MessageCodec:
    """Encodes messages as UTF-8 JSON and back. engine: its name in errors. own: message classes that the engine
    adds."""

    def __init__(self, engine: str, *own: type[Message]) -> None:
        self.engine = engine
        self._classes = {cls.__name__: cls for cls in (*_COMMON, *own)}

    def encode(self, message: Message, call: int = 0) -> bytes:
        """A message as bytes. Floats keep every bit. call: number of the call that it asks or answers, from 0."""
        content = {"message": type(message).__name__, **dataclasses.asdict(message)}
        return json.dumps(content | ({"call": call} if call else {})).encode()

    def decode(self, data: bytes) -> Message:
        """The message in bytes from `encode`. Raises ContractError for other bytes."""
        return self.decode_call(data)[1]

    @staticmethod
    def call_of(data: bytes) -> int:
        """Call number in bytes that `decode_call` may not understand; 0 if they have none."""
        try:
            return int(json.loads(data)["call"])
        except (ValueError, KeyError, TypeError):
            return 0

    def decode_call(self, data: bytes) -> tuple[int, Message]:
        """Call number and message in bytes from `encode`. Raises ContractError for other bytes."""
        try:
            content = json.loads(data)
            call = int(content.pop("call", 0))
            message_class = self._classes[content.pop("message")]
            if "specs" in content:
                content["specs"] = [read_spec(**spec) for spec in content["specs"]]
            return call, message_class(**content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ContractError(
                f"no message of this protocol ({type(error).__name__}: {error}): {data[:200]!r}. "
                f"Install the same unirl-rollout in the trainer's environment and in {self.engine}'s."
            ) from error


def read_spec(
    name: str, shape: Sequence[int], dtype: str, checksum: str, stops: Sequence[int], sum_kind: SumKind
) -> WeightSpec:
    """A spec by the fields that JSON has of it."""
    return WeightSpec(name, tuple(shape), dtype, checksum, tuple(stops), sum_kind)
