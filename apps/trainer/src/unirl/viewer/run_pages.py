"""Answers about single runs: samples, groups, timeline, recipe, alarms, log, checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from aiohttp import web

from unirl.types.errors import DataError
from unirl.viewer import details
from unirl.viewer.asking import answer, names, number
from unirl.viewer.gallery import Entry, Question, SampleIndex, group_curve, groups, shown, updates_per_rollout
from unirl.viewer.run_files import SAMPLES, TIMELINE, NotFoundError, RunFolder, RunsFolder
from unirl.viewer.spans import TimelineFile

T = TypeVar("T")
MAX_PAGE = 200
MOST_INDICES = 8
"""Runs whose samples stay indexed, some 100 MB for the most samples."""
MEDIA_TYPES = {
    ".png": "image/png",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".mp4": "video/mp4",
    ".wav": "audio/wav",
}
"""What is served of a run's samples; nothing that could hold a script."""


class RunPages:
    """Answers about the runs below one folder."""

    def __init__(self, folder: RunsFolder) -> None:
        self._folder = folder
        self._indices: dict[str, SampleIndex] = {}
        self._timelines: dict[str, TimelineFile] = {}
        self._reading = asyncio.Lock()

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        own = ("steps", "samples", "sample", "groups", "timeline", "recipes", "alerts", "log", "checkpoints")
        for name in own:
            app.router.add_get(f"/api/{name}", getattr(self, name))
        app.router.add_get("/media", self.media)

    async def _read(self, work: Callable[[], T]) -> T:
        async with self._reading:
            return await asyncio.to_thread(work)

    def _run(self, request: web.Request) -> RunFolder:
        return self._folder.run(request.query.get("run", ""))

    def _index(self, run: RunFolder) -> SampleIndex:
        index = self._indices[run.name] = self._indices.pop(run.name, None) or SampleIndex(run)
        while len(self._indices) > MOST_INDICES:
            del self._indices[next(iter(self._indices))]
        return index

    # Samples ----------------------------------------------------------------------------------------------------

    async def steps(self, request: web.Request) -> web.Response:
        """What a run has samples of: steps by kind; tracks and scores of the newest ones."""
        run = self._run(request)

        def found() -> dict[str, Any]:  # Any: JSON values
            index = self._index(run)
            files = index.files()
            newest = [file for kind in ("rollout", "eval") for file in files if file.kind == kind][-1:]
            entries, problems, _ = index.entries([*newest, *files[-1:]])
            return {
                "steps": {kind: [file.step for file in files if file.kind == kind] for kind in ("rollout", "eval")},
                "tracks": list(dict.fromkeys(entry.track for entry in entries)),
                "scores": list(dict.fromkeys(name for entry in entries for name in entry.scores)),
                "problems": problems,
            }

        return answer(await self._read(found))

    async def samples(self, request: web.Request) -> web.Response:
        """A page of the samples of a run that a question chooses."""
        run, query = self._run(request), request.query
        question, first = question_of(query), int(number(query, "first", 0, 0, 1e9))
        count = int(number(query, "count", 60, 1, MAX_PAGE))

        def found() -> dict[str, Any]:  # Any: JSON values
            index, num_updates = self._index(run), updates_per_rollout(run.recipe())
            entries, problems, num_left = self._chosen(index, question)
            entries = question.chosen(entries, num_updates)
            page = [
                shown(index.record(entry), entry, num_updates, is_whole=False)
                for entry in entries[first : first + count]
            ]
            return {"total": len(entries), "files_left_out": num_left, "problems": problems, "samples": page}

        return answer(await self._read(found))

    async def sample(self, request: web.Request) -> web.Response:
        """One whole record, with the one that it grew from, and its trace."""
        run, query = self._run(request), request.query
        question, offset = question_of(query), int(number(query, "offset", 0, 0, 1e15))

        def found() -> dict[str, Any]:  # Any: JSON values
            index, num_updates = self._index(run), updates_per_rollout(run.recipe())
            entries, _, _ = self._chosen(index, question)
            entry = next((entry for entry in entries if entry.offset == offset), None)
            if entry is None:
                raise NotFoundError("there is no such sample (any more).")
            own = shown(index.record(entry), entry, num_updates, is_whole=True)
            parents = [each for each in entries if each.sample_id == own.get("parent_id")]
            parent = shown(index.record(parents[0]), parents[0], num_updates, is_whole=True) if parents else None
            return {"sample": own, "parent": parent, "trace": index.trace(entry)}

        return answer(await self._read(found))

    async def groups(self, request: web.Request) -> web.Response:
        """A page of groups, each with its samples."""
        run, query = self._run(request), request.query
        question, first = question_of(query), int(number(query, "first", 0, 0, 1e9))
        count, only_flat = int(number(query, "count", 30, 1, MAX_PAGE)), query.get("degenerate") == "1"

        def found() -> dict[str, Any]:  # Any: JSON values
            index, num_updates = self._index(run), updates_per_rollout(run.recipe())
            entries, problems, num_left = self._chosen(index, question)
            entries = question.chosen(entries, num_updates)
            by_place = {(entry.kind, entry.step, entry.offset): entry for entry in entries}
            rows = [row for row in groups(entries) if row["is_degenerate"] or not only_flat]
            page = rows[first : first + count]
            for row in page:
                own = [by_place[row["kind"], row["step"], offset] for offset in row["samples"]]
                row["samples"] = [shown(index.record(entry), entry, num_updates, is_whole=False) for entry in own]
            num_flat = sum(row["is_degenerate"] for row in rows)
            return {
                "total": len(rows),
                "degenerate": num_flat,
                "curve": group_curve(rows),
                "files_left_out": num_left,
                "problems": problems,
                "groups": page,
            }

        return answer(await self._read(found))

    @staticmethod
    def _chosen(index: SampleIndex, question: Question) -> tuple[list[Entry], list[str], int]:
        files = index.files(question.kind)
        return index.entries([file for file in files if question.step is None or file.step == question.step])

    async def media(self, request: web.Request) -> web.StreamResponse:
        """A file of samples."""
        run, name = self._run(request), request.query.get("file", "")
        path = run.file(f"{SAMPLES}/{name}")
        if not path.is_relative_to((run.path / SAMPLES).resolve()):
            raise NotFoundError(f"{name!r} is not among the samples of {run.name}.")
        kind = MEDIA_TYPES.get(path.suffix)
        if kind is None:
            raise DataError(f"{name!r} is no medium that is shown: {', '.join(MEDIA_TYPES)}.")
        # A resumed run writes a step anew, so the browser asks whether a file is still the same.
        return web.FileResponse(path, headers={"Content-Type": kind, "Cache-Control": "no-cache"})

    # The rest ---------------------------------------------------------------------------------------------------

    async def timeline(self, request: web.Request) -> web.Response:
        """Spans within a window of seconds since the first one."""
        run, query = self._run(request), request.query
        file = self._timelines.setdefault(run.name, TimelineFile(run.path / TIMELINE))
        bounds = (query.get("from"), query.get("to"))
        least, most = (None if None in bounds else number(query, name, 0, 0, 1e12) for name in ("from", "to"))

        def found() -> dict[str, Any]:  # Any: JSON values
            file.refresh()
            return file.window(least, most)

        return answer(await self._read(found))

    async def recipes(self, request: web.Request) -> web.Response:
        """Recipes of runs, key by key."""
        runs = [self._folder.run(name) for name in names(request)]
        return answer(await self._read(lambda: details.recipes(runs)))

    async def alerts(self, request: web.Request) -> web.Response:
        """Alarms that began."""
        run = self._run(request)
        return answer(await self._read(lambda: details.alerts(run)))

    async def log(self, request: web.Request) -> web.Response:
        """The end of the log."""
        run = self._run(request)
        return answer(await self._read(lambda: details.log(run)))

    async def checkpoints(self, request: web.Request) -> web.Response:
        """Checkpoints with commands, and the summary."""
        run = self._run(request)
        return answer(await self._read(lambda: {**details.checkpoints(run), "summary": details.summary(run)}))


def question_of(query: Mapping[str, str]) -> Question:
    """The samples that a request asks for. Raises DataError for a step that is no number."""
    return Question(
        kind=query.get("kind"),
        track=query.get("track"),
        step=int(number(query, "step", 0, 0, 1e9)) if "step" in query else None,
        prompt_id=query.get("prompt"),
        group_id=query.get("group"),
        words=query.get("find", ""),
        sort=query.get("sort", "file"),
        is_down=query.get("down", "1") == "1",
    )
