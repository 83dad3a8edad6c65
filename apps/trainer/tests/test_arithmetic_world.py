"""The arithmetic world: problems and mistakes by hand, the shipped files, and that the base can be made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import unirl.worlds.arithmetic.world
from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.pretraining.text import byte_tokenizer
from unirl.worlds.arithmetic import pretrain, world
from unirl.worlds.arithmetic.evaluate import evaluate
from unirl.worlds.arithmetic.world import Problem

FOLDER = Path(unirl.worlds.arithmetic.world.__file__).parent


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / "data" / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("problem", "prompt", "answer", "columnwise", "category"),
    [
        (Problem(12, "+", 34), "12+34=", "46", "46", "sum"),
        (Problem(37, "+", 58), "37+58=", "95", "85", "sum_carry"),
        (Problem(70, "+", 50), "70+50=", "120", "20", "sum_carry"),
        (Problem(95, "+", 95), "95+95=", "190", "80", "sum_carry"),
        (Problem(58, "-", 37), "58-37=", "21", "21", "difference"),
        (Problem(52, "-", 37), "52-37=", "15", "25", "difference_borrow"),
        (Problem(40, "-", 40), "40-40=", "0", "0", "difference"),
        (Problem(41, "-", 39), "41-39=", "2", "18", "difference_borrow"),
    ],
)
def test_problems_by_hand(problem: Problem, prompt: str, answer: str, columnwise: str, category: str):
    assert (problem.prompt, problem.answer, problem.columnwise, problem.category) == (
        prompt,
        answer,
        columnwise,
        category,
    )


def test_every_problem_is_on_one_side_and_a_sum_with_its_numbers_swapped_on_the_same():
    train, heldout = world.split_problems()
    assert sorted([*train, *heldout]) == sorted(world.all_problems())
    held = set(heldout)
    assert all(Problem(p.right, "+", p.left) in held for p in held if p.operator == "+")
    assert len(heldout) == pytest.approx(world.HELDOUT_FRACTION * len(world.all_problems()), rel=0.03)


def test_a_slip_changes_one_digit_and_never_begins_with_zero():
    rng = np.random.default_rng(0)
    for answer in ("7", "0", "10", "95", "120"):
        slips = {world.slip(answer, rng) for _ in range(300)}
        assert all(len(s) == len(answer) and sum(a != b for a, b in zip(s, answer, strict=True)) == 1 for s in slips)
        assert all(str(int(s)) == s for s in slips)
        assert len(slips) == (9 if len(answer) == 1 else 8 + 9 * (len(answer) - 1))


def test_the_shipped_prompts_are_those_that_the_script_writes(tmp_path: Path):
    world.write_prompts(tmp_path)
    for name in ("train", "heldout"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (FOLDER / "data" / f"{name}.jsonl").read_bytes()


def test_prompts_have_their_shares_and_their_answers():
    split = {problem.prompt: (problem, side) for side, part in enumerate(world.split_problems()) for problem in part}
    for side, (name, number) in enumerate((("train", world.NUM_TRAIN), ("heldout", world.NUM_HELDOUT))):
        found = rows(name)
        assert len(found) == len({row["prompt"] for row in found}) == number
        for row in found:
            problem, where = split[row["prompt"]]
            assert where == side
            assert row["metadata"] == {"answer": problem.answer, "category": problem.category}
        shares = {c: sum(row["metadata"]["category"] == c for row in found) / number for c in world.CATEGORY_SHARES}
        assert shares == world.CATEGORY_SHARES


def test_lessons_show_the_right_answer_the_columnwise_one_and_slips():
    tokenizer = byte_tokenizer()
    problems = [Problem(37, "+", 58), Problem(52, "-", 37), Problem(12, "+", 34), Problem(58, "-", 37)]
    lessons = pretrain.make_lessons(problems, tokenizer, np.random.default_rng(0))
    texts = [tokenizer.batch_decode(answers, skip_special_tokens=True) for answers in lessons.ids_NVL.tolist()]
    assert [answers[:2] for answers in texts[:2]] == [["37+58=95", "37+58=85"], ["52-37=15", "52-37=25"]]
    assert all(slip != answers[0] for answers in texts for slip in answers[2:])
    learned = lessons.labels_NVL != pretrain.IGNORED
    assert torch.equal(lessons.labels_NVL[learned], lessons.ids_NVL[learned])
    assert learned[0, 0].tolist() == [False] * 6 + [True] * 3 + [False]
    # Half sums, half differences, three in five of each with a carry: as among the prompts.
    torch.testing.assert_close(lessons.weights_N, torch.tensor([0.3, 0.3, 0.2, 0.2]))


def test_the_shipped_base_can_calculate_and_mostly_does_not():
    checkpoint = FOLDER / "checkpoint"
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) < 8_000_000
    shares = evaluate(checkpoint)
    # 500 prompts: a standard error of .02.
    assert 0.35 < shares["greedy"] < 0.48 and 0.28 < shares["sampled"] < 0.45
    assert min(shares["greedy/sum"], shares["greedy/difference"]) > 0.95
    assert min(shares["sampled/sum_carry"], shares["sampled/difference_borrow"]) > 0.03


def test_the_base_is_made_and_judged_by_the_script(tmp_path: Path):
    pretrain.pretrain(tmp_path, seed=0, budget=pretrain.Budget(right=2, pupil=2))
    bundle = Qwen3Bundle(str(tmp_path))
    assert bundle.model.config.head_dim >= 32  # the least that vLLM's CPU kernels take
    assert bundle.tokenizer.decode(bundle.tokenizer("37+58=")["input_ids"]) == "37+58="
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 8_000_000
    shares = evaluate(tmp_path)
    assert shares["greedy"] < 0.1
    assert {name.partition("/")[2] for name in shares} == {"", *world.CATEGORY_SHARES}
