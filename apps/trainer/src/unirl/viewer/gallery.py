"""Records of samples of a run: an index that fits in memory, and pages of whole records read from their files.

Media are never read here. A file of lines appears whole and is then not changed, so it is indexed once.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from unirl.types.errors import DataError
from unirl.viewer.run_files import SAMPLES, NotFoundError, RunFolder

Json = dict[str, Any]  # Any: JSON values
FILE = re.compile(r"(?P<kind>rollout|eval)-(?P<step>\d{6,})\.jsonl")
VERSION = 1
"""Version of the records that are read: `unirl.tracking.sample_files.VERSION`, which would load torch."""
TRACES = "traces.jsonl"
MAX_RECORDS = 100_000
MAX_INDEXED_BYTES = 1 << 30
"""Most that one question reads of lines; newer files come first."""
MAX_LINE_BYTES = 32 << 20
MAX_TEXT = 600
"""Characters of a text on a page of many samples."""


class Medium(msgspec.Struct):
    """The kind of a medium."""

    kind: str


class Line(msgspec.Struct, kw_only=True):
    """What samples are found and sorted by, in a line."""

    version: int
    sample_id: str
    track: str
    group_id: str
    prompt_id: str
    prompt: str = ""
    group_reward_std: float | str | None = None
    group_size: int | None = None
    parent_id: str | None = None
    scores: dict[str, float | str] = {}
    advantage: float | str | None = None
    policy_version: int | None = None
    media: Medium | None = None
    error: str | None = None


@dataclass(frozen=True)
class Entry:
    """One sample: what it is found by, and where its line is."""

    kind: str
    step: int
    offset: int
    length: int
    sample_id: str
    track: str
    group_id: str
    prompt_id: str
    prompt: str
    reward: float | None
    scores: Mapping[str, float]
    advantage: float | None
    std: float | None
    group_size: int | None
    version: int | None
    medium: str | None

    def staleness(self, num_updates: int) -> int | None:
        """Rollouts between the policy that made the sample and the one that trains on it; None for evaluations.

        num_updates: optimizer steps per rollout.
        """
        if self.version is None or self.kind != "rollout":
            return None
        return self.step - 1 - self.version // num_updates


@dataclass(frozen=True)
class SampleFile:
    """A file of lines. `problem` says why it has no entries."""

    kind: str
    step: int
    path: Path
    size: int
    time_ns: int


class SampleIndex:
    """Samples of one run. Not for several threads at once."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._known: dict[Path, tuple[SampleFile, list[Entry], str | None]] = {}

    def files(self, kind: str | None = None) -> list[SampleFile]:
        """Files of lines, by step."""
        folder = self._run.path / SAMPLES
        found = []
        try:
            entries = list(os.scandir(folder))
        except OSError:
            return []
        for entry in entries:
            match = FILE.fullmatch(entry.name)
            if match is None or (kind is not None and match["kind"] != kind):
                continue
            try:
                stat = entry.stat()
            except OSError:
                continue  # removed meanwhile
            found.append(
                SampleFile(match["kind"], int(match["step"]), Path(entry.path), stat.st_size, stat.st_mtime_ns)
            )
        return sorted(found, key=lambda file: (file.step, file.kind))

    def entries(self, files: Sequence[SampleFile]) -> tuple[list[Entry], list[str], int]:
        """Samples of some files, problems, and the number of files left out because they are too many. Newer files
        come first."""
        found: list[Entry] = []
        problems: list[str] = []
        num_bytes = num_left = 0
        for file in sorted(files, key=lambda each: -each.step):
            num_bytes += file.size
            if found and (len(found) >= MAX_RECORDS or num_bytes > MAX_INDEXED_BYTES):
                num_left += 1
                continue
            own, problem = self._of_file(file)
            found += own
            problems += [problem] if problem else []
        return found, problems, num_left

    def _of_file(self, file: SampleFile) -> tuple[list[Entry], str | None]:
        known = self._known.get(file.path)
        if known is None or known[0] != file:
            try:
                self._run.file(f"{SAMPLES}/{file.path.name}")  # refuses what leads elsewhere
                entries, problem = list(_entries(file)), None
            except (DataError, OSError) as error:
                entries, problem = [], str(error)
            known = self._known[file.path] = (file, entries, problem)
        return known[1], known[2]

    def record(self, entry: Entry) -> Json:
        """The whole record of a sample."""
        path = self._run.file(f"{SAMPLES}/{entry.kind}-{entry.step:06d}.jsonl")
        with path.open("rb") as file:
            file.seek(entry.offset)
            line = file.read(entry.length)
        try:
            return msgspec.json.decode(line, type=dict)
        except msgspec.MsgspecError as error:
            raise NotFoundError(f"{path.name} has changed; load the page again.") from error

    def trace(self, entry: Entry) -> Json | None:
        """What is known of a sample per token or step; None where nothing is."""
        try:
            path = self._run.file(f"{SAMPLES}/{entry.kind}-{entry.step:06d}/{TRACES}")
            with path.open("rb") as lines:
                while line := lines.readline(MAX_LINE_BYTES):
                    trace = msgspec.json.decode(line)
                    if trace["sample_id"] == entry.sample_id and trace["version"] == VERSION:
                        return trace
        except (NotFoundError, OSError, msgspec.MsgspecError, KeyError, TypeError):
            return None  # the page says that nothing is known
        return None


def _entries(file: SampleFile) -> Iterator[Entry]:
    """Raises DataError for lines of another version, or that are no records."""
    decoder = msgspec.json.Decoder(Line)
    with file.path.open("rb") as lines:
        offset = 0
        while line := lines.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n"):
                what = "is cut off" if len(line) < MAX_LINE_BYTES else f"has more than {MAX_LINE_BYTES >> 20} MB"
                raise DataError(f"{file.path.name}: the line at byte {offset} {what}; the file is left out.")
            try:
                found = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise DataError(
                    f"{file.path.name}: the line at byte {offset} is no record of a sample: {error}"
                ) from error
            if found.version != VERSION:
                raise DataError(
                    f"{file.path.name} has version {found.version} of the format, this viewer reads {VERSION}. Update "
                    "unirl-trainer."
                )
            yield _entry(file, offset, len(line), found)
            offset += len(line)


def _entry(file: SampleFile, offset: int, length: int, line: Line) -> Entry:
    scores = {name: value for name, given in line.scores.items() if (value := finite(given)) is not None}
    return Entry(
        kind=file.kind,
        step=file.step,
        offset=offset,
        length=length,
        sample_id=line.sample_id,
        track=line.track,
        group_id=line.group_id,
        prompt_id=line.prompt_id,
        prompt=line.prompt[:MAX_TEXT],
        reward=scores.get("reward"),
        scores=scores,
        advantage=finite(line.advantage),
        std=finite(line.group_reward_std),
        group_size=line.group_size,
        version=line.policy_version,
        medium=None if line.media is None else line.media.kind,
    )


def finite(value: float | str | None) -> float | None:
    """A number that JSON has; None for others."""
    return float(value) if isinstance(value, (int, float)) and value - value == 0 else None


@dataclass(frozen=True)
class Question:
    """Which samples, and in which order."""

    kind: str | None = None
    track: str | None = None
    step: int | None = None
    prompt_id: str | None = None
    group_id: str | None = None
    words: str = ""
    """All of these are in the prompt."""
    sort: str = "file"
    """`file`: newest step first and the order of its file; `reward`, `advantage`, `staleness`, or a score."""
    is_down: bool = True

    def chosen(self, entries: Sequence[Entry], num_updates: int) -> list[Entry]:
        """The samples in their order; those without the value to sort by come last."""
        words = self.words.lower().split()
        found = [
            entry
            for entry in entries
            if (self.track is None or entry.track == self.track)
            and (self.prompt_id is None or entry.prompt_id == self.prompt_id)
            and (self.group_id is None or entry.group_id == self.group_id)
            and all(word in entry.prompt.lower() for word in words)
        ]
        if self.sort == "file":
            return sorted(found, key=lambda entry: (-entry.step if self.is_down else entry.step, entry.kind))

        def rank(entry: Entry) -> tuple[bool, float]:
            value = self._value(entry, num_updates)
            return value is None, 0.0 if value is None else -value if self.is_down else value

        return sorted(found, key=rank)

    def _value(self, entry: Entry, num_updates: int) -> float | None:
        match self.sort:
            case "advantage":
                return entry.advantage
            case "staleness":
                return entry.staleness(num_updates)
            case score:
                return entry.scores.get(score)


def shown(record: Mapping[str, Any], entry: Entry, num_updates: int, *, is_whole: bool) -> Json:
    """A record as the page gets it: with its place and staleness, and unless `is_whole` with long texts cut."""
    found = {**record, "staleness": entry.staleness(num_updates), "offset": entry.offset}
    if not is_whole:
        found["prompt"], found["drawn_from"] = _cut(record.get("prompt")), _cut(record.get("drawn_from"))
        media = record.get("media")
        if isinstance(media, dict) and isinstance(media.get("text"), str):
            found["media"] = {**media, "text": _cut(media["text"]), "num_characters": len(media["text"])}
        found.pop("metadata", None)
    return found


def _cut(text: Any) -> Any:  # Any: a field of a record
    return f"{text[:MAX_TEXT]} ..." if isinstance(text, str) and len(text) > MAX_TEXT else text


def groups(entries: Sequence[Entry]) -> list[Json]:
    """Groups in the order of their first samples, with what the page says of each.

    `std` is of the whole group; where it is 0 the group teaches nothing, but for one of a single sample.
    """
    found: dict[tuple[str, int, str, str], list[Entry]] = {}
    for entry in entries:
        found.setdefault((entry.kind, entry.step, entry.track, entry.group_id), []).append(entry)
    return [
        {
            "kind": kind,
            "step": step,
            "track": track,
            "group_id": group,
            "prompt": own[0].prompt,
            "prompt_id": own[0].prompt_id,
            "std": own[0].std,
            "is_degenerate": own[0].std == 0 and (own[0].group_size or len(own)) > 1,
            "size": own[0].group_size,
            "mean": _mean([entry.reward for entry in own]),
            "samples": [entry.offset for entry in own],
        }
        for (kind, step, track, group), own in found.items()
    ]


def group_curve(rows: Sequence[Json]) -> Json:
    """Mean reward of the groups of each step with that of the lowest and the highest group; of the first group's track,
    and of rollouts where there are some.

    rows: of `groups`.
    """
    by_step: dict[int, list[float]] = {}
    own = [row for row in rows if row["kind"] == "rollout"] or rows
    for row in own:
        if row["track"] == own[0]["track"] and row["mean"] is not None:
            by_step.setdefault(row["step"], []).append(row["mean"])
    steps = sorted(by_step)
    return {
        "steps": steps,
        "mean": [_mean(by_step[step]) for step in steps],
        "low": [min(by_step[step]) for step in steps],
        "high": [max(by_step[step]) for step in steps],
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def updates_per_rollout(recipe: Mapping[str, Any]) -> int:  # Any: values of a recipe
    """Optimizer steps per rollout, which versions of policies count; of several policies the most."""
    policies = recipe.get("policies")
    sections = [recipe, *(policies.values() if isinstance(policies, dict) else ())]
    stacks = [section.get("stack") for section in sections if isinstance(section, dict)]
    factors = ("num_updates_per_batch", "num_epochs")
    numbers = [[stack.get(name, 1) for name in factors] for stack in stacks if isinstance(stack, dict)]
    known = [own for own in numbers if all(isinstance(number, int) and number > 0 for number in own)]
    return max((math.prod(own) for own in known), default=1)
