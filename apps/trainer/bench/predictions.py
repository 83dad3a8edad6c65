"""`trainer plan` beside `trainer bench` on this machine: predicted and measured CPU seconds of a step.

    uv run python apps/trainer/bench/predictions.py [RECIPE ...] [--output FILE]

Without recipes all embedded ones; those that `bench` cannot measure are named with the reason. One process makes steps
and another one plans them, each with one thread, in turn: a machine that others use changes its pace within minutes,
and so changes it for both. Seconds are medians of turns, some of which fall into a burst of others' work; of a turn
means of its steps, which may draw how deep they train.

A plan takes every text to be as long as it may be. So training on texts is planned at the mean length of those that are
sampled next to each turn, and their rollout at as many tokens as are decoded for each: on the line through the plans of
two whole numbers of tokens. Episodes are planned for each number of turns that some of them have. Where rewards say how
many samples are trained on, those of each turn are planned, and where the depth of training is drawn, the mean of the
drawn ones. A teacher is the model that the run starts from, which computes as much as a trained one.
"""

# ruff: noqa: INP001, T201 - a script, no package
from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unirl.algorithms.alignprop import AlignProp
from unirl.algorithms.reward_gradient import Denoising
from unirl.app.bench import Benched, Step, stepping
from unirl.app.command_line import Command, parse
from unirl.app.environment import packaged_path, prepare_process, settle_on_cpu
from unirl.app.meters import meter_of
from unirl.app.plan.here import Here
from unirl.app.plan.predict import predicted
from unirl.app.recipe import composed, settled
from unirl.app.rehearsal.branching import branching_of
from unirl.app.rehearsal.command import USUAL_BYTES, rehearsed, tokens_of_answers
from unirl.config.catalog import available
from unirl.config.check import check_recipe
from unirl.config.runs import ComposedRun
from unirl.distributed.runtime import LocalRuntime
from unirl.rehearsal.repeats import replaced
from unirl.types.errors import UniRLError
from unirl.types.rollout import RolloutResp
from unirl.types.segments import TextSegment

WORLDS = "worlds/"
PHASES = ("rollout", "reward", "train")
TURNS = 2
LEAST_S = 1.5
"""Seconds of the steps of a turn."""
MEAN_STEPS = 8
"""Least steps of a turn where rollouts differ in what they compute; plans are of their mean."""
FIRST = 3
"""Steps before the first turn: warm-up, and what is planned of them."""

Report = dict[str, Any]  # Any: JSON
Answers = Callable[[Sequence[Command]], Generator[Report, int]]


def main() -> None:
    """Write a row for each recipe, then how many are within 15 %; or be one of the two processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--output")
    parser.add_argument("--answers", choices=("steps", "plans"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    prepare_process()
    if given.answers:
        return answer(given.answers)
    rows: list[Report] = []
    steps, plans = Process("steps"), Process("plans")
    print("| recipe | rollout s, predicted | measured | train s, predicted | measured | step, predicted / measured |")
    print("|---|---|---|---|---|---|")
    for recipe in given.recipes or [name for name in available() if name.startswith(WORLDS)]:
        row = compared(recipe, steps, plans)
        rows.append(row)
        if "error" in row:
            print(f"| `{recipe}` | {row['error']} |", flush=True)
        else:
            rollout, train = row["rollout"], row["train"]
            print(
                f"| `{recipe}` | {rollout[0]:.2f} | {rollout[1]:.2f} | {train[0]:.2f} | {train[1]:.2f} "
                f"| {row['ratio']:.2f} |",
                flush=True,
            )
        if given.output:
            Path(given.output).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    near = sum(abs(ratio - 1) <= 0.15 for ratio in ratios)
    print(f"\n{near} of {len(ratios)} steps are within 15 % of the prediction.")
    return None


def checked(command: Command) -> ComposedRun:
    """The run of a recipe."""
    return check_recipe(settled(composed(command)))


def not_measured(run: ComposedRun) -> str | None:
    """Why one process does not do all of a recipe; None if it does."""
    if any(stage.engine.ability("has_own_weights") for stage in run.stages):
        return "left out: its engine is apart"
    if run.file.scouts is not None:
        return "left out: rehearsals leave its scouts out"
    if run.resolved["runtime"] != "local" or run.file.schedule.kind != "sync":
        return "left out: its phases overlap, or are those of several processes"
    return None


# The two processes ---------------------------------------------------------------------------------------------------


def answer(what: str) -> None:
    """Answer each line, JSON in and out: of lists of words, what recipes with them make; of a number, seconds of each
    phase, the mean of so many steps, or planned with every operator timed anew."""
    answers: Answers = answers_of_steps if what == "steps" else answers_of_plans
    current: Generator[Report, int] | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if isinstance(asked, list):
                if current is not None:
                    current.close()
                _set_teacher(asked[0][0])
                current = answers([parse(["plan", *words]) for words in asked])
                said = next(current)
            elif current is not None:
                said = current.send(asked)
        except UniRLError as error:
            said = {"error": str(error)}
        print(json.dumps(said), flush=True)


def answers_of_steps(commands: Sequence[Command]) -> Generator[Report, int]:
    """What the first steps made, then seconds."""
    (run,) = map(checked, commands)
    settle_on_cpu(run.device)
    with stepping(run, meter_of(run.device)) as benched, drawn_depths(run, benched) as depths:
        steps = [benched.step() for _ in range(FIRST)]
        flops = benched.flops()
        found: Report = {"step_s": sum(_seconds(steps[-1], phase) for phase in PHASES), "flops": flops}
        while True:
            found["trained_samples"] = statistics.mean(step.num_trained for step in steps)
            found["texts"] = benched.sampled(run.batch_size, _texts)
            found["depth"] = statistics.mean(depths) if depths else None
            num = yield found
            depths.clear()
            steps = [benched.step() for _ in range(num)]
            found = {"seconds": {phase: statistics.mean(_seconds(step, phase) for step in steps) for phase in PHASES}}


@contextmanager
def drawn_depths(run: ComposedRun, benched: Benched) -> Generator[list[float]]:
    """Within it, the fractions of the denoising steps that rollouts train through, where those are drawn."""
    runtime = benched.runtime
    algorithm = runtime.component("algorithm") if isinstance(runtime, LocalRuntime) and not run.is_staged else None
    found: list[float] = []
    if not isinstance(algorithm, AlignProp):
        yield found
        return
    first_step = algorithm.first_step

    def noted(steps: Denoising) -> int:
        first = first_step(steps)
        found.append(1 - first / steps.num_steps)
        return first

    with replaced(algorithm, "first_step", noted):
        yield found


def _texts(resp: RolloutResp) -> list[list[int]]:
    """Tokens of each turn of each text of a rollout and, negative, of what was read in between."""
    segment = resp.root_track().segment
    if not isinstance(segment, TextSegment):
        return []
    if segment.loss_mask is None:
        return [[num] for num in segment.lengths.tolist()]
    runs = [itertools.groupby(mask.tolist()) for mask in segment.unpack("loss_mask")]
    return [[len(list(own)) if is_written else -len(list(own)) for is_written, own in text] for text in runs]


def _seconds(step: Step, phase: str) -> float:
    return step.spent[phase].seconds if phase in step.spent else 0.0


def answers_of_plans(commands: Sequence[Command]) -> Generator[Report, int]:
    """What was counted of each, then seconds."""
    runs = [checked(command) for command in commands]
    every = [
        rehearsed(run, USUAL_BYTES, tokens_of_answers(command)) for run, command in zip(runs, commands, strict=True)
    ]
    every = [replace(found, operators={phase: found.operators.get(phase, {}) for phase in PHASES}) for found in every]
    work = next(iter(every[0].works.values()))
    flops = [{phase: (num, 0) for phase, num in found.flops.items()} for found in every]
    yield {"flops": flops, "trained_samples": work.num_kept, "depth": work.mean_depth}
    while True:
        clock = Here(runs[0].device)
        plans = [predicted(found, clock) for found in every]
        seconds = [
            {phase: (plan[phase].device_s, plan[phase].host_s) if phase in plan else (0.0, 0.0) for phase in PHASES}
            for plan in plans
        ]
        yield {"seconds": seconds}


def _set_teacher(recipe: str) -> None:
    if recipe.endswith("/distill"):
        world = recipe.removeprefix(WORLDS).split("/", maxsplit=1)[0]
        os.environ["TEACHER_MODEL"] = packaged_path(world, "checkpoint")


class Process:
    """One that answers until it is closed."""

    def __init__(self, answers: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--answers", answers],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, asked: list[list[str]] | int) -> Report:
        """Its answer. Raises RuntimeError with what it says that stands in the way."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("closed")
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with {self._process.wait()}")
        found = json.loads(line)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found


def compared(recipe: str, steps: Process, plans: Process) -> Report:
    """Seconds of each phase, predicted and measured, or why not."""
    _set_teacher(recipe)
    run = checked(parse(["plan", recipe]))
    if (reason := not_measured(run)) is not None:
        return {"recipe": recipe, "error": reason}
    try:
        made = steps.ask([[recipe]])
        return row_of(run, made, steps, plans)
    except RuntimeError as error:
        return {"recipe": recipe, "error": str(error)}


def row_of(run: ComposedRun, made: Report, steps: Process, plans: Process) -> Report:
    """Both in turn."""
    num_steps = max(MEAN_STEPS if branching_of(run) is not None else 1, math.ceil(LEAST_S / made["step_s"]))
    line = Line.of(made["texts"])
    kept = of_kept(run, made["trained_samples"])
    counted = plans.ask([[str(run.resolved["recipe"]), *kept, *words] for words in line.words(run)])
    turns = []
    texts = made["texts"]
    for _ in range(TURNS):
        measured, planned = steps.ask(num_steps), plans.ask(1)
        seconds = line.of_phases(planned["seconds"], texts + measured["texts"])
        if keeps_by_reward(run):
            seconds["train"] *= measured["trained_samples"] / counted["trained_samples"]
        if measured["depth"]:
            seconds["train"] *= measured["depth"] / counted["depth"]
        turns.append((seconds, measured["seconds"]))
        texts = measured["texts"]
    found: Report = {"recipe": run.resolved["recipe"], "turns": turns}
    for phase in PHASES:
        found[phase] = [statistics.median(turn[which][phase] for turn in turns) for which in (0, 1)]
    found["ratio"] = sum(found[phase][0] for phase in PHASES) / sum(found[phase][1] for phase in PHASES)
    flops = line.of_phases(counted["flops"], made["texts"])
    found["flops"] = {phase: [flops[phase], made["flops"].get(phase, 0)] for phase in PHASES}
    return found


# Texts of other lengths than the plan's ------------------------------------------------------------------------------

Texts = Sequence[Sequence[int]]
"""As `_texts` gives them."""


Pair = tuple[Report, Report]
"""Seconds or FLOPs of the device and seconds of the host by phase, of turns of `low` and of `high` tokens."""


@dataclass(frozen=True)
class Line:
    """The plans of turns of `low` and of `high` tokens, for 1 to `num_turns` turns; one plan where no texts are made.
    What others take lies on the line through them."""

    low: int | None
    high: int
    num_turns: int
    answer_tokens: int

    @classmethod
    def of(cls, texts: Texts) -> Line:
        """The line near these texts."""
        if not texts:
            return cls(None, 0, 1, 0)
        read = [-num for text in texts for num in text if num < 0]
        answer_tokens = round(statistics.mean(read)) if read else 0
        num_turns, low = max(len(written(text)) for text in texts), math.floor(mean_tokens(texts))
        # A line through close lengths is too unsure for turns that are several times as long.
        longest = max(max(written(text)) for text in texts) if num_turns > 1 else 0
        return cls(low, max(low + 1, longest), num_turns, answer_tokens)

    def words(self, run: ComposedRun) -> list[list[str]]:
        """What makes a recipe each of the plans; of episodes last those of one prompt."""
        if self.low is None:
            return [[]]
        pair = [of_length(run, num) for num in (self.low, self.high)]
        if run.stages[0].turns is None:
            return pair
        answers = ["--answer-tokens", str(self.answer_tokens)]
        turns = [[f"turns.max_turns={num}"] for num in range(1, self.num_turns + 1)]
        return [[*own, *more, *answers] for more in (*turns, [*turns[0], "batch_size=1"]) for own in pair]

    def of_phases(self, plans: Sequence[Report], texts: Texts) -> dict[str, float]:
        """Seconds or FLOPs by phase of such texts, none of which has more turns."""
        if self.low is None:
            return {phase: sum(plans[0].get(phase, (0, 0))) for phase in PHASES}
        found = dict.fromkeys(PHASES, 0.0)
        pairs = [(plans[place], plans[place + 1]) for place in range(0, len(plans), 2)]
        narrow = pairs.pop() if len(pairs) > 1 else None
        for num, pair in enumerate(pairs, start=1):
            own = [text for text in texts if min(len(written(text)), self.num_turns) == num]
            for phase in PHASES:
                if phase != "rollout" and own:
                    of_device, of_host = (self._at(mean_tokens(own), pair, phase, which) for which in (0, 1))
                    found[phase] += len(own) / len(texts) * (of_device + of_host)
            lengths = [written(text)[num - 1] for text in texts if len(written(text)) >= num]
            if lengths:
                found["rollout"] += self._turn(lengths, len(texts), pairs[:num], narrow)
        return found

    def _turn(self, lengths: Sequence[int], num_texts: int, pairs: Sequence[Pair], narrow: Pair | None) -> float:
        """Seconds or FLOPs of a turn that some of the texts take, with such lengths: those of the plan of so many turns
        without those of one less. Each step of decoding takes what one of a few texts does, and the rest by the texts
        that are decoded."""
        total, steps = 0.0, max(lengths)
        for which, part in enumerate((len(lengths) / num_texts, 1.0)):  # the device, and the host, which starts all
            begin, step = (
                at(pairs[-1], which) - (at(pairs[-2], which) if len(pairs) > 1 else 0.0)
                for at in (self._without_tokens, self._of_token)
            )
            least = step if which == 1 else 0.0 if narrow is None else self._of_token(narrow, which)
            total += part * begin + steps * least + part * decoded_tokens(lengths) * (step - least)
        return total

    def _without_tokens(self, pair: Pair, which: int) -> float:
        return self._at(0, pair, "rollout", which)

    def _at(self, num_tokens: float, pair: Pair, phase: str, which: int) -> float:
        low = self.low or 0
        share = (num_tokens - low) / (self.high - low)
        first, second = (plan.get(phase, (0, 0))[which] for plan in pair)
        return (1 - share) * first + share * second

    def _of_token(self, pair: Pair, which: int) -> float:
        """A step of decoding."""
        return self._at(1, pair, "rollout", which) - self._without_tokens(pair, which)


def written(text: Sequence[int]) -> list[int]:
    """Tokens of its turns."""
    return [num for num in text if num > 0]


def mean_tokens(texts: Texts) -> float:
    """The mean of all turns."""
    return statistics.mean(num for text in texts for num in written(text))


def decoded_tokens(lengths: Sequence[int]) -> float:
    """Tokens that a rollout decodes for each of its texts: those that end leave when they are half of the rest
    (`unirl.models.ar.Decoder.step`)."""
    width, total = len(lengths), 0
    for place in range(max(lengths)):
        alive = sum(length > place for length in lengths)
        width = max(alive, 1) if 2 * alive <= width else width
        total += width
    return total / len(lengths)


def keeps_by_reward(run: ComposedRun) -> bool:
    """True if rewards decide how many samples are trained on."""
    return run.advantages.node.get("kind") == "accepted"


def of_kept(run: ComposedRun, num_trained: float) -> list[str]:
    """What makes a plan train on as many samples as were measured, where their number depends on rewards."""
    if not keeps_by_reward(run):
        return []
    best = round(run.samples_per_prompt * num_trained / (run.batch_size * run.samples_per_prompt))
    return ["advantages.kind=best_of_n", f"advantages.num_best={max(best, 1)}", "~advantages.threshold"]


def of_length(run: ComposedRun, num_tokens: int) -> list[str]:
    """What makes texts so long, with the buffer of an overlong reward no longer than they are."""
    buffer = run.resolved["reward"].get("overlong_buffer_len")
    shorter = [f"reward.overlong_buffer_len={min(buffer, num_tokens)}"] if buffer else []
    return [f"{run.stages[0].sampling.at}.max_new_tokens={num_tokens}", *shorter]


if __name__ == "__main__":
    main()
