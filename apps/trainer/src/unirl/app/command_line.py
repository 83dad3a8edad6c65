"""What was typed, as data. Imports nothing heavy, so that --help is quick."""

from __future__ import annotations

import argparse
import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path

from unirl.app.completion import complete, words
from unirl.app.without_recipe import RUNS_FOLDER, SHELLS, WITHOUT_RECIPE
from unirl.config.catalog import available
from unirl.types.errors import ConfigError

DEFAULT_RECIPE = "worlds/shapes/nft"
VERBS = {
    "run": "train (the default verb)",
    "list": "the recipes that come with the trainer; list worlds, algorithms or rewards: those",
    "show": "the whole recipe as YAML that can be run by path",
    "check": "find mistakes without weights, GPU or torch",
    "eval": "held-out evaluation of a recipe's model, or of a run's checkpoint; --suite: a published benchmark",
    "rehearse": "one step at true size on a device that computes nothing: memory, FLOPs, bytes sent; no weights",
    "plan": "how long a step takes on published devices, or on this machine: seconds by phase, from a rehearsal",
    "scale": "let members of a running run's served pools join or leave: scale RUN pool=N",
    "export": "write a run's checkpoint for use outside",
    "bench": "where the time of a recipe goes; of several, relative to the first",
    "profile": "one step under torch's profiler: a trace for Perfetto, and what costs most in words",
    "compare": "train several recipes under one budget (cpu_s=120 seeds=0,1,2) and tabulate them",
    "conformance": "measure what every engine does with every small model, as a table; of some models by name",
    "view": "a local web page over run directories: curves, samples, timelines (docs/guides/viewer.md)",
    "init": "write a small part that works, to be changed: init reward NAME, or algorithm, model, engine, recipe",
    "doctor": "what this machine can run, what is installed, and how to get what is missing",
    "completion": f"what makes a shell complete this command: completion {' | '.join(SHELLS)}",
    "data": "data list: the sets of prompts that recipes name; data prepare NAME: make one",
}
OPTIONS: dict[str, tuple[str, ...]] = {
    "resolve": ("run", "show"),
    "strict": ("check",),
    "values": ("check",),
    "all": ("check", "rehearse"),
    "fits": ("rehearse",),
    "answer_tokens": ("rehearse", "plan"),
    "on": ("plan",),
    "memory": ("check", "plan"),
    "gpus": ("plan",),
    "to": ("export", "init"),
    "merged": ("export",),
    "float32": ("export",),
    "policy": ("export",),
    "checkpoint": ("eval", "export"),
    "trust": ("run", "eval", "export"),
    "output": ("eval", "plan", "bench", "profile", "compare", "conformance"),
    "engines": ("conformance",),
    "cases": ("conformance",),
    "against": ("eval", "conformance"),
    "suite": ("eval",),
    "stage": ("eval",),
    "jobs": ("rehearse", "compare"),
    "warmup": ("bench", "profile"),
    "repeats": ("bench",),
    "out": ("data",),
    "from": ("data",),
    "split": ("data",),
    "overwrite": ("data",),
    "partial": ("data",),
    "host": ("view",),
    "port": ("view",),
    "token": ("view",),
}
"""Option -> the verbs that it means something for."""
SEVERAL = ("compare", "bench")
"""Verbs that take more than one recipe."""
VIEW_OPTIONS: dict[str, tuple[type[str] | type[int], str]] = {
    "--host": (str, "address to serve at (127.0.0.1: this machine alone)"),
    "--port": (int, "port to serve at (8317); 0 takes a free one"),
    "--token": (str, "what a browser must give; drawn and printed where --host is not this machine alone"),
}
VIEW_EPILOG = """examples:
  trainer view                                runs/, at http://127.0.0.1:8317/
  trainer view runs/worlds/arithmetic         the runs below one folder
  trainer view /mnt/shared/runs --port 8000   runs of another machine, by their files
  trainer view --host 0.0.0.0                 for other machines, with the address and token that it prints

Curves, samples, groups, timelines, recipes, logs, alarms and checkpoints: docs/guides/viewer.md.
"""
LISTS = ("recipes", "worlds", "algorithms", "rewards")
"""What `list` can list; the first where nothing is said."""
EPILOG = """examples:
  trainer                                     train the default recipe
  trainer shapes/flowgrpo num_rollouts=5      a packaged recipe with changes
  trainer my_recipe.yaml resume=auto          a file of your own, continued
  trainer shapes/nft parts/train=lora         the same recipe with LoRA; full trains all weights
  trainer check --all                         check every packaged recipe
  trainer list rewards                        the scorers: input, range, what to install
  trainer export runs/worlds/shapes/nft/20260101-120000 --to exported
  trainer scale runs/my_run rollout=6         let the served pool have six members from the next rollout on
  trainer view                                a page over all runs of runs/; or: trainer view FOLDER --port 8000
  trainer data prepare geneval                make a set of prompts; others are downloaded, or converted with --from
  trainer eval --suite shapes runs/my_run --against base
  trainer compare shapes/nft shapes/flowgrpo cpu_s=120 seeds=0,1,2 --output compared
"""


@dataclass(frozen=True)
class Command:
    """One invocation."""

    verb: str
    recipe: str
    """Packaged name, path of a YAML file, or folder of a run; for `list`, one of LISTS. For the verbs of WITHOUT_RECIPE
    what they act on: what `data` does, the folder of `view`, what `init` writes, the shell of `completion`."""
    overrides: tuple[str, ...] = ()
    options: dict[str, str | int | bool] = field(default_factory=dict)
    """The options that were given."""
    is_debug: bool = False
    recipes: tuple[str, ...] = ()
    """All recipes of `compare` and `bench`, in order; for verbs without a recipe the names that follow: the set of
    `data`, the models of `conformance`, the name of `init`. Empty for the other verbs, which take one."""


def parse(argv: list[str]) -> Command:
    """The command that `argv` spells. Raises ConfigError for what makes no sense; argparse exits for --help."""
    parser = _parser(takes_size=next((word for word in argv if not word.startswith("-")), "") == "plan")
    complete(parser)
    if argv[:1] == ["view"] and {"-h", "--help"} & set(argv):
        _view_parser().parse_args(["--help"])
    _refuse_dashes(argv, parser.format_help())
    given = vars(parser.parse_intermixed_args(argv))
    typed: list[str] = given.pop("words")
    is_debug, config_name, cfg = given.pop("debug"), given.pop("config_name"), given.pop("cfg")
    _refuse_misspelt_verb(typed)
    verb = typed.pop(0) if typed and typed[0] in VERBS else "run"
    if verb in WITHOUT_RECIPE:
        options = _options(verb, given)
        if cfg is not None or config_name is not None:
            raise ConfigError(f"{verb} takes no recipe. Leave --config-name and --cfg out.")
        meant, names = WITHOUT_RECIPE[verb](typed, options)
        return Command(verb, meant, (), options, is_debug, names)
    recipes = [word for word in typed if not _is_override(word)]
    overrides = tuple(word for word in typed if _is_override(word))
    if config_name is not None:
        recipes.append(config_name)
    if len(recipes) > 1 and verb not in SEVERAL:
        raise ConfigError(f"more than one recipe: {', '.join(recipes)}. Give one, and changes as key=value.")
    if verb == "list":
        recipes = recipes or [LISTS[0]]
        if recipes[0] not in LISTS or overrides:
            raise ConfigError(f"list takes one of {', '.join(LISTS)}, not {' '.join([*recipes, *overrides])!r}.")
    if cfg is not None:
        if verb != "run":
            raise ConfigError(f"--cfg shows the recipe instead of running it; it does nothing with {verb!r}.")
        verb = "show"
    options = _options(verb, given)
    several = tuple(recipes) if verb in SEVERAL else ()
    return Command(verb, recipes[0] if recipes else DEFAULT_RECIPE, overrides, options, is_debug, several)


def _options(verb: str, given: dict[str, str | int | bool | None]) -> dict[str, str | int | bool]:
    """The options that were given. Raises ConfigError for one that means nothing for the verb."""
    options = {name: value for name, value in given.items() if value is not None and value is not False}
    for name in options:
        if verb not in OPTIONS[name] or (name == "resolve" and verb == "run"):
            raise ConfigError(f"--{name} does nothing with {verb!r}; it is for: {', '.join(OPTIONS[name])}.")
    return options


def _refuse_misspelt_verb(words: list[str]) -> None:
    """Raises ConfigError if the first word is neither a verb nor a recipe, but nearly a verb."""
    if not words or words[0] in VERBS or _is_override(words[0]) or Path(words[0]).exists():
        return
    near = difflib.get_close_matches(words[0], (*VERBS, "train"), n=1)
    if near == ["train"]:
        near = ["run (or leave it out)"]
    if near and words[0] not in (name.rsplit("/", 1)[-1] for name in available()):
        raise ConfigError(f"unknown verb {words[0]!r}. Did you mean {near[0]}? The verbs: {', '.join(VERBS)}.")


def _refuse_dashes(argv: list[str], options: str) -> None:
    """Raises ConfigError for a value of the recipe that is written as an option."""
    for word in argv:
        name, _, value = word.partition("=")
        if re.fullmatch(r"--[a-z_]\w*(\.\w+)*", name) and f"{name} " not in options and f"{name}\n" not in options:
            near = difflib.get_close_matches(name.removeprefix("--"), OPTIONS, n=1)
            hint = f" Or did you mean --{near[0]}?" if near else ""
            raise ConfigError(
                f"there is no option {name}. Values of a recipe are key=value without dashes: "
                f"{name.removeprefix('--')}={value or 'VALUE'}.{hint}"
            )


def _is_override(word: str) -> bool:
    return "=" in word or word.startswith("~")


def _view_parser() -> argparse.ArgumentParser:
    """For the help of `view` alone; `_parser` parses."""
    parser = argparse.ArgumentParser(
        prog="trainer view",
        description="A local web page over run directories, live while they are written.\nIt reads their files, "
        "writes none, and needs no network.",
        epilog=VIEW_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", nargs="?", metavar="FOLDER", help=f"of a run, or one that runs lie below ({RUNS_FOLDER}/)"
    )
    for option, (kind, text) in VIEW_OPTIONS.items():
        parser.add_argument(option, type=kind, metavar="N" if kind is int else None, help=text)
    parser.add_argument("--debug", action="store_true", help="full traceback of an error")
    return parser


def _parser(*, takes_size: bool) -> argparse.ArgumentParser:
    """takes_size: True if --memory is followed by a size, as for `plan`; for `check` it is alone."""
    verbs = "\n".join(f"  {name:12} {text}" for name, text in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="trainer",
        usage="trainer [VERB] [RECIPE] [key=value ...] [options]",
        description=f"Reinforcement learning of multimodal models from recipes.\n\nverbs:\n{verbs}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    typed = parser.add_argument("words", nargs="*", metavar="VERB RECIPE key=value", help=argparse.SUPPRESS)
    setattr(typed, "completer", words)  # noqa: B010, where argcomplete looks for it
    parser.add_argument("--config-name", metavar="RECIPE", help="the recipe, as Hydra programs take it")
    parser.add_argument("--cfg", choices=["job"], help="show the recipe instead of running it")
    parser.add_argument("--resolve", action="store_true", help="show: replace interpolations by their values here")
    parser.add_argument("--strict", action="store_true", help="check: fail where this machine cannot run the recipe")
    parser.add_argument(
        "--values",
        action="store_true",
        help="check: also build schedules, options, ...; imports torch and the classes that the file names, so not for "
        "a file you do not trust (without it, check and show execute nothing of a recipe)",
    )
    parser.add_argument(
        "--all", action="store_true", help="check: every packaged recipe; rehearse: every one of a real model"
    )
    parser.add_argument("--fits", metavar="80GB", help="rehearse: fail where a device of this size is too small")
    parser.add_argument(
        "--answer-tokens",
        type=int,
        metavar="N",
        help="rehearse, plan: tokens of what an environment answers to a turn (512, as far as episodes have room)",
    )
    parser.add_argument("--on", metavar="h100", help="plan: h100, h200, a100, mi300, 910b, or here: this machine")
    memory = (
        "check: what each phase takes of a GPU, estimated from published sizes; plan --memory 80GB: find a layout for "
        "devices of this size"
    )
    if takes_size:
        parser.add_argument("--memory", metavar="80GB", help=memory)
    else:
        parser.add_argument("--memory", action="store_true", help=memory)
    parser.add_argument("--gpus", type=int, metavar="N", help="plan: find a layout for so many devices")
    parser.add_argument("--to", metavar="FOLDER", help="export, init: where to write")
    parser.add_argument("--merged", action="store_true", help="export: the whole model; else the LoRA alone")
    parser.add_argument(
        "--float32",
        action="store_true",
        help="export --merged: weights in float32, which keep small updates; else in the dtype of the loaded model",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="export: a copy of the weights, such as ema; of several policies one, or POLICY/ema",
    )
    parser.add_argument("--checkpoint", metavar="WHICH", help="eval, export: newest (the default), best or a step")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the code that the config.yaml of a run's folder names and that does not come with UniRL",
    )
    parser.add_argument(
        "--output",
        metavar="WHERE",
        help="eval, plan, bench, conformance: JSON file; profile, eval --suite: folder; compare: runs and table",
    )
    parser.add_argument("--suite", metavar="NAME", help="eval: a benchmark, such as geneval; a wrong name lists them")
    parser.add_argument("--stage", metavar="STAGE", help="eval --suite: generate or score alone; else both")
    parser.add_argument("--engines", metavar="A,B", help="conformance: these alone")
    parser.add_argument("--cases", metavar="A,B", help="conformance: these algorithms alone, or lora")
    parser.add_argument(
        "--against",
        metavar="FILE",
        help="conformance: fail where a cell of this table got worse; eval --suite: results to compare with, or base",
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="rehearse --all, compare: runs at a time (1)")
    parser.add_argument("--warmup", type=int, metavar="N", help="bench, profile: steps before those that are measured")
    parser.add_argument("--repeats", type=int, metavar="N", help="bench: timed steps")
    parser.add_argument("--out", metavar="FOLDER", help="data prepare: where to write (datasets/NAME)")
    parser.add_argument("--from", metavar="PATH", help="data prepare: a folder or file with what is published")
    parser.add_argument("--split", metavar="SPLIT", help="data prepare: train or test alone")
    parser.add_argument("--overwrite", action="store_true", help="data prepare: replace other files that are there")
    parser.add_argument(
        "--partial", action="store_true", help="data prepare: accept sources that are not the published ones whole"
    )
    for option, (kind, text) in VIEW_OPTIONS.items():
        parser.add_argument(option, type=kind, metavar="N" if kind is int else None, help=f"view: {text}")
    parser.add_argument("--debug", action="store_true", help="full traceback of an error")
    return parser
