"""The whole table, as JSON, and what of it is worse than a reference."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import tempfile
import threading
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unirl.app.conformance.cases import ALGORITHMS, ENGINES, MODELS, REFERENCE_ALGORITHM, recipe_of
from unirl.app.conformance.checks import (
    Measured,
    NotApplicable,
    Running,
    engine_checks,
    learns,
    named_policy,
    push_gap,
    reward_parity,
)
from unirl.app.environment import this_machine
from unirl.config.check import check_recipe
from unirl.config.runs import ComposedRun
from unirl.distributed.runtime import LocalRuntime
from unirl.trainer.build.assembly import make_trainer
from unirl.trainer.build.launch import make_runtime
from unirl.trainer.versions import versions
from unirl.types.errors import ConfigError, UniRLError

logger = logging.getLogger(__name__)

_PACKAGED = re.compile(r"\S*/(?=unirl/worlds/)")
SCHEMA = 1
LORA = "lora"
_SHARED = ("torch", "transformers", "diffusers")
"""Packages that an engine's environment has of its own versions."""
_ASK_TIMEOUT_S = 120.0
SLACK = 10.0
"""A number may grow by this factor before it is worse: rounding differs between processors."""
FLOOR = 1e-5
"""And below this it is rounding whatever it was, in nats or units of latents."""
Cell = bool | float | dict[str, str]
"""A claim, a number, or why there is neither: {"n/a": reason}, {"failed": error}."""
Table = dict[str, Any]  # Any: JSON


def measure(models: Collection[str], engines: Collection[str], cases: Collection[str] | None = None) -> Table:
    """Measure the cases of these models and engines that can run here.

    cases: names among `case_names`; None measures all. An engine starts for each, and most cells are those of the
    reference algorithm. An engine whose environment is missing is left out, and named in "not measured".
    """
    cells: dict[str, dict[str, dict[str, Cell]]] = {}
    missing: dict[str, str] = {}
    served_by: dict[str, dict[str, str]] = {}
    for model in models:
        kind = MODELS[model].kind
        for name, engine in ENGINES[kind].items():
            if name not in engines:
                continue
            if engine.python is not None and not engine.python.is_file():
                missing[name] = f"needs its environment: uv sync --project {engine.environment}"
                continue
            if engine.python is not None and engine.package is not None:
                served_by[name] = _versions_in(engine.python, (engine.package, *_SHARED))
            logger.info("measuring %s on %s", name, model)
            cells.setdefault(model, {})[name] = dict(_row(model, name, case_names() if cases is None else cases))
    return {
        "schema": SCHEMA,
        "versions": versions(),
        "engine versions": served_by,
        "not measured": missing,
        "cells": cells,
    }


def _versions_in(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """Versions of packages in the environment of an interpreter; those that are not there are left out."""
    asked = (
        "import json, sys; from importlib.metadata import distributions; "
        "own = {d.name: d.version for d in distributions()}; "
        "print(json.dumps({name: own[name] for name in sys.argv[1:] if name in own}))"
    )
    done = subprocess.run(
        [str(python), "-c", asked, *packages], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def case_names() -> tuple[str, ...]:
    """The algorithms of every kind, and the reference algorithm on LoRA."""
    return (*dict.fromkeys(name for own in ALGORITHMS.values() for name in own), LORA)


def _row(model: str, engine: str, cases: Collection[str]) -> Iterator[tuple[str, Cell]]:
    """The cells of a model on an engine, by name."""
    kind, shows_media = MODELS[model].kind, MODELS[model].shows_media
    for algorithm in (name for name in ALGORITHMS[kind] if name in cases):
        try:
            checked = check_recipe(recipe_of(model, engine, algorithm), this_machine())
        except ConfigError as error:
            yield f"learns: {algorithm}", _refused(error)
            continue
        try:
            with running(checked) as run:
                yield f"learns: {algorithm}", learns(run)
                if run.trainer.collector.rollout_policy is not None:
                    yield "named policy", _cell(named_policy(run))
                if algorithm == REFERENCE_ALGORITHM[kind]:
                    yield "full push", _cell(push_gap(run))
                    for name, found in engine_checks(run, shows_media=shows_media):
                        yield name, _cell(found)
                    yield "rewards", _cell(reward_parity(run))
        except UniRLError as error:
            yield f"learns: {algorithm}", _failed(error)
    if LORA in cases:
        yield "adapter push", _adapter_push(model, engine, REFERENCE_ALGORITHM[kind])


def _adapter_push(model: str, engine: str, algorithm: str) -> Cell:
    """After two steps on LoRA, so that the adapter does something."""
    try:
        checked = check_recipe(recipe_of(model, engine, algorithm, train="lora"), this_machine())
    except ConfigError as error:
        return _refused(error)
    try:
        with running(checked) as run:
            return _cell(push_gap(run)) if learns(run) else False
    except UniRLError as error:
        return _failed(error)


@contextmanager
def running(run: ComposedRun) -> Generator[Running]:
    """The run built in this process."""
    with tempfile.TemporaryDirectory() as folder, make_runtime(run, Path(folder)) as runtime:
        if not isinstance(runtime, LocalRuntime):
            raise ConfigError(f"the matrix is measured in one process; runtime = {run.file.runtime}")
        trainer = make_trainer(run, runtime, Path(folder), [], threading.Event())
        yield Running.of(runtime, trainer)


def _cell(found: Measured | NotApplicable) -> Cell:
    return {"n/a": found.reason} if isinstance(found, NotApplicable) else found


def _refused(error: ConfigError) -> Cell:
    """The reason, without the folder of this installation before a file of a world."""
    return {"n/a": _PACKAGED.sub("", str(error).splitlines()[0])}


def _failed(error: UniRLError) -> Cell:
    return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


# Against a reference -------------------------------------------------------------------------------------------------


def worse(found: Table, reference: Table, *, is_partial: bool = False) -> list[str]:
    """One line for every cell of the reference that got worse, and for every one that is gone although its engine was
    measured.

    is_partial: not all cases were measured, so none is gone.
    """
    lines = []
    for model, engines in reference["cells"].items():
        for engine, row in engines.items():
            own = found["cells"].get(model, {}).get(engine)
            if own is None:
                continue  # this engine was not measured here
            for name, before in row.items():
                if is_partial and name not in own:
                    continue
                reason = _got_worse(before, own.get(name))
                if reason is not None:
                    lines.append(f"{model} on {engine}, {name}: {reason}")
    return lines


def _got_worse(before: Cell, now: Cell | None) -> str | None:
    if now is None:
        return "is not measured any more"
    if isinstance(before, dict):
        return None
    if isinstance(now, dict):
        return f"was {before}, now {now}"
    if isinstance(before, bool):
        return "held, and does not" if before and now is not True else None
    if isinstance(now, bool) or not now <= max(SLACK * before, FLOOR):  # NaN is above every bound
        return f"was {before:.1e}, now {now:.1e}; at most {max(SLACK * before, FLOOR):.1e}"
    return None


def merged(found: Table, reference: Table, *, is_partial: bool = False) -> Table:
    """What was measured, with the reference's rows of models and engines that were not.

    is_partial: not all cases were measured; the reference's other cells of these rows stay, too.
    """
    cells = {}
    for model in _in_order([*reference["cells"], *found["cells"]]):
        before, now = (table["cells"].get(model, {}) for table in (reference, found))
        if is_partial:
            now = {engine: {**before.get(engine, {}), **row} for engine, row in now.items()}
        cells[model] = _by_engine({**before, **now})
    known = {engine for row in cells.values() for engine in row}
    served_by = {**reference.get("engine versions", {}), **found.get("engine versions", {})}
    left = {name: why for name, why in found["not measured"].items() if name not in known}
    return {**found, "engine versions": served_by, "not measured": left, "cells": cells}


def _in_order(models: Sequence[str]) -> list[str]:
    return [model for model in MODELS if model in models]


def _by_engine(rows: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    return {name: rows[name] for name in engine_names() if name in rows}


def engine_names() -> tuple[str, ...]:
    """Every engine of any kind."""
    return tuple(dict.fromkeys(name for engines in ENGINES.values() for name in engines))


def problems(table: Mapping[str, Any]) -> list[str]:
    """Cells that failed, a line each."""
    return [
        f"{model} on {engine}, {name}: {cell['failed']}"
        for model, engines in table["cells"].items()
        for engine, row in engines.items()
        for name, cell in row.items()
        if isinstance(cell, dict) and "failed" in cell
    ]
