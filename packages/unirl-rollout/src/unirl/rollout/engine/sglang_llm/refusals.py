"""Finds the prompts for which SGLang refuses a request: it answers with status 400 for all prompts of one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from unirl.rollout.engine.served_text.call import Generate, Generations, joined, part_of
from unirl.rollout.engine.sglang_llm.server import BadRequest
from unirl.types.member_pool import MAX_AT_ONCE

Ask = Callable[[Generate, int], Generations]
"""The answer to some rows of a call; takes the number of the attempt. Raises BadRequest if the server refuses them."""


def answered(call: Generate, ask: Ask, policy_version: int) -> Generations:
    """The answer to a call. A refused request is asked again in halves, at the same time, until what is refused is
    single prompts. These have the finish reason "refused" and what SGLang says; other samples are as without them."""
    try:
        return ask(call, 0)
    except BadRequest as error:
        if len(call.prompts) == 1:
            return _refused(error, policy_version)
    found: dict[int, Generations] = {}
    num_attempts = 0
    with ThreadPoolExecutor(MAX_AT_ONCE, "unirl-refused") as threads:
        running: dict[Future[Generations], range] = {}
        halves = _halves(range(len(call.prompts)))
        while halves or running:
            for rows in halves:
                num_attempts += 1
                running[threads.submit(ask, part_of(call, rows, call.number), num_attempts)] = rows
            halves = []
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                rows = running.pop(future)
                try:
                    found[rows.start] = future.result()
                except BadRequest as error:
                    if len(rows) == 1:
                        found[rows.start] = _refused(error, policy_version)
                    else:
                        halves += _halves(rows)
    return joined([found[row] for row in sorted(found)])


def _halves(rows: range) -> list[range]:
    middle = (rows.start + rows.stop) // 2
    return [range(rows.start, middle), range(middle, rows.stop)]


def _refused(error: BadRequest, policy_version: int) -> Generations:
    return Generations(policy_version, [[]], [[]], ["refused"], [f"{error.worker}: {error.traceback_text}"])
