"""The arithmetic world: problems, their answers, and the answers of a pupil who has not learned to carry.

A problem is a sum or difference of two numbers of two digits, differences not below zero. `python -m
unirl.worlds.arithmetic.world --out DIR` writes the prompt files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from unirl.pretraining.prompt_files import write_from_command_line, write_rows

Category = Literal["sum", "sum_carry", "difference", "difference_borrow"]
CATEGORY_SHARES: dict[Category, float] = {
    "sum": 0.2,
    "sum_carry": 0.3,
    "difference": 0.2,
    "difference_borrow": 0.3,
}
"""Shares of the prompts. Who never carries gets the two plain categories right, two problems in five."""
HELDOUT_FRACTION = 0.1
"""Fraction of all problems; neither the base nor RL has seen these, nor the same sum with its numbers swapped."""
NUM_TRAIN = 2000
NUM_HELDOUT = 500


@dataclass(frozen=True, order=True)
class Problem:
    """left operator right, for example 37 + 58."""

    left: int
    operator: Literal["+", "-"]
    right: int

    @property
    def prompt(self) -> str:
        """For example "37+58="."""
        return f"{self.left}{self.operator}{self.right}="

    @property
    def answer(self) -> str:
        """Decimal digits."""
        return str(self.left + self.right if self.operator == "+" else self.left - self.right)

    @property
    def columnwise(self) -> str:
        """What comes out without carrying or borrowing: column by column, the smaller digit from the larger.

        The two best-known mistakes of pupils; 37 + 58 = 85 and 52 - 37 = 25. Right where nothing is carried.
        """
        columns = zip(f"{self.left:02d}", f"{self.right:02d}", strict=True)
        digits = [(int(a) + int(b)) % 10 if self.operator == "+" else abs(int(a) - int(b)) for a, b in columns]
        return str(10 * digits[0] + digits[1])

    @property
    def category(self) -> Category:
        """Operator, and whether a digit is carried or borrowed."""
        carries = self.columnwise != self.answer
        if self.operator == "+":
            return "sum_carry" if carries else "sum"
        return "difference_borrow" if carries else "difference"


def all_problems() -> list[Problem]:
    """8,100 sums and 4,095 differences in a fixed order."""
    numbers = range(10, 100)
    sums = [Problem(a, "+", b) for a in numbers for b in numbers]
    return sums + [Problem(a, "-", b) for a in numbers for b in numbers if a >= b]


def split_problems() -> tuple[list[Problem], list[Problem]]:
    """(train, held out), every problem on one side, 37 + 58 and 58 + 37 on the same."""
    rng = np.random.default_rng(0)
    groups: dict[tuple[str, int, int], list[Problem]] = {}
    for problem in all_problems():
        low, high = sorted((problem.left, problem.right))
        groups.setdefault((problem.operator, low, high), []).append(problem)
    keys = sorted(groups)
    held = {keys[i] for i in rng.choice(len(keys), int(HELDOUT_FRACTION * len(keys)), replace=False)}
    train = [problem for key in keys if key not in held for problem in groups[key]]
    return train, [problem for key in keys if key in held for problem in groups[key]]


def slip(answer: str, rng: np.random.Generator) -> str:
    """The answer with one digit replaced by another; a number of several digits begins with no 0."""
    place = int(rng.integers(len(answer)))
    least = 1 if place == 0 and len(answer) > 1 else 0
    others = [str(digit) for digit in range(least, 10) if str(digit) != answer[place]]
    return answer[:place] + others[int(rng.integers(len(others)))] + answer[place + 1 :]


def prompt_rows(problems: list[Problem], name: str, number: int, rng: np.random.Generator) -> list[dict[str, object]]:
    """`number` rows of a prompt file with the categories in their shares, shuffled; no problem twice."""
    chosen: list[Problem] = []
    for category, share in CATEGORY_SHARES.items():
        there = [problem for problem in problems if problem.category == category]
        chosen += [there[i] for i in rng.choice(len(there), round(share * number), replace=False)]
    return [
        {
            "prompt": chosen[i].prompt,
            "prompt_id": f"arithmetic-{name}-{row:04d}",
            "metadata": {"answer": chosen[i].answer, "category": chosen[i].category},
        }
        for row, i in enumerate(rng.permutation(len(chosen)))
    ]


def write_prompts(folder: Path) -> None:
    """`train.jsonl` and `heldout.jsonl`, the same at every call."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    train, heldout = split_problems()
    for name, problems, number in (("train", train, NUM_TRAIN), ("heldout", heldout, NUM_HELDOUT)):
        write_rows(folder / f"{name}.jsonl", prompt_rows(problems, name, number, rng))


if __name__ == "__main__":
    write_from_command_line(write_prompts, __doc__)
