"""Messages between the server and its replicas: a kind, a number and bytes. Nothing is unpickled.

A frame is kind (1 byte), task (4 bytes), length (8 bytes), big-endian, then the payload.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from enum import IntEnum

_HEAD = struct.Struct(">BIQ")
HEAD_BYTES = _HEAD.size
_MAX_PAYLOAD_BYTES = 16 * 1024**3


class Frame(IntEnum):
    """What a message is. JSON payloads unless noted."""

    START = 1
    """To the replica, first: what to build."""
    READY = 2
    """From the replica: built and warm."""
    FAILED = 3
    """From the replica: cannot be built, {"kind", "text"}."""
    SCORE = 4
    """To the replica: the binary body of a score call."""
    ANSWER = 5
    """From the replica: numbers or a reason for every sample of the task."""
    CANCEL = 6
    """To the replica: nobody waits for the task. No payload."""


def head(kind: Frame, task: int, payload: Sequence[bytes | memoryview]) -> bytes:
    """What stands before the payload."""
    return _HEAD.pack(kind, task, sum(len(part) for part in payload))


def parsed_head(data: bytes) -> tuple[Frame, int, int]:
    """kind, task and length. Raises ValueError for what is no frame."""
    kind, task, length = _HEAD.unpack(data)
    if length > _MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return Frame(kind), task, length


def send_frame(link: socket.socket, kind: Frame, task: int, payload: bytes) -> None:
    """Write one frame to a blocking socket."""
    link.sendall(head(kind, task, [payload]) + payload)


def receive_frame(link: socket.socket) -> tuple[Frame, int, memoryview]:
    """The next frame of a blocking socket. Raises EOFError where the other side is gone."""
    kind, task, length = parsed_head(bytes(_receive(link, HEAD_BYTES)))
    return kind, task, _receive(link, length)


def _receive(link: socket.socket, num_bytes: int) -> memoryview:
    view = memoryview(bytearray(num_bytes))
    filled = 0
    while filled < num_bytes:
        count = link.recv_into(view[filled:])
        if count == 0:
            raise EOFError("the other side closed the connection")
        filled += count
    return view
