"""The process of one replica: builds a scorer, then answers score calls until the server is gone.

    python -m unirl.reward_server.worker --fd N

N is the replica's end of a socket pair. This module imports no web server: the environment of a scorer stays small.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from unirl.reward import construction
from unirl.reward.base import LocalScorer
from unirl.reward.grouping import compares_groups
from unirl.reward.service import RewardService
from unirl.reward.wire import UNLIMITED, WireSample, decode_binary, request_of, sub_metrics
from unirl.reward_server.frames import Frame, receive_frame, send_frame
from unirl.reward_server.logs import start_logging
from unirl.reward_server.memory import give_back_memory, keep_freed_memory
from unirl.types.device_kinds import ACCELERATOR
from unirl.types.devices import accelerator
from unirl.types.errors import ConfigError, ContractError, UniRLError
from unirl.types.media import Audios, Images, Texts, Videos
from unirl.types.protocols.rewards import Scorer
from unirl.types.reward import RewardRequest, RewardResponse

logger = logging.getLogger(__name__)

_MAX_LOGGED_CHARS = 300

Found = dict[str, float] | str
"""Numbers of one sample, or the reason why it has none."""


def main(argv: Sequence[str] | None = None) -> None:
    """Serve the socket whose number is given."""
    parser = argparse.ArgumentParser(prog="python -m unirl.reward_server.worker")
    parser.add_argument("--fd", type=int, required=True)
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the server decides when we end
    start_logging()
    with socket.socket(fileno=options.fd) as link:
        serve(link)


def serve(link: socket.socket) -> None:
    """Build what the first frame says, then answer until the connection ends."""
    _, _, payload = receive_frame(link)
    start = json.loads(bytes(payload))
    judge, told = prepared(start)
    send_frame(link, Frame.FAILED if judge is None else Frame.READY, 0, json.dumps(told).encode())
    if judge is None:
        return
    _answer_all(link, judge, int(start["max_concurrency"]))


def prepared(start: Mapping[str, Any]) -> tuple[Judge | None, dict[str, Any]]:  # Any: JSON values
    """The judge that the server asks for, warm if it says so, with its card; or None and why it cannot be built:
    {"kind", "text", "is_final"}, where is_final says that trying again is vain.
    """
    keep_freed_memory()
    try:
        torch.set_num_threads(max(1, int(start["num_cpus"])))
        device = _accelerator() if start["device"] == ACCELERATOR else start["device"]
        judge = Judge(start["name"], built(start["target"], start["params"], device))
        if start["warm_up"]:
            judge.warm_up()
    except Exception as error:  # whatever a scorer's constructor raises is the server's to report
        logger.exception("reward %s cannot be built", start["name"])
        is_final = isinstance(error, (ConfigError, ImportError))
        return None, {"kind": type(error).__name__, "text": str(error), "is_final": is_final}
    return judge, judge.card()


def _accelerator() -> str:
    """The device of a scorer with GPUs. Raises ConfigError if torch finds none here."""
    kind = accelerator()
    if kind is None:
        raise ConfigError("torch finds no accelerator here. Mend its driver or torch, or set num_gpus: 0 for the CPU.")
    return kind.name


def built(target: str, params: Mapping[str, Any], device: str) -> Scorer:  # Any: values of a configuration file
    """The scorer, see `construction.built`."""
    return construction.built(target, params, {"device": device}, shown=f"scorer {target}", environment="this reward")


class Judge:
    """A scorer with the isolation that strangers' samples need: one that fails takes no other with it."""

    def __init__(self, name: str, scorer: Scorer) -> None:
        self.name = name
        self._scorer = scorer
        # Ungrouped, where groups are not compared, so that a failed sample drops no other.
        self._service = (
            None if isinstance(scorer, LocalScorer) else RewardService({name: scorer}, on_failure="drop_group")
        )
        self.batch_size = scorer.batch_size if isinstance(scorer, LocalScorer) else 8
        self.is_groupwise = compares_groups(scorer)

    def card(self) -> dict[str, Any]:  # Any: JSON values
        """What the server tells about this reward."""
        card = self._scorer.card if isinstance(self._scorer, LocalScorer) else None
        return {
            "batch_size": self.batch_size,
            "is_groupwise": self.is_groupwise,
            "components": list(self._scorer.component_weights) if isinstance(self._scorer, LocalScorer) else [],
            "media": [] if card is None else list(card.media),
            "summary": "" if card is None else card.summary,
            "needs": "" if card is None else card.needs,
            "source": "" if card is None else card.source,
        }

    def warm_up(self) -> None:
        """Score one grey sample of each kind that the scorer takes, silent where it may have sound. A scorer may refuse
        it; that too has warmed it."""
        silence = Audios.pack(waveform=[torch.zeros(16_000)], sample_rate=16_000)
        for kind in self.card()["media"] or ["image"]:
            media = {
                "image": Images(pixels=torch.full((1, 3, 64, 64), 0.5)),
                "video": Videos.pack(frames=[torch.full((8, 3, 64, 64), 0.5)], fps=8.0, audio=silence),
                "text": Texts(texts=["0"]),
                "audio": silence,
            }[kind]
            request = RewardRequest(
                sample_ids=["warm-up"],
                group_ids=["warm-up"],
                primitives={"text": Texts(texts=["a red circle"])},
                generated={kind: media},
                metadata=[None],
            )
            if self.is_groupwise:
                request = request.select([0, 0]).replace(sample_ids=["warm-up", "warm-up 2"])
            try:
                self._scored(request)
            except (UniRLError, ArithmeticError, LookupError, TypeError, ValueError) as error:
                logger.info("reward %s warmed up on a sample that it refused: %s", self.name, error)

    def found(self, samples: Sequence[WireSample], is_cancelled: threading.Event) -> Iterator[list[Found]]:
        """Numbers or a reason for every sample, `batch_size` at a time, until the task is cancelled. Where groups are
        compared, samples are one whole group."""
        size = len(samples) if self.is_groupwise else self.batch_size
        for start in range(0, len(samples), size):
            if is_cancelled.is_set():
                return
            yield self._chunk(samples[start : start + size])

    def _chunk(self, samples: Sequence[WireSample]) -> list[Found]:
        try:
            return list(sub_metrics(self._scored(request_of(samples))))
        except Exception as error:  # noqa: BLE001 - whatever a scorer raises is the sample's reason
            if len(samples) > 1 and not self.is_groupwise:
                return [found for sample in samples for found in self._chunk([sample])]
            text = f"{type(error).__name__}: {error}"
            logger.warning("reward %s: sample %s: %s", self.name, _one_line(samples[0].id), _one_line(text, error))
            return [text] * len(samples)

    @torch.no_grad()
    def _scored(self, request: RewardRequest) -> RewardResponse:
        if isinstance(self._scorer, LocalScorer):
            return self._scorer.score_isolated(request, "sample", is_private=True)
        if self._service is None:
            raise ContractError(f"reward {self.name} has neither a scorer of its own kind nor a service")
        own = request.in_floats()
        return self._service.score(own if self.is_groupwise else own.replace(group_ids=[]))


def _answer_all(link: socket.socket, judge: Judge, max_concurrency: int) -> None:
    tasks: queue.SimpleQueue[tuple[int, memoryview]] = queue.SimpleQueue()
    cancelled: dict[int, threading.Event] = {}
    sending = threading.Lock()

    def answer(task: int, payload: memoryview) -> int:
        samples = decode_binary(payload, UNLIMITED).samples
        found = [item for chunk in judge.found(samples, cancelled[task]) for item in chunk]
        del cancelled[task]
        with sending:
            send_frame(link, Frame.ANSWER, task, json.dumps(found).encode())
        return len(payload)

    def answer_and_give_back(task: int, payload: memoryview) -> None:
        give_back_memory(answer(task, payload))

    def read() -> None:
        try:
            while True:
                kind, task, payload = receive_frame(link)
                if kind == Frame.CANCEL and task in cancelled:
                    cancelled[task].set()
                elif kind == Frame.SCORE:
                    cancelled[task] = threading.Event()
                    tasks.put((task, payload))
                del payload  # else it stays until the next frame comes
        except (EOFError, OSError):
            # The server is gone, so nothing waits for what this process computes, however long it would take.
            os._exit(0)

    threading.Thread(target=read, name="reader", daemon=True).start()
    if max_concurrency == 1:
        while True:
            give_back_memory(answer(*tasks.get()))
    with ThreadPoolExecutor(max_concurrency) as pool:
        while True:
            pool.submit(answer_and_give_back, *tasks.get()).add_done_callback(_die_of_bugs)


def _one_line(text: str, error: Exception | None = None) -> str:
    """A client's text, or an error with its place in the code, for the log."""
    frames = traceback.extract_tb(error.__traceback__)[-1:] if error is not None else []
    places = [f" (line {frame.lineno} of {frame.filename})" for frame in frames]
    shown = "".join(char if char.isprintable() else " " for char in text[:_MAX_LOGGED_CHARS])
    return " ".join(shown.split()) + "".join(places)


def _die_of_bugs(done: Any) -> None:  # Any: a future of nothing
    """A failure outside the scorer loses an answer; the server restarts a replica that ends and asks again."""
    if done.exception() is not None:
        logger.critical("replica ends", exc_info=done.exception())
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
