"""What each verb does. Heavy libraries are imported only by the verbs that need them."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from unirl.app.command_line import Command
from unirl.app.environment import logging_to, this_machine
from unirl.app.kept_recipes import KeptRecipes
from unirl.app.memory import phases, table
from unirl.app.recipe import checked, code_of_others, composed, settled, trusts
from unirl.app.run_directory import (
    CONFIG_FILE,
    LOG_FILE,
    NO_CHECKPOINT,
    claimed_run_dir,
    make_folder,
    require_checkpoint,
)
from unirl.app.stopping import stop_on_signals
from unirl.config.catalog import available
from unirl.config.check import build_values, check_recipe, machine_findings, unread_rules
from unirl.config.instantiation import instantiate_at
from unirl.config.placement import ENV
from unirl.config.recipes import published, render
from unirl.config.runs import ComposedRun, named_copy
from unirl.config.schema import ENABLED
from unirl.trainer.reward_rules import ignored_prompt
from unirl.trainer.scaling import ask_for_sizes
from unirl.types.errors import ConfigError
from unirl.types.recipe import Fault

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from unirl.tracking.base import Tracker

Recipe = Mapping[str, Any]  # Any: a recipe's values


def show(command: Command) -> None:
    """Write the whole recipe to standard output."""
    sys.stdout.write(render(composed(command), is_resolved="resolve" in command.options))


def check(command: Command) -> None:
    """Check one recipe or all; what this machine lacks is a note, or an error with --strict; what is here and
    broken is an error. --memory adds what each phase takes of a GPU."""
    names = list(available()) if "all" in command.options else [command.recipe]
    machine = this_machine()
    # A recipe may come with files next to it, which are executed only where --values says so.
    unread = None if "values" in command.options else Path.cwd()
    for name in names:
        recipe = settled(composed(command, name))
        try:
            run = check_recipe(recipe, unread=unread)
            if "values" in command.options:
                build_values(run)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}" if len(names) > 1 else str(error)) from error
        notes = list(machine_findings(run, machine, unread=unread))
        refused = notes if "strict" in command.options else [note for note in notes if isinstance(note, Fault)]
        if refused:
            raise ConfigError("\n".join(f"{name}: {note}" if len(names) > 1 else note for note in refused))
        lines = [f"  not on this machine yet: {note}\n" for note in notes]
        if (warning := ignored_prompt(run)) is not None:
            lines.append(f"  warning: {warning}\n")
        if "memory" in command.options:
            lines += _memory(run)
        for module in unread_rules(run, unread) if unread is not None else ():
            lines.append(
                f"  the rules of {module} were left out, because check executes no file of yours unless asked: "
                f"uv run trainer check --values {shlex.quote(name)}\n"
            )
        if named := code_of_others(recipe):
            lines.append(f"  runs code that does not come with UniRL: {'; '.join(named)}\n")
        sys.stdout.write(f"{recipe['recipe']}: ok\n" + "".join(lines))


def _memory(run: ComposedRun) -> list[str]:
    """What each phase takes of a GPU, or why that is not known."""
    try:
        return [f"{line}\n" for line in table(phases(run))]
    except ConfigError as error:
        return [f"  no estimate of memory: {error}\n"]


def run(command: Command) -> None:
    """Train."""
    config = composed(command)
    run = checked(config, trusts=trusts(command))
    with claimed_run_dir(run.resolved, datetime.datetime.now()) as (run_dir, is_resumed):
        summary = _trained(config, run, run_dir, is_resumed=is_resumed)
    from unirl.app.report import After, final_screen

    trains_lora = {name: policy.backend.get("lora") is not None for name, policy in run.policies.items()}
    after = After(trains_lora, evaluates=run.evaluation is not None, needs_trust=bool(code_of_others(run.resolved)))
    Console().print(final_screen(summary, after), crop=False)


def _trained(config: DictConfig, run: ComposedRun, run_dir: Path, *, is_resumed: bool) -> dict[str, Any]:
    """Run the recipe in its directory; returns its summary."""
    run = run.with_values(resume="auto" if is_resumed else None, run_dir=str(run_dir))
    shown = {**published(config), "run_dir": None}  # a folder of this machine
    trackers = make_trackers(run.resolved)
    rendered = rendered_for_run(config)
    if is_resumed:
        trackers.append(KeptRecipes(rendered))
    else:
        (run_dir / CONFIG_FILE).write_text(rendered, encoding="utf-8")
    from unirl.trainer.commands import run_recipe

    try:
        with logging_to(run_dir / LOG_FILE), stop_on_signals() as stop:
            return run_recipe(run, run_dir, trackers, stop, published=shown)
    finally:
        for tracker in trackers:
            tracker.close()


def evaluate(command: Command) -> None:
    """Held-out evaluation; of the newest checkpoint where a run is given. With --suite by a published benchmark."""
    if "suite" in command.options:
        from unirl.suites.command import evaluate_suite

        evaluate_suite(command)
        return
    for option in ("stage", "against"):
        if option in command.options:
            raise ConfigError(f"--{option} of eval needs --suite NAME.")
    run = checked(composed(command), asks_teachers=False, trusts=trusts(command))
    _make_output_folder(command)
    from unirl.app.report import evaluation_table
    from unirl.trainer.commands import evaluate_recipe

    run_dir = run.file.run_dir
    if run_dir is None and "checkpoint" in command.options:
        raise ConfigError(NO_CHECKPOINT)
    if run_dir is not None:
        require_checkpoint(Path(run_dir))
        result = evaluate_recipe(run, Path(run_dir), checkpoint=_checkpoint(command))
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = evaluate_recipe(run, Path(folder), checkpoint=None)
    record = result.record()
    preferred = run.file.save.best_metric
    Console().print(evaluation_table(None, record, preferred))
    if "output" in command.options:
        output = Path(str(command.options["output"]))
        output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        from unirl.tracking.gallery import image_grid, results
        from unirl.types.samples import Image, Video

        made = [each for each in results(result.records) if isinstance(each.media, (Image, Video))]
        if made:
            image_grid(made, preferred).save(output.with_suffix(".png"))


def rehearse(command: Command) -> int:
    """One step of a recipe, or of all of real size, as one rank of its true world, with no GPU and no weights; returns
    the exit status, 1 where one does not fit or cannot be rehearsed."""
    from unirl.app.rehearsal.command import rehearse_recipes

    return rehearse_recipes(command)


def plan(command: Command) -> int:
    """Write the seconds of a step, or a layout that fits; returns the exit status, 1 where none does."""
    from unirl.app.plan.command import plan_recipe

    return plan_recipe(command)


def scale(command: Command) -> None:
    """Ask a run for other sizes of its served pools and those of kind env, for its next rollout and those after it."""
    run_dir = Path(command.recipe).expanduser()
    config = run_dir / CONFIG_FILE
    if not config.is_file():
        raise ConfigError(f"scale takes the folder of a run; {run_dir} has no {CONFIG_FILE}.")
    pools = (yaml.safe_load(config.read_text(encoding="utf-8")) or {}).get("pools") or {}
    served = [name for name, pool in pools.items() if pool.get("served") or pool.get("kind") == ENV]
    sizes = {}
    for word in command.overrides:
        name, _, size = word.partition("=")
        if name not in served:
            raise ConfigError(
                f"{word}: {name} is no served pool of this run, nor one of kind env; there are "
                f"{', '.join(served) or 'none'} (pools.<name>.served, pools.<name>.kind)."
            )
        if not size.isdecimal() or int(size) < 1:
            raise ConfigError(f"{word}: a pool has at least one member, so it cannot be scaled to {size or 'nothing'}.")
        sizes[name] = int(size)
    if not sizes:
        raise ConfigError(f"scale takes pools and their sizes, such as {(served or ['rollout'])[0]}=2.")
    ask_for_sizes(run_dir, sizes)
    sys.stdout.write(f"asked for {', '.join(command.overrides)} from the next rollout on, see the log of the run\n")


def export(command: Command) -> None:
    """Write a run's newest checkpoint for use outside."""
    if "to" not in command.options:
        raise ConfigError("export needs --to FOLDER.")
    _require_run(command)
    config = composed(command)
    run = checked(config, asks_teachers=False, trusts=trusts(command), is_exported=True)
    run_dir = run.file.run_dir
    if run_dir is None:
        raise ConfigError("export needs the run to take weights from: uv run trainer export RUN_FOLDER --to FOLDER.")
    require_checkpoint(Path(run_dir))
    is_merged = "merged" in command.options
    policy = str(command.options.get("policy", "default"))
    name, _ = named_copy(run, policy)
    if not is_merged and run.policies[name].backend.get("lora") is None:
        raise ConfigError("this run trained all weights, there is no LoRA to write. Add --merged.")
    in_float32 = "float32" in command.options
    if in_float32 and not is_merged:
        raise ConfigError("--float32 is for whole models: a LoRA has the dtype that it was trained in. Add --merged.")
    folder = Path(str(command.options["to"]))
    make_folder("--to", folder)
    from unirl.trainer.commands import export_recipe

    lost = export_recipe(
        run,
        Path(run_dir),
        folder,
        merged=is_merged,
        policy=policy,
        checkpoint=_checkpoint(command),
        published=published(config),
        in_float32=in_float32,
    )
    sys.stdout.write(f"wrote {folder}\n")
    if lost is not None:
        sys.stdout.write(f"{lost}{'' if in_float32 else ' --float32 keeps the update.'}\n")


def _require_run(command: Command) -> None:
    """Raises ConfigError unless a run is named: its folder, or `run_dir`, on the command line or in a file."""
    named = Path(command.recipe).expanduser()
    is_run = named.is_file() or (named / CONFIG_FILE).is_file()
    if not is_run and not any(word.startswith("run_dir=") for word in command.overrides):
        raise ConfigError(
            f"{named} is no folder of a run (no {CONFIG_FILE} in it), and export needs the run to take weights from: "
            "uv run trainer export RUN_FOLDER --to FOLDER."
        )


def bench(command: Command) -> None:
    """Measure a recipe, or several against the first; JSON on standard output, or in --output."""
    runs = [checked(composed(command, name)) for name in command.recipes or (command.recipe,)]
    _make_output_folder(command)
    from unirl.app.bench import bench_recipe, relative_to_first

    warmup, repeats = (int(command.options.get(name, usual)) for name, usual in (("warmup", 1), ("repeats", 3)))
    reports = [bench_recipe(run, warmup=warmup, repeats=repeats) for run in runs]
    content = reports[0] if len(reports) == 1 else {"training": relative_to_first(reports), "reports": reports}
    report = json.dumps(content, indent=2) + "\n"
    if "output" in command.options:
        Path(str(command.options["output"])).write_text(report, encoding="utf-8")
    else:
        sys.stdout.write(report)


def profile(command: Command) -> None:
    """Profile one step of a recipe into --output, and say what costs most."""
    run = checked(composed(command))
    folder = Path(str(command.options.get("output", Path("profiles") / run.resolved["recipe"])))
    make_folder("the folder of --output,", folder)
    from unirl.app.profiling import as_text, profile_recipe

    costs = profile_recipe(run, folder, warmup=int(command.options.get("warmup", 1)))
    sys.stdout.write(as_text(costs, folder))


def compare(command: Command) -> int:
    """Train recipes side by side; returns the exit status, 1 where a run failed."""
    from unirl.app.compare import compare_recipes

    return compare_recipes(command)


def conformance(command: Command) -> int:
    """Measure the matrix; returns the exit status, 1 where a cell failed or got worse than in --against."""
    from unirl.app.conformance.command import measure_matrix

    return measure_matrix(command)


def doctor(command: Command) -> int:
    """Say what this machine can run; returns the exit status, 1 where the installation itself is broken."""
    from unirl.app.doctor import examine

    return examine()


# What the verbs share -----------------------------------------------------------------------------------------------


def make_trackers(recipe: Recipe) -> list[Tracker]:
    """The trackers that the recipe names and has not switched off."""
    chosen = {name: node for name, node in (recipe.get("trackers") or {}).items() if node and node.get(ENABLED, True)}
    return [
        instantiate_at(f"trackers.{name}", {key: value for key, value in node.items() if key != ENABLED})
        for name, node in chosen.items()
    ]


def rendered_for_run(config: DictConfig) -> str:
    """The recipe as its run keeps it: whole, and free of where this run lies, so that it starts another one."""
    plain = config.copy()
    plain.run_dir = None
    plain.resume = None
    plain.resume_changes = "refuse"
    return render(plain)


def _make_output_folder(command: Command) -> None:
    if "output" in command.options:
        make_folder("the folder of --output,", Path(str(command.options["output"])).parent)


def _checkpoint(command: Command) -> str:
    return str(command.options.get("checkpoint", "newest"))
