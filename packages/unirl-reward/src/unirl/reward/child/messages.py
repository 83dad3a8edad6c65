"""What a scorer and its child process say to each other, over a pipe.

The trainer's side sends `Start` once, then bodies as a reward server takes them (`unirl.reward.wire`). The child
answers each with a byte, DONE or FAILED, and a body: to `Start` nothing, or COMPARES_GROUPS, a server's answer to a
request, `Failure` to what failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

DONE, FAILED = b"\x01", b"\x00"
COMPARES_GROUPS = b"groups"


@dataclass(frozen=True)
class Start:
    """Which scorer to make."""

    scorer: str
    """Its class, as a dotted path."""
    name: str
    device: str
    arguments: Mapping[str, Any]  # Any: keywords of the class, as JSON

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """From `encode`."""
        return cls(**json.loads(body))


@dataclass(frozen=True)
class Failure:
    """What the child raised."""

    kind: str
    """Class name of an error."""
    text: str
    trace: str = ""

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """From `encode`."""
        return cls(**json.loads(body))
