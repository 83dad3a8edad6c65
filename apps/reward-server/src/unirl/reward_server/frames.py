"""Messages between the server and its replicas: a kind, a number and bytes. Nothing is unpickled.

A frame is kind (1 byte), task (4 bytes), length (8 bytes), big-endian, then the payload.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

_HEAD = struct.Struct(">BIQ")
_CLOSED = "the other side closed the connection"
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
    """To the replica: no client waits for the task any more. No payload."""


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
    """The next frame of a blocking socket. Raises EOFError if the other side is gone."""
    kind, task, length = parsed_head(bytes(_receive(link, _HEAD.size)))
    return kind, task, _receive(link, length)


async def write_frame(link: socket.socket, kind: Frame, task: int, payload: Sequence[bytes | memoryview]) -> None:
    """As `send_frame`, to a socket that does not block, without copying or joining the payload's parts."""
    loop = asyncio.get_running_loop()
    for part in (head(kind, task, payload), *payload):
        await loop.sock_sendall(link, part)


async def read_frame(link: socket.socket) -> tuple[Frame, int, memoryview]:
    """As `receive_frame`, from a socket that does not block."""
    kind, task, length = parsed_head(bytes(await _read(link, _HEAD.size)))
    return kind, task, await _read(link, length)


def _buffer(num_bytes: int) -> memoryview:
    """Room for bytes, not cleared first as a bytearray is."""
    return np.empty(num_bytes, np.uint8).data


async def _read(link: socket.socket, num_bytes: int) -> memoryview:
    loop = asyncio.get_running_loop()
    view = _buffer(num_bytes)
    filled = 0
    while filled < num_bytes:
        count = await loop.sock_recv_into(link, view[filled:])
        if count == 0:
            raise EOFError(_CLOSED)
        filled += count
    return view


def _receive(link: socket.socket, num_bytes: int) -> memoryview:
    view = _buffer(num_bytes)
    filled = 0
    while filled < num_bytes:
        count = link.recv_into(view[filled:])
        if count == 0:
            raise EOFError(_CLOSED)
        filled += count
    return view
