"""The verb `data`: which sets of prompts there are, and making one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unirl.app.command_line import Command
from unirl.app.named_data import recipes_of
from unirl.config.suggestions import did_you_mean
from unirl.datasets.catalog import FOLDER, SETS
from unirl.datasets.manifest import Standing, read_manifest, standing
from unirl.datasets.preparing import prepare
from unirl.datasets.records import Output, PromptSet
from unirl.types.errors import ConfigError, DataError

_WORDS: dict[Standing, str] = {"whole": "yes", "absent": "no", "changed": "changed", "unknown": "other content"}


def list_sets(command: Command) -> None:
    """Write a table of all sets, or all that is known of one."""
    console = Console()
    if command.recipes:
        console.print(details(chosen_set(command.recipes[0])), crop=False, soft_wrap=True)
        return
    table = Table(title=f"sets of prompts, looked for in {FOLDER}/", title_justify="left")
    for column in ("name", "split", "rows", "there", "source", "what"):
        table.add_column(column, justify="right" if column == "rows" else "left", overflow="fold")
    table.columns[0].no_wrap = True
    for prompt_set in SETS.values():
        columns = zip(*((output.split, rows, there) for output, rows, there in _files(prompt_set)), strict=True)
        table.add_row(prompt_set.name, *map("\n".join, columns), prompt_set.origin, prompt_set.what)
    console.print(table)
    console.print(Text("make one: uv run trainer data prepare NAME; all about one: uv run trainer data list NAME"))


def prepare_set(command: Command) -> None:
    """Make a set, and say what was written."""
    prompt_set = chosen_set(command.recipes[0])
    options = command.options
    folder = Path(str(options.get("out", FOLDER / prompt_set.name))).expanduser()
    given = Path(str(options["from"])).expanduser() if "from" in options else None
    split = str(options["split"]) if "split" in options else None
    prepared = prepare(
        prompt_set,
        folder,
        given=given,
        split=split,
        overwrite="overwrite" in options,
        is_partial="partial" in options,
    )
    verb = "wrote" if prepared.is_new else "already there:"
    for file, num_rows in prepared.files:
        sys.stdout.write(f"{verb} {prepared.folder / file} ({num_rows:,} rows)\n")


def chosen_set(name: str) -> PromptSet:
    """The set of a name. Raises ConfigError with the nearest names."""
    if name not in SETS:
        raise ConfigError(
            f"unknown set {name!r}. {did_you_mean(name, SETS)} See them all with: uv run trainer data list"
        )
    return SETS[name]


def details(prompt_set: PromptSet) -> Text:
    """All that is known of a set, its recipes included."""
    lines = [f"{prompt_set.name}: {prompt_set.what}", f"made: {prompt_set.made}"]
    for source in prompt_set.sources:
        lines.append(f"from: {source.address} at {source.revision} (license: {source.license})")
        for file in source.files:
            rows = f", {file.num_rows:,} rows" if file.num_rows is not None else ""
            digest = f", sha256 {file.sha256}" if file.sha256 is not None else ""
            lines.append(f"  {file.path}{rows}{digest}")
    for output, rows, there in _files(prompt_set):
        lines.append(f"makes: {FOLDER / prompt_set.name / output.file}, rows {rows}, there: {there}")
    lines.append(f"recipes: {', '.join(recipes_of(prompt_set)) or 'none of the packaged ones'}")
    return Text("\n".join(lines))


def _files(prompt_set: PromptSet) -> Iterator[tuple[Output, str, str]]:
    """(output, its rows, whether it is there) in the folder where recipes look."""
    folder = FOLDER / prompt_set.name
    try:
        manifest = read_manifest(folder)
    except DataError:
        manifest = None
    for output in prompt_set.outputs:
        stands = standing(folder, manifest, prompt_set, output.file)
        known = manifest.rows(output.file) if manifest is not None and stands == "whole" else output.num_rows
        yield output, f"{known:,}" if known is not None else "-", _WORDS[stands]
