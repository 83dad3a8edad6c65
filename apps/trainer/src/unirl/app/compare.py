"""`trainer compare`: recipes side by side, from one base, under one budget of CPU seconds and one evaluation.

A run is a child process, `trainer RECIPE CHANGES`, in <output>/<recipe>/seed<k>. One that is finished there under the
same settings is read, not repeated: a comparison goes on where it stopped, and another recipe costs only its own runs.
docs/guides/compare.md describes what comes out.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from unirl.app.command_line import Command
from unirl.app.compare_runs import Run, Settings, carry_out, differences, digest, require_own_settings
from unirl.app.comparison import RecipeResult, SeedResult, as_document, as_markdown, complete_run
from unirl.app.duels import as_markdown as duels_as_markdown
from unirl.app.duels import duels_of
from unirl.app.recipe import checked, composed
from unirl.app.run_directory import RUNS, make_folder
from unirl.app.stopping import stop_on_signals
from unirl.config.instantiation import TARGET, instantiate_at
from unirl.config.runs import ComposedRun
from unirl.types.errors import ConfigError
from unirl.types.recipe import Policy

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from unirl.trainer.evaluation import EvaluationConfig

logger = logging.getLogger(__name__)

DEFAULT_OUTPUT = Path(RUNS) / "compare"
DEFAULT_CPU_S = 120.0
DEFAULT_SEEDS = (0, 1, 2)
NUM_EVALUATIONS = 6
"""Evaluations in the budget, besides the one of the base."""
NUM_ROLLOUTS = 10_000
"""More than a budget is meant to allow, so that CPU seconds end a run."""
OWNED = ("seed", "max_cpu_s", "run_dir", "resume", "eval.before", "eval.interval", "eval.interval_cpu_s")
"""What the comparison sets in every run."""
WITHOUT_EFFECT = ("run_dir", "resume", "resume_changes", "trackers")
"""Top-level keys that change no result."""
FAILED = 1
"""Exit status where a run failed."""

Recipe = dict[str, Any]  # Any: a recipe's values


@dataclass(frozen=True)
class Plan:
    """What is compared, as typed."""

    names: tuple[str, ...]
    overrides: tuple[str, ...]
    """Changes of every recipe."""
    cpu_s: float
    """CPU seconds of training a run."""
    seeds: tuple[int, ...]
    output: Path
    num_jobs: int
    """Runs at a time."""

    @property
    def changes(self) -> tuple[str, ...]:
        """Overrides of every run; the user may set a smaller num_rollouts."""
        return (
            f"num_rollouts={NUM_ROLLOUTS}",
            *self.overrides,
            f"max_cpu_s={self.cpu_s}",
            "eval.before=true",
            "eval.interval=0",
            f"eval.interval_cpu_s={self.cpu_s / NUM_EVALUATIONS}",
        )


@dataclass(frozen=True, eq=False)
class Contender:
    """One recipe with the changes of the comparison, checked."""

    typed: str
    run: ComposedRun
    """With the first seed."""
    unresolved: Recipe
    """With its interpolations, and so free of where things lie on this machine; without what changes no result."""

    @property
    def name(self) -> str:
        """The recipe's own name."""
        return str(self.recipe["recipe"])

    @property
    def recipe(self) -> Mapping[str, Any]:  # Any: a recipe's values
        """As it was composed."""
        return self.run.resolved

    @property
    def policy(self) -> Policy:
        """The policy that samples, whose base and algorithms are compared."""
        return self.run.policy

    @property
    def algorithm(self) -> str:
        """Name of its algorithm's class."""
        return ", ".join(part.name for part in self.policy.algorithms.values())

    @property
    def metric(self) -> str:
        """The held-out mean that it is judged by."""
        return self.run.file.save.best_metric

    @functools.cached_property
    def evaluation(self) -> EvaluationConfig:
        """Its `eval` section."""
        from unirl.trainer.build.assembly import evaluation_of

        evaluation = evaluation_of(self.run)
        if evaluation is None:
            raise ConfigError(f"{self.typed} has no held-out evaluation to be compared by. Add eval.prompts.")
        return evaluation


def compare_recipes(command: Command) -> int:
    """Run what is missing, write comparison.json, comparison.md and comparison.png; returns the exit status.

    Every recipe is composed, checked and compared with the others before anything runs (ConfigError). A run that fails
    leaves the others alone and makes the status 1. The first signal lets the running children save and end, and raises
    KeyboardInterrupt after what is finished has been written.
    """
    plan = read_plan(command)
    contenders = read_contenders(plan)
    require_one_evaluation(contenders)
    runs = [make_run(plan, contender, seed) for seed in plan.seeds for contender in contenders]
    require_own_settings(runs)
    make_folder("--output", plan.output)
    missing = [run for run in runs if run.summary() is None]
    logger.info("%d runs of %g CPU s of training, %d of them finished", len(runs), plan.cpu_s, len(runs) - len(missing))
    errors: dict[Run, str] = {}
    with stop_on_signals() as stop:
        with closing(carry_out(missing, plan.num_jobs, stop)) as ended:
            for run, error in ended:
                if error is None:
                    logger.info("%s is finished", run.label)
                elif not stop.is_set():
                    errors[run] = error
                    logger.error("%s failed: %s", run.label, error)
                write_results(plan, contenders, runs, errors)
        sys.stdout.write(write_results(plan, contenders, runs, errors))
        if stop.is_set():
            sys.stderr.write("interrupted; the same command continues from here\n")
            raise KeyboardInterrupt
    if errors:
        sys.stderr.write("failed: " + ", ".join(run.label for run in errors) + "\n")
        return FAILED
    return 0


# What is compared ---------------------------------------------------------------------------------------------------


def read_plan(command: Command) -> Plan:
    """The comparison that a command asks for. Raises ConfigError for values that make no sense."""
    if not command.recipes:
        raise ConfigError(
            "compare needs recipes: uv run trainer compare RECIPE RECIPE ... See them all with: uv run trainer list"
        )
    own = {"cpu_s": str(DEFAULT_CPU_S), "seeds": ",".join(map(str, DEFAULT_SEEDS))}
    overrides = []
    for word in command.overrides:
        key, _, value = word.partition("=")
        if key in own:
            own[key] = value
        elif key.lstrip("+~") == "eval":
            raise ConfigError(f"{word}: recipes are compared by their held-out evaluations. Remove it.")
        elif key.lstrip("+~") in OWNED:
            raise ConfigError(
                f"{word}: compare sets {key.lstrip('+~')} in every run. Remove it; use cpu_s= and seeds=."
            )
        else:
            overrides.append(word)
    num_jobs = int(command.options.get("jobs", 1))
    if num_jobs < 1:
        raise ConfigError(f"--jobs {num_jobs} must be at least 1.")
    return Plan(
        names=command.recipes,
        overrides=tuple(overrides),
        cpu_s=_seconds(own["cpu_s"]),
        seeds=_seeds(own["seeds"]),
        output=Path(str(command.options.get("output", DEFAULT_OUTPUT))).expanduser(),
        num_jobs=num_jobs,
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"cpu_s={text} must be a number of seconds above 0, such as cpu_s=120.")
    return value


def _seeds(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(re.fullmatch(r"\d+", part) for part in parts) or len({int(part) for part in parts}) < len(parts):
        raise ConfigError(f"seeds={text} must be different whole numbers with commas between, such as seeds=0,1,2.")
    return tuple(int(part) for part in parts)


def read_contenders(plan: Plan) -> list[Contender]:
    """Every recipe, composed and checked. Raises ConfigError naming the recipe, also for two of one name."""
    found: dict[str, Contender] = {}
    for typed in plan.names:
        try:
            config = composed(Command("run", typed, (*plan.changes, f"seed={plan.seeds[0]}")))
            contender = Contender(typed, checked(config), _unresolved(config))
        except ConfigError as error:
            raise ConfigError(f"{typed}: {error}") from error
        if contender.name in found:
            raise ConfigError(
                f"{found[contender.name].typed} and {typed} are both called {contender.name}, and would write to one "
                "folder. Give each recipe once, and your own recipe its own `recipe:`."
            )
        found[contender.name] = contender
    return list(found.values())


def _unresolved(config: DictConfig) -> Recipe:
    # cast: what `checked` has resolved to a mapping is one here too
    values = cast("dict[str, Any]", OmegaConf.to_container(config))
    return {key: value for key, value in values.items() if key not in WITHOUT_EFFECT}


def require_one_evaluation(contenders: Sequence[Contender]) -> None:
    """Raise ConfigError, with key and both values, if recipes differ in base, prompts or evaluation.

    Recipes of one kind of data source must read the same data; pairs of a preference method are no prompts.
    """
    first = contenders[0]
    by_source: dict[str, Contender] = {}
    found = []
    for other in contenders:
        twin = by_source.setdefault(str(other.recipe["data"][TARGET]), other)
        for one, left, right in (
            (first, compared_settings(first), compared_settings(other)),
            (twin, {"data.path": twin.recipe["data"].get("path")}, {"data.path": other.recipe["data"].get("path")}),
        ):
            found += [f"{key} = {a} in {one.name}, {b} in {other.name}." for key, a, b in differences(left, right)]
    if found:
        raise ConfigError(
            "\n".join([*found, "Recipes are compared from one base and by one evaluation. Set these to one value."])
        )


def compared_settings(contender: Contender) -> Settings:
    """What must agree between recipes: the base, and all that an evaluation depends on besides weights."""
    recipe = contender.recipe
    scorers, metric = recipe["reward"]["scorers"], contender.metric
    scorer = metric.split("/")[0]
    judged_by = {scorer: scorers[scorer]} if scorer in scorers else scorers
    return {
        "device": recipe["device"],
        "bundle": {"pretrained_model": contender.policy.bundle.get("pretrained_model")},
        "save": {"best_metric": metric},
        "pipeline": {"schedule": contender.policy.pipeline.get("schedule")},
        "reward": {"scorers": judged_by} | ({} if scorer in scorers else {"weights": recipe["reward"].get("weights")}),
        **contender.evaluation.settings(instantiate_at("sampling", recipe["sampling"])),
    }


def make_run(plan: Plan, contender: Contender, seed: int) -> Run:
    """The run of a recipe with a seed."""
    folder = plan.output / contender.name / f"seed{seed}"
    changes = (*plan.changes, f"seed={seed}", f"run_dir='{folder}'", "resume=auto")
    files = {
        "bundle.pretrained_model": contender.policy.bundle.get("pretrained_model"),
        "data.path": contender.recipe["data"].get("path"),
        "eval.prompts": contender.recipe["eval"]["prompts"],
    }
    digests = {key: digest(str(path)) for key, path in files.items()}
    settings = {"recipe": {**contender.unresolved, "seed": seed}, "files": digests}
    command = (sys.executable, "-m", "unirl.app.main", contender.typed, *changes)
    return Run(contender.name, seed, folder, command, json.loads(json.dumps(settings)))


# Results ------------------------------------------------------------------------------------------------------------


def write_results(plan: Plan, contenders: Sequence[Contender], runs: Sequence[Run], errors: Mapping[Run, str]) -> str:
    """Write the table as JSON and Markdown, and the image; returns the Markdown."""
    first = contenders[0]
    settings = {
        "cpu_s": plan.cpu_s,
        "seeds": list(plan.seeds),
        "overrides": list(plan.overrides),
        "metric": first.metric,
        "columns": list(first.evaluation.columns),
        "base_model": _short_name(str(first.policy.bundle.get("pretrained_model"))),
    }
    results = [
        RecipeResult(
            contender.name,
            contender.algorithm,
            tuple(_result(run, plan, first, errors.get(run)) for run in runs if run.name == contender.name),
        )
        for contender in contenders
    ]
    document = as_document(settings, results)
    document["duels"] = duels_of(document, plan.output)
    (plan.output / "comparison.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    table = as_markdown(document) + duels_as_markdown(document["duels"])
    (plan.output / "comparison.md").write_text(table, encoding="utf-8")
    if any(recipe["final"] is not None for recipe in document["recipes"]):
        from unirl.app.comparison_picture import draw

        draw(document, plan.output / "comparison.png")
    return table


def _short_name(model: str) -> str:
    """owner/model of a hub; of a folder the last two names, which do not tell where things lie on this machine."""
    return "/".join(Path(model).parts[-2:])


def _result(run: Run, plan: Plan, first: Contender, error: str | None) -> SeedResult:
    folder, summary = str(run.folder.relative_to(plan.output)), run.summary()
    if summary is not None:
        return complete_run(run.seed, folder, summary, first.metric, first.evaluation.columns)
    return SeedResult(run.seed, folder, "unfinished" if error is None else "failed", error)
