"""Make the base of the arithmetic world: `python -m unirl.worlds.arithmetic.pretrain --out DIR [--seed 0]`.

Two stages, each with a fixed number of steps: right answers, until the model can calculate; then a pupil's answers, of
which few are right. So the base can calculate and mostly does not. docs/worlds/arithmetic.md has time and figures.

Shape letters: B problems of a batch, N problems, L tokens of prompt and answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from unirl.pretraining.command_line import make_checkpoint
from unirl.pretraining.fit import fit
from unirl.pretraining.saving import save_half
from unirl.pretraining.text import byte_tokenizer, small_qwen3
from unirl.worlds.arithmetic.evaluate import evaluate
from unirl.worlds.arithmetic.world import Problem, slip, split_problems

logger = logging.getLogger(__name__)

ANSWER_TOKENS = 4
"""Three digits and the end."""
PUPIL = {"right": 0.15, "columnwise": 0.60, "slip": 0.25}
"""Shares of a pupil's answers: right, without carrying, and right but for one digit."""
NUM_SLIPS = 8
"""Slips drawn for each problem."""
IGNORED = -100


@dataclass(frozen=True)
class Budget:
    """Optimiser steps of each stage."""

    right: int = 700
    pupil: int = 600


@dataclass(frozen=True)
class Lessons:
    """Problems with the answers that may be shown, as tokens; labels are -100 on prompts and after the end."""

    ids_NVL: Tensor
    """V answers of each problem: the right one, the columnwise one, then slips."""
    labels_NVL: Tensor
    weights_N: Tensor
    """Problems without carry are fewer among the prompts than in the world."""


def main() -> None:
    """Read the command line and make the checkpoint."""
    make_checkpoint(pretrain, Budget, __doc__, has_snapshots=False)


def pretrain(out: Path, *, seed: int, budget: Budget) -> None:
    """Run both stages and write the checkpoint to `out`. Seeds the global generator of torch."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = byte_tokenizer()
    model = make_model(tokenizer)
    train, _ = split_problems()
    lessons = make_lessons(train, tokenizer, rng)
    learn(model, lessons, {"right": 1.0}, num_steps=budget.right, muon_rate=0.02, adam_rate=3e-3)
    save(model, tokenizer, out)
    logger.info("after the right answers: %s", evaluate(out))
    learn(model, lessons, PUPIL, num_steps=budget.pupil, muon_rate=0.005, adam_rate=1e-3)
    save(model, tokenizer, out)
    logger.info("after the pupil's answers: %s", evaluate(out))


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Two layers of width 128, four heads of width 32 (what vLLM's CPU kernels take at least); 0.36 M parameters."""
    return small_qwen3(tokenizer, vocab_size=264, width=128, num_positions=256)


def make_lessons(problems: list[Problem], tokenizer: PreTrainedTokenizerFast, rng: np.random.Generator) -> Lessons:
    """Every problem with its answers."""
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    ids, labels = [], []
    for problem in problems:
        prompt = tokenizer(problem.prompt)["input_ids"]
        for answer in [problem.answer, problem.columnwise, *(slip(problem.answer, rng) for _ in range(NUM_SLIPS))]:
            tokens = [*tokenizer(answer)["input_ids"], end]
            missing = ANSWER_TOKENS - len(tokens)
            ids.append([*prompt, *tokens, *[pad] * missing])
            labels.append([*[IGNORED] * len(prompt), *tokens, *[IGNORED] * missing])
    by_problem = (len(problems), 2 + NUM_SLIPS)
    plain = torch.tensor([problem.answer == problem.columnwise for problem in problems])
    differences = torch.tensor([problem.operator == "-" for problem in problems])
    weights = torch.where(plain, 0.4 / plain.sum(), 0.6 / (~plain).sum())
    weights = weights * torch.where(differences, 0.5 / weights[differences].sum(), 0.5 / weights[~differences].sum())
    return Lessons(torch.tensor(ids).unflatten(0, by_problem), torch.tensor(labels).unflatten(0, by_problem), weights)


def learn(
    model: Qwen3ForCausalLM,
    lessons: Lessons,
    shares: Mapping[str, float],
    *,
    num_steps: int,
    muon_rate: float,
    adam_rate: float,
    batch_size: int = 128,
) -> None:
    """Cross entropy of answers drawn by their shares."""
    kinds = torch.tensor([shares.get(kind, 0.0) for kind in PUPIL])

    def batch_loss() -> Tensor:
        row_B = torch.multinomial(lessons.weights_N, batch_size, replacement=True)
        kind_B = torch.multinomial(kinds, batch_size, replacement=True)
        answer_B = torch.where(kind_B < 2, kind_B, 2 + torch.randint(NUM_SLIPS, (batch_size,)))
        ids_BL, labels_BL = lessons.ids_NVL[row_B, answer_B], lessons.labels_NVL[row_B, answer_B]
        logits = model(input_ids=ids_BL[:, :-1], logits_to_keep=ANSWER_TOKENS).logits
        targets = labels_BL[:, -ANSWER_TOKENS:]
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    fit(
        model,
        batch_loss,
        num_steps=num_steps,
        muon_rate=muon_rate,
        adam_rate=adam_rate,
        is_hidden=lambda name: ".layers." in name,
    )


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write model and tokenizer, weights in fp16."""
    save_half(model, out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
