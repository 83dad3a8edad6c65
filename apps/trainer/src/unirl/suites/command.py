"""`trainer eval --suite NAME MODEL`: both stages of a suite, its results, and the comparison with another model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markdown import Markdown

from unirl.app.command_line import Command
from unirl.app.recipe import checked, composed, trusts
from unirl.app.run_directory import (
    CHECKPOINTS,
    CONFIG_FILE,
    NO_CHECKPOINT,
    make_folder,
    require_checkpoint,
)
from unirl.config.runs import ComposedRun
from unirl.suites.catalog import chosen_suite
from unirl.suites.generating import SETTINGS, generate, plan_samples, write_whole
from unirl.suites.pages import (
    comparison_page,
    pairs_to_show,
    results_page,
    samples_to_show,
    sheet_of,
    sheet_of_pairs,
)
from unirl.suites.results import RESULTS, Document, compared, document, read_results
from unirl.suites.scoring import build_scorers, claim_scores, missing_scores, parts_of, read_judged, score
from unirl.suites.suite import Judged, Suite
from unirl.train.checkpoint.folder import meant_step
from unirl.types.errors import ConfigError

logger = logging.getLogger(__name__)

FOLDER = "suites"
BASE = "base"
"""--against this: the run's model before training."""
MODEL_FILES = ("model_index.json", "modular_model_index.json", "config.json")
"""One of them makes a folder that of a model."""
PREFIX = "suite."
"""Prefix of words that change the suite, not the recipe."""
STAGES = ("generate", "score")


@dataclasses.dataclass(frozen=True)
class Model:
    """What is evaluated."""

    run: ComposedRun
    run_dir: Path
    checkpoint: int | None
    """A step of the run; None before training."""
    described: Mapping[str, Any]
    """Name, recipe, step and digests. Any: JSON values."""


def evaluate_suite(command: Command) -> None:
    """Generate and score the samples of a suite, and write results, pages and, with --against, a comparison."""
    stage = command.options.get("stage")
    if stage is not None and stage not in STAGES:
        raise ConfigError(f"--stage is one of {', '.join(STAGES)}, not {stage!r}.")
    suite, changes = changed_suite(
        chosen_suite(str(command.options["suite"])),
        [word for word in command.overrides if word.startswith(PREFIX)],
    )
    if stage != "score":
        suite.require_prompts()  # before the recipe is composed and its values are built, which takes seconds
    own = dataclasses.replace(
        command, overrides=tuple(word for word in command.overrides if not word.startswith(PREFIX))
    )
    _refuse_model_folder(own.recipe)
    run = checked(composed(own), asks_teachers=False, trusts=trusts(own), is_exported=True)
    model = model_of(own, run)
    root = _root(own, run)
    against = command.options.get("against")
    other = None if against is None else _other(str(against), suite, model, root, changes, stage)
    folder = _evaluated(suite, model, root, changes, stage)
    if stage == "generate":
        return
    found = read_results(folder)
    if other is not None:
        _compare(suite, other, folder)
    Console().print(Markdown((folder / "results.md").read_text(encoding="utf-8").partition("![")[0]))
    Console().print(f"wrote {folder}", soft_wrap=True)
    logger.debug("suite %s: %s", suite.name, found["metrics"])


def changed_suite(suite: Suite, words: Sequence[str]) -> tuple[Suite, list[str]]:
    """A suite with `suite.KEY=VALUE` applied, and the changes in words. Raises ConfigError for other keys."""
    allowed = ("prompts", "samples_per_prompt", "template", "scorers")
    for word in words:
        key, _, text = word.removeprefix(PREFIX).partition("=")
        head, *rest = key.split(".")
        if head not in allowed or bool(rest) != (head == "scorers"):
            keys = ", ".join(f"{PREFIX}{each}" for each in (*allowed[:3], "scorers.NAME.KEYWORD"))
            raise ConfigError(f"{word}: a suite has no {PREFIX}{key} to change. There are: {keys}.")
        value = yaml.safe_load(text)
        if head == "samples_per_prompt" and (not isinstance(value, int) or value < 1):
            raise ConfigError(
                f"{word}: a suite has at least one sample per prompt, so it must be a whole number from 1."
            )
        if rest and rest[0] not in suite.scorers:
            raise ConfigError(f"{word}: suite {suite.name} has no scorer {rest[0]!r}, only {', '.join(suite.scorers)}.")
        if len(rest) == 1 and not (isinstance(value, dict) and "_target_" in value):
            raise ConfigError(f"{word}: a scorer is {{_target_: CLASS, KEYWORD: VALUE, ...}}; or change one keyword.")
        value = _with(suite.scorers, rest, value) if rest else text if head in ("prompts", "template") else value
        suite = dataclasses.replace(suite, **{head: value})
    return suite, list(words)


def _with(node: Mapping[str, Any], keys: Sequence[str], value: Any) -> dict[str, Any]:  # Any: a recipe's values
    first, *rest = keys
    inner = node.get(first)
    return {**node, first: _with(inner if isinstance(inner, Mapping) else {}, rest, value) if rest else value}


def _refuse_model_folder(name: str) -> None:
    """Raises ConfigError for the folder of a model, which does not say how to sample from it."""
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / CONFIG_FILE).is_file():
        is_model = any((folder / each).is_file() for each in MODEL_FILES)
        what = "the folder of a model, which does not say how it is sampled" if is_model else "no folder of a run"
        raise ConfigError(
            f"{folder} is {what}. Name a recipe of its family, and the folder as its model: "
            f"uv run trainer eval --suite NAME RECIPE bundle.pretrained_model={folder}."
        )


def model_of(command: Command, run: ComposedRun) -> Model:
    """The model that a command names. Raises ConfigError for a run without a checkpoint, or without that one."""
    digest = _digest({key: run.resolved.get(key) for key in ("bundle", "policies", "pipeline", "pipelines", "stages")})
    described: dict[str, Any] = {"name": f"{run.file.recipe} {BASE}", "recipe": run.file.recipe, "digest": digest}
    given = run.file.run_dir
    if given is None:
        if "checkpoint" in command.options:
            raise ConfigError(NO_CHECKPOINT)
        return Model(run, Path("."), None, {**described, "step": None})
    run_dir = Path(given)
    require_checkpoint(run_dir)
    step = meant_step(run_dir / CHECKPOINTS, str(command.options.get("checkpoint", "newest")))
    manifest = run_dir / CHECKPOINTS / f"step-{step:06d}" / "manifest.json"
    saved = hashlib.blake2b(manifest.read_bytes(), digest_size=8).hexdigest()
    name = f"{run_dir.resolve().name} step {step}"
    return Model(run, run_dir, step, {**described, "name": name, "step": step, "checkpoint": saved})


def _root(command: Command, run: ComposedRun) -> Path:
    """Where the folder `suites` is: --output, the run's folder, or here."""
    if "output" in command.options:
        return Path(str(command.options["output"])).expanduser()
    return Path(".") if run.file.run_dir is None else Path(run.file.run_dir)


def _folder(suite: Suite, model: Model, root: Path) -> Path:
    described = model.described
    if model.run.file.run_dir is None:
        name = str(described["recipe"]).replace("/", "-")
    else:
        step = BASE if described["step"] is None else f"step-{described['step']:06d}"
        own = Path(model.run_dir).resolve()
        name = step if root.resolve() == own else f"{own.name}-{step}"
    return root / FOLDER / suite.name / name


def _evaluated(suite: Suite, model: Model, root: Path, changes: Sequence[str], stage: Any) -> Path:  # Any: an option
    """Run the stages; returns the folder of the results."""
    folder = _folder(suite, model, root)
    make_folder("--output", folder)
    samples, scores = folder / "samples", folder / "scores"
    scorers = None
    if stage != "score":
        plan = plan_samples(model.run, suite, model.described)
        if stage is None:
            claim_scores(suite, scores)
            # Before samples are made, so that a scorer that cannot be had is said at once.
            scorers = build_scorers(suite) if missing_scores(scores, plan.num_parts) else None
        generate(model.run, model.run_dir, suite, plan, samples, model.checkpoint)
    if stage == "generate":
        Console().print(f"samples are in {samples}; score them with: --stage score", soft_wrap=True)
        return folder
    judged = score(suite, samples, scores, parts_of(samples), scorers, model.run.device)
    found = document(suite, model.described, judged, changes)
    for name, text in (suite.publish(judged) if suite.publish is not None else {}).items():
        write_whole(folder / name, text)
    shown = samples_to_show(judged)
    picture = sheet_of(shown, samples, suite.metrics[0].name)
    if picture is not None:
        picture.save(folder / "samples.png")
    write_whole(folder / "results.md", results_page(found, "samples.png" if picture else None, shown))
    write_whole(folder / RESULTS, json.dumps(found, indent=1) + "\n")
    return folder


def _other(against: str, suite: Suite, model: Model, root: Path, changes: Sequence[str], stage: Any) -> Path:
    # Any: an option
    """The folder of the results to compare with."""
    if against == BASE:
        if model.checkpoint is None:
            raise ConfigError(f"--against {BASE} is of a run; this is a model before training. Give other results.")
        described = {**model.described, "name": f"{model.described['recipe']} {BASE}", "step": None}
        del described["checkpoint"]
        return _evaluated(suite, dataclasses.replace(model, checkpoint=None, described=described), root, changes, stage)
    read_results(Path(against).expanduser())
    path = Path(against).expanduser()
    return path if path.is_dir() else path.parent


def _compare(suite: Suite, other: Path, folder: Path) -> None:
    before, after = read_results(other), read_results(folder)
    found: Document = compared(before, after)
    of_other, own = (_judged(suite, each) for each in (other, folder))
    pairs = pairs_to_show(of_other, own)
    picture = sheet_of_pairs(pairs, other / "samples", folder / "samples", suite.metrics[0].name)
    if picture is not None:
        picture.save(folder / "comparison.png")
    write_whole(folder / "comparison.md", comparison_page(found, "comparison.png" if picture else None, pairs))
    write_whole(folder / "comparison.json", json.dumps(found, indent=1) + "\n")
    Console().print(Markdown((folder / "comparison.md").read_text(encoding="utf-8").partition("![")[0]))


def _judged(suite: Suite, folder: Path) -> list[Judged]:
    """Samples with scores of a folder; none where results.json stands without them."""
    samples, scores = folder / "samples", folder / "scores"
    if not (samples / SETTINGS).is_file() or missing_scores(scores, parts_of(samples)):
        return []
    return read_judged(suite, samples, scores, parts_of(samples))


def _digest(content: Any) -> str:  # Any: a recipe's values
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
