"""The server of `trainer view`: pages, and JSON of what run directories hold."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from unirl.viewer.asking import answer, names, number
from unirl.viewer.curves import Curve, band, drawn, json_numbers, smoothed
from unirl.viewer.guard import guarding
from unirl.viewer.metrics import Column, MetricsCache
from unirl.viewer.overview import Overview
from unirl.viewer.run_files import METRICS, RunsFolder
from unirl.viewer.run_pages import RunPages
from unirl.viewer.watch import Watch

ASSETS = Path(str(importlib.resources.files("unirl.viewer") / "assets"))
MAX_POINTS = 2000
KEEP_ALIVE_S = 15


_BOUNDS = (("from", -math.inf), ("to", math.inf))


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    """The run; of a band the first."""
    metric: str
    runs: tuple[str, ...]
    curve: Curve
    part: str = ""
    """`low` or `high`: that edge of a band."""

    def described(self, values: np.ndarray) -> dict[str, Any]:  # Any: JSON values
        """As the page gets it; `last` also where the last value is not among those drawn."""
        steps, own = self.curve
        last = (None, None) if not len(steps) else (int(steps[-1]), json_numbers(own[-1:])[0])
        return {
            "name": self.name, "metric": self.metric, "runs": self.runs, "part": self.part, "last": last,
            "y": json_numbers(values),
        }  # fmt: skip


def smooth_curve(curve: Curve, weight: float) -> Curve:
    """`smoothed`, of a curve."""
    return curve[0], smoothed(curve[1], weight)


def within(curve: Curve, least: float, most: float) -> Curve:
    """The steps of a curve between two."""
    is_within = (curve[0] >= least) & (curve[0] <= most)
    return curve[0][is_within], curve[1][is_within]


class Viewer:
    """Answers about the runs below one folder."""

    def __init__(self, folder: RunsFolder) -> None:
        self.folder = folder
        self._overview = Overview()
        self._metrics = MetricsCache()
        self._reading = asyncio.Lock()
        self._readers: set[asyncio.Task[None]] = set()
        self._watch = Watch(folder)

    # Runs and curves --------------------------------------------------------------------------------------------

    async def runs(self, request: web.Request) -> web.Response:
        """All runs."""
        rows = await asyncio.to_thread(lambda: [self._overview.row(run) for run in self.folder.runs()])
        return answer({"folder": str(self.folder.path), "runs": rows})

    async def metric_names(self, request: web.Request) -> web.Response:
        """Names of the metrics that any of the runs has."""
        found: set[str] = set()
        for columns, _ in (await self._columns(names(request))).values():
            found |= columns.keys()
        return answer(sorted(found - {"step"}))

    async def curves(self, request: web.Request) -> web.Response:
        """Metrics of several runs, or of groups of runs that differ in their seed, as bands."""
        query = request.query
        metrics, points = query.getall("metric", ["reward/mean"]), int(number(query, "points", 600, 4, MAX_POINTS))
        weight = number(query, "smooth", 0.0, 0.0, 0.999)
        least, most = (number(query, name, bound, -math.inf, math.inf) for name, bound in _BOUNDS)
        columns = await self._columns(names(request))

        def found() -> list[Series]:
            series = [
                Series(name, metric, (name,), smooth_curve(own[metric].curve(), weight))
                for name, (own, _) in columns.items()
                for metric in metrics
                if metric in own
            ]
            return [each for all_ in self._bands(series) for each in all_] if query.get("band") == "1" else series

        series = await asyncio.to_thread(found)
        table = await asyncio.to_thread(drawn, [within(each.curve, least, most) for each in series], points)
        rows = [each.described(y) for each, y in zip(series, table.y, strict=True)]
        is_whole = all(whole for _, whole in columns.values())
        return answer({"is_whole": is_whole, "x": json_numbers(table.x), "series": rows})

    async def _columns(self, run_names: list[str]) -> dict[str, tuple[dict[str, Column], bool]]:
        paths = {name: self.folder.run(name).path / METRICS for name in run_names}
        async with self._reading:
            found = await asyncio.to_thread(lambda: {name: self._metrics.columns(path) for name, path in paths.items()})
        if not all(whole for _, whole in found.values()) and not self._readers:
            task = asyncio.create_task(self._read_on())
            self._readers.add(task)
            task.add_done_callback(self._readers.discard)
        return found

    async def _read_on(self) -> None:
        is_left = True
        while is_left:
            async with self._reading:
                is_left = await asyncio.to_thread(self._metrics.read_on)

    def _bands(self, series: list[Series]) -> Iterator[list[Series]]:
        groups: dict[tuple[str, str], list[Series]] = {}
        for each in series:
            kin = self._overview.row(self.folder.run(each.name))["kin"]
            groups.setdefault((kin, each.metric), []).append(each)
        for group in groups.values():
            runs = tuple(each.name for each in group)
            parts = zip(("", "low", "high"), band([each.curve for each in group]), strict=True)
            yield [Series(runs[0], group[0].metric, runs, curve, part) for part, curve in parts]

    # Events -----------------------------------------------------------------------------------------------------

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: the names of runs that changed."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        async with self._watch.listening() as changed:
            await response.prepare(request)
            await response.write(b"retry: 2000\n\n")
            with contextlib.suppress(ConnectionResetError):  # the page was closed
                while True:
                    try:
                        found = json.dumps(await asyncio.wait_for(changed.get(), KEEP_ALIVE_S))
                    except TimeoutError:
                        await response.write(b": still here\n\n")
                    else:
                        await response.write(f"data: {found}\n\n".encode())
        return response


async def index(request: web.Request) -> web.StreamResponse:
    """The page."""
    return web.FileResponse(ASSETS / "index.html", headers={"Cache-Control": "no-cache"})


async def asset(request: web.Request) -> web.StreamResponse:
    """A file of the page."""
    path = (ASSETS / request.match_info["path"]).resolve()
    if not path.is_relative_to(ASSETS.resolve()) or not path.is_file():
        raise web.HTTPNotFound(text="no such file")
    return web.FileResponse(path, headers={"Cache-Control": "no-cache"})


def make_app(folder: Path, token: str | None = None) -> web.Application:
    """The application. token: what a request needs; None where only this machine can ask. Raises ConfigError if
    `folder` is not there."""
    viewer = Viewer(RunsFolder(folder))
    app = web.Application(middlewares=guarding(token))
    app.router.add_get("/", index)
    app.router.add_get("/assets/{path:.+}", asset)
    app.router.add_get("/api/runs", viewer.runs)
    app.router.add_get("/api/metrics", viewer.metric_names)
    app.router.add_get("/api/curves", viewer.curves)
    app.router.add_get("/api/events", viewer.events)
    RunPages(viewer.folder).add_to(app)
    return app
