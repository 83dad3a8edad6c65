"""Says which runs have changed, to every page that listens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from unirl.viewer.run_files import RunsFolder

SHORTEST_S = 1.0
IDLE_FACTOR = 20
"""Looking takes at most this fraction of the time: 1/20."""


class Watch:
    """Looks at the files of all runs while some page listens."""

    def __init__(self, folder: RunsFolder) -> None:
        self._folder = folder
        self._listeners: set[asyncio.Queue[list[str]]] = set()
        self._known: dict[str, object] = {}
        self._looking: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[asyncio.Queue[list[str]]]:
        """Inside, the queue gets names of runs that are new, changed or gone, whenever there are any."""
        queue: asyncio.Queue[list[str]] = asyncio.Queue()
        if self._looking is None:
            self._known = await asyncio.to_thread(self._look)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_on())
        self._listeners.add(queue)
        try:
            yield queue
        finally:
            self._listeners.discard(queue)
            if not self._listeners:
                self._looking.cancel()
                self._looking = None

    async def _look_on(self) -> None:
        while True:
            began = time.monotonic()
            now = await asyncio.to_thread(self._look)
            changed = sorted(name for name in now.keys() | self._known.keys() if now.get(name) != self._known.get(name))
            self._known = now
            for queue in self._listeners if changed else ():
                queue.put_nowait(changed)
            await asyncio.sleep(max(SHORTEST_S, IDLE_FACTOR * (time.monotonic() - began)))

    def _look(self) -> dict[str, object]:
        return {run.name: (run.signature(), run.is_running()) for run in self._folder.runs()}
