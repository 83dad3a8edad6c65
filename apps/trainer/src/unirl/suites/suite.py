"""What a suite is: prompts, samples per prompt, a scorer, categories, the overall value, and the published format."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from unirl.data.datasets import PromptRow, read_rows
from unirl.datasets.catalog import FOLDER, SETS, command_for
from unirl.types.errors import ConfigError

Makes = Literal["image", "video", "text"]
Overall = Literal["samples", "categories"]
"""How the overall value is made: the mean over all samples, or the (weighted) mean of the categories' values."""
ALL = "all"
"""Category of prompts without one."""


@dataclass(frozen=True)
class Metric:
    """One value per sample, as the scorer calls it."""

    name: str
    """The scorer's name for its reward, or a component such as `shapes/strict`."""
    is_fraction: bool
    """True if every sample has 0 or 1: the interval is then Wilson's, else by bootstrap."""
    only: str | None = None
    """Counts only prompts whose `Suite.only_key` holds this; None counts all."""


@dataclass(frozen=True, eq=False)
class Judged:
    """A sample with its scores, its media in a file."""

    prompt: str
    media: Mapping[str, Any]
    """As docs/reference/run_directory.md describes `media`; `file` is a path from the folder of the samples. Any: JSON
    values."""
    metadata: Mapping[str, Any]
    """The row of the prompt file. Any: JSON values."""
    prompt_id: str
    """As in the prompt file; samples of a prompt share it."""
    index: int
    """Number of the sample among those of its prompt, from 0."""
    categories: tuple[str, ...]
    scores: Mapping[str, float]
    """Empty where scoring failed."""
    error: str | None
    """Why it failed."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What a scorer of `KeepsDetails` says besides the scores. Any: JSON values."""


Parts = Callable[[Judged], Mapping[str, Sequence[float]]]
"""Category -> values of a sample that count in it, where these are not its score: answers to single questions."""
Publish = Callable[[Sequence[Judged]], Mapping[str, str]]
"""Name of a file -> its text, as the suite's authors write results."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A benchmark. Values that a command changes (`suite.KEY=VALUE`) are said in the results."""

    name: str
    what: str
    makes: Makes
    """Kind of media that is judged."""
    prompts: str
    """Prompt file: below `datasets`, where `trainer data prepare` writes it, or with `world:` in front, of a world."""
    samples_per_prompt: int
    published_prompts: int | None = None
    """Prompts of the published benchmark; None where there is no published number to compare with."""
    scorers: Mapping[str, Mapping[str, Any]]
    """By name: `_target_` of unirl-reward and keywords. Any: a recipe's values."""
    template: str = "{prompt}"
    """What a model is asked, with the prompt for {prompt}. Scorers and results read it as asked."""
    needs: str = ""
    """What the scorer needs besides the package, and how to get it."""
    metrics: tuple[Metric, ...]
    """The first one is the suite's number."""
    parts: Parts | None = None
    """Values of the first metric by category; None: the sample's score in each of its categories."""
    categories: tuple[str, ...] = ("category",)
    """Fields of a prompt's metadata that name its category; with several, a sample counts in one category of each."""
    overall: Overall = "samples"
    weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of categories in the overall value, for `categories`; empty: equal ones."""
    only_key: str = ""
    """Field of a prompt's metadata that lists what it is for, for metrics of some prompts."""
    limits: str = ""
    """What of the published benchmark is not measured, and how to get it; in the results."""
    publish: Publish | None = None
    """Files in the published format; None where none is published."""
    source: str
    """Paper and repository."""
    version: int = 1
    """Goes up where the same samples would get other numbers."""

    def categories_of(self, metadata: Mapping[str, Any] | None) -> tuple[str, ...]:  # Any: a row's values
        """The categories of a prompt; `all` where it has none."""
        found = tuple(str(metadata[key]) for key in self.categories if metadata and metadata.get(key) is not None)
        return found or (ALL,)

    def counts(self, metric: Metric, metadata: Mapping[str, Any] | None) -> bool:  # Any: a row's values
        """True if a metric counts the samples of a prompt."""
        return metric.only is None or metric.only in (metadata or {}).get(self.only_key, ())

    def asks(self, scorer: str, metadata: Mapping[str, Any] | None) -> bool:  # Any: a row's values
        """True if a scorer is asked about the samples of a prompt: a metric counts what it says, or none is of it."""
        own = [metric for metric in self.metrics if metric.name.partition("/")[0] == scorer]
        return not own or any(self.counts(metric, metadata) for metric in own)

    @property
    def prompt_file(self) -> Path:
        """Where the prompts are expected on this machine."""
        world, _, name = self.prompts.rpartition(":")
        if world:
            return Path(str(importlib.resources.files(f"unirl.worlds.{world}") / name))
        return Path(self.prompts).expanduser()

    def require_prompts(self) -> Path:
        """`prompt_file`. Raises ConfigError if it is absent, with the command that makes it."""
        path = self.prompt_file
        if not path.exists():
            command = command_for(path)
            how = f"Make it with: {command}" if command else "Give another file with suite.prompts=FILE"
            raise ConfigError(f"suite {self.name}: no prompt file {path}. {how}.")
        return path

    def rows(self) -> list[PromptRow]:
        """The prompts that a metric counts, in file order. Raises ConfigError as `require_prompts` does, and if
        there are none."""
        path = self.require_prompts()
        rows = read_rows(path)
        wanted = {metric.only for metric in self.metrics}
        if None not in wanted:
            rows = [row for row in rows if wanted & set(row.metadata.get(self.only_key, ()))]
        if not rows:
            raise ConfigError(f"suite {self.name}: no row of {path} lists one of {', '.join(map(str, wanted))}.")
        if "{prompt}" not in self.template:
            raise ConfigError(f"suite.template = {self.template!r} has no {{prompt}}. Say where the prompt goes.")
        return [replace(row, prompt=self.template.replace("{prompt}", row.prompt)) for row in rows]


def prepared(name: str, split: str = "test") -> str:
    """Path of a file that `trainer data prepare` makes. Raises ConfigError for a set that is not in the catalogue."""
    output = SETS[name].output(split) if name in SETS else None
    if output is None:
        raise ConfigError(f"no set of prompts {name!r} with a split {split!r}. See: uv run trainer data list.")
    return str(FOLDER / name / output.file)
