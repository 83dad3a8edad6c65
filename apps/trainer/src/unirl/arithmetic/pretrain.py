"""Make the base of the arithmetic world: `python -m unirl.arithmetic.pretrain --out DIR [--seed 0]`.

Two stages, each with a fixed number of steps: right answers, until the model can calculate; then a pupil's answers, of
which few are right. So the base can calculate and mostly does not. docs/arithmetic_world.md has time and figures.

Shape letters: B problems of a batch, N problems, L tokens of prompt and answer.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from unirl.arithmetic.evaluate import evaluate
from unirl.arithmetic.world import Problem, slip, split_problems
from unirl.shapes.muon import Muon

logger = logging.getLogger(__name__)

END = "<|im_end|>"
PAD = "<|endoftext|>"
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
    """Problems with the answers that may be shown, as tokens; labels are -100 on prompts and behind the end."""

    ids_NVL: Tensor
    """V answers of each problem: the right one, the columnwise one, then slips."""
    labels_NVL: Tensor
    weights_N: Tensor
    """Problems without carry are fewer among the prompts than in the world."""


def main() -> None:
    """Read the command line and make the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--right-steps", type=int, default=Budget.right)
    parser.add_argument("--pupil-steps", type=int, default=Budget.pupil)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    torch.set_num_threads(1)
    pretrain(arguments.out, seed=arguments.seed, budget=Budget(arguments.right_steps, arguments.pupil_steps))


def pretrain(out: Path, *, seed: int, budget: Budget) -> None:
    """Run both stages and write the checkpoint to `out`. Seeds the global generator of torch."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    train, _ = split_problems()
    lessons = make_lessons(train, tokenizer, rng)
    fit(model, lessons, {"right": 1.0}, num_steps=budget.right, muon_rate=0.02, adam_rate=3e-3)
    save(model, tokenizer, out)
    logger.info("after the right answers: %s", evaluate(out))
    fit(model, lessons, PUPIL, num_steps=budget.pupil, muon_rate=0.005, adam_rate=1e-3)
    save(model, tokenizer, out)
    logger.info("after the pupil's answers: %s", evaluate(out))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that any text can be read, and Qwen's special tokens."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=PAD, additional_special_tokens=["<|im_start|>"]
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Two layers of width 128, four heads of width 32 (what vLLM's CPU kernels take at least); 0.36 M parameters."""
    config = Qwen3Config(
        vocab_size=264,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


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


def fit(
    model: Qwen3ForCausalLM,
    lessons: Lessons,
    shares: Mapping[str, float],
    *,
    num_steps: int,
    muon_rate: float,
    adam_rate: float,
    batch_size: int = 128,
) -> None:
    """Cross entropy of answers drawn by their shares; matrices of the layers by Muon, all else by AdamW."""
    hidden, rest = [], []
    for name, parameter in model.named_parameters():
        (hidden if parameter.ndim == 2 and ".layers." in name else rest).append(parameter)
    optimizers = [
        Muon(hidden, lr=muon_rate),
        torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: _trapezoid(step, num_steps)) for o in optimizers]
    kinds = torch.tensor([shares.get(kind, 0.0) for kind in PUPIL])
    recent: list[float] = []
    started = time.process_time()
    for step in range(1, num_steps + 1):
        row_B = torch.multinomial(lessons.weights_N, batch_size, replacement=True)
        kind_B = torch.multinomial(kinds, batch_size, replacement=True)
        answer_B = torch.where(kind_B < 2, kind_B, 2 + torch.randint(NUM_SLIPS, (batch_size,)))
        ids_BL, labels_BL = lessons.ids_NVL[row_B, answer_B], lessons.labels_NVL[row_B, answer_B]
        logits = model(input_ids=ids_BL[:, :-1], logits_to_keep=ANSWER_TOKENS).logits
        targets = labels_BL[:, -ANSWER_TOKENS:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(rest, 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        recent.append(loss.item())
        if step % 100 == 0 or step == num_steps:
            seconds = time.process_time() - started
            logger.info("step %d loss %.4f, %.0f CPU s", step, sum(recent) / len(recent), seconds)
            recent.clear()


def _trapezoid(step: int, num_steps: int) -> float:
    """Warm up over 50 steps, hold, and fall to zero over the last 40 %."""
    return min(1.0, (step + 1) / 50, max(num_steps - step, 0) / (0.4 * num_steps))


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write model and tokenizer, weights in fp16: half the bytes; it loads in fp32 unless asked otherwise."""
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    model.save_pretrained(out, state_dict=state)
    tokenizer.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")


if __name__ == "__main__":
    main()
