"""Main loop of an engine's process: reads messages from a pipe and answers them in order.

Run by `process.EngineProcess` as `python -m MODULE FD FOLDER`, whose module calls `main`. Ends when the pipe closes.
"""

from __future__ import annotations

import os
import queue
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import Protocol

from unirl.rollout.engine.child.messages import PROTOCOL, Abort, Beat, Failed, Message, MessageCodec, Start
from unirl.rollout.engine.process_group import end_group
from unirl.types.errors import ConfigError, ContractError, UniRLError
from unirl.types.heartbeat import BEAT_S, Activity

Steps = Generator[None, None, Message]
"""Work in many steps that returns the answer. Between two steps other messages are answered; the steps of several calls
take turns."""


class Host(Protocol):
    """The engine inside its process."""

    def ready(self) -> Message:
        """First message to the trainer, when the model is loaded."""
        ...

    def answer(self, message: Message) -> Message | Steps:
        """Answer a message."""
        ...


class Aborts:
    """Numbers of calls to end early. Written by the reading thread, read between two steps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = -1

    def add(self, number: int) -> None:
        """End call `number`, if it still runs."""
        with self._lock:
            self._newest = max(self._newest, number)

    def __contains__(self, number: int) -> bool:
        with self._lock:
            return number <= self._newest


Inbox = queue.SimpleQueue[tuple[int, Message]]
"""Messages with the numbers of their calls."""

MakeHost = Callable[[Start, Aborts], Host]


def _read(pipe: Connection, folder: str, codec: MessageCodec, inbox: Inbox, aborts: Aborts) -> None:
    """Put messages in the inbox and aborts in `aborts`. When the pipe closes, end this process and its children and
    delete the folder, which a killed trainer cannot do."""
    while True:
        try:
            data = pipe.recv_bytes()
        except (EOFError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            end_group(os.getpgrp())
            return
        try:
            call, message = codec.decode_call(data)
        except ContractError as error:
            call, message = codec.call_of(data), error
        if isinstance(message, Abort):
            aborts.add(message.number)
        else:
            inbox.put((call, message))


def _failed(error: Exception) -> Failed:
    if isinstance(error, UniRLError):
        return Failed(type(error).__name__, str(error))
    return Failed("WorkerError", str(error), "".join(traceback.format_exception(error)))


class Sender:
    """Writes messages to the pipe, from any thread."""

    def __init__(self, pipe: Connection, codec: MessageCodec) -> None:
        self._pipe = pipe
        self._codec = codec
        self._sending = threading.Lock()

    def send(self, message: Message, call: int = 0) -> None:
        """Write a message; call: the number of the one that it answers."""
        with self._sending:
            self._pipe.send_bytes(self._codec.encode(message, call))

    def beat(self, activity: Activity) -> None:
        """Give a sign of life every `BEAT_S` seconds, until the pipe closes."""
        while True:
            time.sleep(BEAT_S)
            report = activity.report()
            try:
                self.send(Beat(report.doing, report.since_s, report.stack))
            except OSError:
                return


def serve(pipe: Connection, folder: str, codec: MessageCodec, make_host: MakeHost) -> None:
    """Answer messages until the pipe closes."""
    inbox: Inbox = queue.SimpleQueue()
    aborts = Aborts()
    threading.Thread(target=_read, args=(pipe, folder, codec, inbox, aborts), daemon=True).start()
    sender, activity = Sender(pipe, codec), Activity()
    threading.Thread(target=sender.beat, args=(activity,), daemon=True).start()
    call, start = inbox.get()
    try:
        if not isinstance(start, Start):
            raise ContractError(f"the first message must be Start, got {type(start).__name__}")
        if start.protocol != PROTOCOL:
            raise ConfigError(
                f"the trainer speaks protocol {start.protocol}, {codec.engine}'s environment {PROTOCOL}. Install the "
                "same unirl-rollout in both."
            )
        with activity.doing("start"):
            host = make_host(start, aborts)
            ready = host.ready()
        sender.send(ready, call)
    except Exception as error:  # noqa: BLE001 - the trainer raises it
        sender.send(_failed(error), call)
        return
    running: dict[int, tuple[str, Steps]] = {}
    while True:
        answers: dict[int, Message] = {}
        while not running or not inbox.empty():
            call, message = inbox.get()
            what = type(message).__name__
            try:
                if isinstance(message, ContractError):
                    raise message
                with activity.doing(what):
                    answer = host.answer(message)
            except Exception as error:  # noqa: BLE001 - the trainer raises it
                answer = _failed(error)
            if isinstance(answer, Generator):
                running[call] = what, answer
            else:
                sender.send(answer, call)
        for call, (what, steps) in running.items():
            try:
                with activity.doing(what):
                    next(steps)
            except StopIteration as end:
                answers[call] = end.value
            except Exception as error:  # noqa: BLE001 - as above
                answers[call] = _failed(error)
        for call, answer in answers.items():
            del running[call]
            sender.send(answer, call)


def main(codec: MessageCodec, make_host: MakeHost) -> None:
    """Serve the pipe whose file descriptor is the first argument. The second is the folder of shared files."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # or processes that the engine starts would keep the pipe open
    serve(Connection(descriptor), sys.argv[2], codec, make_host)
