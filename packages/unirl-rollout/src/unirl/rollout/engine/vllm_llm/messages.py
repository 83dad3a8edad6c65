"""What the trainer's process and vLLM's process say to each other: frozen dataclasses of plain values, sent as JSON.

Large tensors never pass here: weights lie in safetensors files of which a message names the path.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from unirl.rollout.engine.served_text import Generate, Generations
from unirl.types.errors import ContractError
from unirl.types.weights import WeightSpec

PROTOCOL = 2
"""Raised with every change of a message; both sides compare."""


@dataclass(frozen=True)
class Start:
    """First message to the new process."""

    model: str
    engine_args: dict[str, Any]  # Any: keyword arguments of vllm.EngineArgs
    uses_processes: bool
    """Whether vLLM runs its core in processes of its own: on a GPU yes, on a CPU no (it starts ten times faster)."""
    policy_version: int
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Ready:
    """First message back, when the model is loaded."""

    vllm_version: str
    torch_version: str
    vocab_size: int
    context_length: int
    dtype: str
    """Of the model, as torch writes it: "torch.float32"."""
    num_tensors: int
    """Tensors of the model's checkpoint: what a full push must bring."""
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Abort:
    """End a running `Generate` early. Has no answer of its own; late ones are ignored."""

    number: int


@dataclass(frozen=True)
class BeginWeights:
    """Announce a push of the whole model."""

    policy_version: int
    specs: list[WeightSpec]


@dataclass(frozen=True)
class ReceiveWeights:
    """Some of the announced tensors, in a safetensors file that the receiver may read until the push ends."""

    policy_version: int
    path: str
    specs: list[WeightSpec]


@dataclass(frozen=True)
class FinishWeights:
    """Load what was received."""

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
    num_bound: int


@dataclass(frozen=True)
class Sleep:
    """Free device memory. Level 1 keeps the weights in host memory, level 2 drops them."""

    level: int


@dataclass(frozen=True)
class WakeUp:
    """Undo `Sleep`."""


@dataclass(frozen=True)
class Done:
    """Answer to what returns nothing."""


@dataclass(frozen=True)
class Failed:
    """Answer to anything that could not be done."""

    kind: str
    """Name of an error of unirl.types.errors."""
    text: str
    traceback_text: str = field(default="")


Message = (
    Start
    | Ready
    | Generate
    | Generations
    | Abort
    | BeginWeights
    | ReceiveWeights
    | FinishWeights
    | LoadAdapter
    | Loaded
    | Sleep
    | WakeUp
    | Done
    | Failed
)
_CLASSES: dict[str, type[Any]] = {cls.__name__: cls for cls in Message.__args__}


def encode(message: Message) -> bytes:
    """A message as UTF-8 JSON. Floats keep every bit."""
    return json.dumps({"message": type(message).__name__, **dataclasses.asdict(message)}).encode()


def decode(data: bytes) -> Message:
    """The message of `encode`. Raises ContractError for what is none."""
    try:
        content = json.loads(data)
        message_class = _CLASSES[content.pop("message")]
        if "specs" in content:
            content["specs"] = [
                WeightSpec(spec["name"], tuple(spec["shape"]), spec["dtype"], spec["checksum"])
                for spec in content["specs"]
            ]
        return message_class(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ContractError(
            f"no message of this protocol ({type(error).__name__}: {error}): {data[:200]!r}. "
            "Install the same unirl-rollout in the trainer's environment and in vLLM's."
        ) from error
