"""`trainer conformance`: measure, compare, write."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from unirl.app.command_line import Command
from unirl.app.conformance.cases import MODELS
from unirl.app.conformance.matrix import SCHEMA, Table, case_names, engine_names, measure, merged, problems, worse
from unirl.app.conformance.page import page
from unirl.app.environment import settle_on_cpu
from unirl.app.run_directory import make_folder
from unirl.types.errors import ConfigError


def measure_matrix(command: Command) -> int:
    """Measure the models, engines and cases that the command names, all where it names none; returns the exit status.

    --output: the table as JSON, and as a page next to it (.md). What the file has of what was not measured stays.
    --against: cells that got worse than there are errors. Raises ConfigError for unknown names, unreadable tables and a
    model that the environment names.
    """
    if "PRETRAINED_MODEL" in os.environ:
        raise ConfigError("conformance measures the models that come with the trainer. Unset PRETRAINED_MODEL.")
    models = _known(command.recipes or tuple(MODELS), tuple(MODELS), "model")
    named = command.options.get("engines")
    engines = _known(engine_names() if named is None else str(named).split(","), engine_names(), "engine")
    of_cases = command.options.get("cases")
    cases = None if of_cases is None else _known(str(of_cases).split(","), case_names(), "case")
    against = command.options.get("against")
    reference = None if against is None else table_of(Path(str(against)))  # before minutes are spent
    output = None if "output" not in command.options else Path(str(command.options["output"]))
    before = table_of(output) if output is not None and output.is_file() else None
    if output is not None:
        make_folder("the folder of --output,", output.parent)
    settle_on_cpu("cpu")
    found, is_partial = measure(models, engines, cases), cases is not None
    if output is None:
        sys.stdout.write(rendered(found))
    else:
        whole = found if before is None else merged(found, before, is_partial=is_partial)
        output.write_text(rendered(whole), encoding="utf-8")
        output.with_suffix(".md").write_text(page(whole), encoding="utf-8")
    lines = problems(found) + ([] if reference is None else worse(found, reference, is_partial=is_partial))
    for line in lines:
        sys.stderr.write(f"{line}\n")
    for name, reason in found["not measured"].items():
        sys.stderr.write(f"{name} was not measured: {reason}\n")
    return 1 if lines else 0


def rendered(table: Table) -> str:
    """The table as its file has it."""
    return json.dumps(table, indent=1) + "\n"


def table_of(path: Path) -> Table:
    """A table that was written before. Raises ConfigError for a file that is none."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["schema"] != SCHEMA or not isinstance(table["cells"], dict):
            raise ValueError(f"its schema is {table['schema']}, this trainer writes {SCHEMA}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no table of trainer conformance ({error}). Write one with --output."
        ) from error
    return table


def _known(names: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"conformance has no {what} {', '.join(unknown)}. It has: {', '.join(known)}.")
    return list(dict.fromkeys(names))
