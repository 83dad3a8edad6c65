"""The tools world: sums of two short numbers, of two long ones, and of three, and a tool that adds two numbers.

`python -m unirl.worlds.tools.world --out DIR` writes the prompt files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from unirl.pretraining.prompt_files import write_from_command_line, write_rows
from unirl.rollout.environments.base import Task
from unirl.rollout.environments.tools.base import Tool, ToolError, one_text

Category = Literal["short", "long", "three"]
SHARES: dict[Category, float] = {"short": 0.3, "long": 0.4, "three": 0.3}
"""Shares of the prompts."""
SHORT_DIGITS, LONG_DIGITS, THREE_DIGITS = (2, 2), (4, 5), (3, 4)
"""Fewest and most digits of each number."""
NUM_TRAIN, NUM_HELDOUT, NUM_SOLVED = 3000, 400, 1000
_SUM = re.compile(r"(\d{1,9})\+(\d{1,9})")


@dataclass(frozen=True)
class Problem:
    """Numbers to add."""

    numbers: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """For example "48213+95760="."""
        return f"{'+'.join(map(str, self.numbers))}="

    @property
    def answer(self) -> str:
        return str(sum(self.numbers))

    @property
    def columnwise(self) -> str:
        """The sum without carrying."""
        width = max(len(str(number)) for number in self.numbers)
        columns = zip(*(str(number).zfill(width) for number in self.numbers), strict=True)
        return str(int("".join(str(sum(map(int, column)) % 10) for column in columns)))

    @property
    def category(self) -> Category:
        if len(self.numbers) == 3:
            return "three"
        return "short" if len(str(max(self.numbers))) <= SHORT_DIGITS[1] else "long"

    @property
    def steps(self) -> list[tuple[str, str]]:
        """The sums of two numbers that lead to the answer, with their results."""
        found, total = [], self.numbers[0]
        for number in self.numbers[1:]:
            found.append((f"{total}+{number}", str(total + number)))
            total += number
        return found


class Adder(Tool):
    """Adds two whole numbers."""

    description: str = "Add two whole numbers."
    parameters: Mapping[str, Any] = one_text("expression", "for example 48213+95760")  # Any: JSON
    deterministic: bool = True

    def __call__(self, arguments: Mapping[str, Any], task: Task) -> str:
        """The sum. Raises ToolError for anything but two numbers of up to nine digits with a + between them."""
        found = _SUM.fullmatch(arguments["expression"])
        if found is None:
            raise ToolError("a+b")
        return str(int(found[1]) + int(found[2]))


def problem(category: Category, rng: np.random.Generator) -> Problem:
    """A problem of a category."""
    few, many = {"short": SHORT_DIGITS, "long": LONG_DIGITS, "three": THREE_DIGITS}[category]
    digits = int(rng.integers(few, many + 1))
    low = 10 ** (digits - 1)
    return Problem(tuple(int(rng.integers(low, 10 * low)) for _ in range(3 if category == "three" else 2)))


def draw(rng: np.random.Generator) -> Problem:
    """A problem of a category that is drawn by its share."""
    categories = list(SHARES)
    return problem(categories[int(rng.choice(len(categories), p=list(SHARES.values())))], rng)


def is_held_out(own: Problem) -> bool:
    """True for a tenth of all problems, whatever the order of their numbers: neither the base nor RL sees these."""
    return sum(own.numbers) % 10 == 7  # noqa: PLR2004 - any of the ten digits


def problems(num: int, *, held_out: bool, seed: int) -> list[Problem]:
    """So many different problems, the categories in their shares."""
    rng = np.random.default_rng(seed)
    found: dict[Problem, None] = {}
    for category, share in SHARES.items():
        wanted = len(found) + round(share * num)
        while len(found) < wanted:
            own = problem(category, rng)
            if is_held_out(own) == held_out:
                found[own] = None
    chosen = list(found)
    return [chosen[place] for place in rng.permutation(len(chosen))]


def solved(own: Problem) -> list[dict[str, object]]:
    """A conversation that calls the tool where it is needed, as OpenAI's fine-tuning files write it."""
    said: list[dict[str, object]] = [{"role": "user", "content": own.prompt}]
    for expression, result in own.steps if own.category != "short" else ():
        call = {"name": "add", "arguments": json.dumps({"expression": expression})}
        said += [
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": result},
        ]
    return [*said, {"role": "assistant", "content": own.answer}]


def write_prompts(folder: Path) -> None:
    """`train.jsonl`, `heldout.jsonl` and `solved.jsonl`, the same at every call."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, num) in enumerate((("train", NUM_TRAIN), ("heldout", NUM_HELDOUT))):
        write_rows(
            folder / f"{name}.jsonl",
            (
                {
                    "prompt": own.prompt,
                    "prompt_id": f"tools-{name}-{row:04d}",
                    "metadata": {"answer": own.answer, "category": own.category},
                }
                for row, own in enumerate(problems(num, held_out=name == "heldout", seed=seed))
            ),
        )
    write_rows(
        folder / "solved.jsonl",
        (
            {"messages": solved(own), "prompt_id": f"tools-solved-{row:04d}", "metadata": {"answer": own.answer}}
            for row, own in enumerate(problems(NUM_SOLVED, held_out=False, seed=2))
        ),
    )


if __name__ == "__main__":
    write_from_command_line(write_prompts, __doc__)
