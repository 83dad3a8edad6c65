"""Runs one scorer: `python -m unirl.reward.child.host FD`, started by `ChildScorer` in the scorer's environment.

Ends when the pipe closes, also in the middle of a request: the trainer may have been killed.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from multiprocessing.connection import Connection

from unirl.reward.base import LocalScorer
from unirl.reward.child.messages import COMPARES_GROUPS, DONE, FAILED, Failure, Start
from unirl.reward.construction import built
from unirl.reward.grouping import compares_groups
from unirl.reward.wire import UNLIMITED, SampleAnswer, batch_key, decode_binary, encode_answer, request_of, sub_metrics
from unirl.types.batch import rows_by
from unirl.types.errors import ContractError
from unirl.types.protocols.rewards import Scorer


def made(start: Start) -> Scorer:
    """The scorer. Raises what `unirl.reward.construction.built` raises."""
    offered = {"name": start.name, "device": start.device}
    return built(start.scorer, start.arguments, offered, shown=f"scorer = {start.scorer}", environment=sys.executable)


def answered(scorer: Scorer, name: str, body: bytes) -> bytes:
    """The answer to a request, as a reward server would give it."""
    call = decode_binary(body, UNLIMITED)
    answers = [SampleAnswer() for _ in call.samples]
    parts = list(rows_by(batch_key(sample) for sample in call.samples).values())
    groups = [group for rows in parts for group in {call.samples[row].group_id for row in rows}]
    if compares_groups(scorer) and len(set(groups)) < len(groups):
        raise ContractError(f"scorer {name} compares samples of a group, whose media have several sizes here")
    for rows in parts:
        request = request_of([call.samples[row] for row in rows])
        is_local = isinstance(scorer, LocalScorer)
        response = scorer.score_isolated(request, "sample") if is_local else scorer.score(request)
        for row, found in zip(rows, sub_metrics(response), strict=True):
            if isinstance(found, str):
                answers[row].errors[name] = found
            else:
                answers[row].results[name] = found
    return encode_answer(answers)


def serve(pipe: Connection) -> None:
    """Make the scorer that is asked for, then answer requests."""
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), daemon=True).start()
    scorer: Scorer | None = None
    start = Start.decode(inbox.get())
    while True:
        try:
            if scorer is None:
                scorer = made(start)
                body = COMPARES_GROUPS if compares_groups(scorer) else b""
            else:
                body = answered(scorer, start.name, inbox.get())
        except Exception as error:  # noqa: BLE001 - the trainer's side raises it
            trace = "".join(traceback.format_exception(error))
            pipe.send_bytes(FAILED + Failure(type(error).__name__, str(error), trace).encode())
            if scorer is None:
                return
        else:
            pipe.send_bytes(DONE + body)


def _read(pipe: Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    while True:
        try:
            inbox.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # or processes that the scorer starts would keep the pipe open
    serve(Connection(descriptor))
