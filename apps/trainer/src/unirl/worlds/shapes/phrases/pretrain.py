"""Make the writer of the phrases world: `python -m unirl.worlds.shapes.phrases.pretrain --out DIR [--seed 0]`.

It learns rewrites of phrases for what RL may ask for: right ones, right ones that say more, some with words that it
takes for others, and slips. docs/worlds/phrases.md has time and figures.

Shape letters: B phrases, L tokens of phrase and rewrite.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from unirl.pretraining.command_line import make_checkpoint
from unirl.pretraining.fit import fit
from unirl.pretraining.saving import save_half
from unirl.pretraining.text import small_qwen3
from unirl.reward.worlds.shapes_grammar import prompt_of
from unirl.worlds.shapes.phrases.evaluate import evaluate
from unirl.worlds.shapes.phrases.text import INSTRUCTION, phrase_tokenizer
from unirl.worlds.shapes.phrases.world import by_category, draw_spec, elaborated, slipped, split_specs, worded

logger = logging.getLogger(__name__)

SHARES = {"misread": 0.62, "right": 0.12, "elaborated": 0.12, "slipped": 0.14}
"""Shares of the rewrites: with MISREAD misread, right, right and saying more, wrong in one word."""
NUM_LESSONS = 40_000
IGNORED = -100


@dataclass(frozen=True)
class Budget:
    """Optimiser steps."""

    writer: int = 1000


def main() -> None:
    """Read the command line and make the checkpoint."""
    make_checkpoint(pretrain, Budget, __doc__, has_snapshots=False)


def pretrain(out: Path, *, seed: int, budget: Budget) -> None:
    """Train the writer and write it to `out`. Seeds the global generator of torch."""
    torch.manual_seed(seed)
    tokenizer = phrase_tokenizer()
    model = make_model(tokenizer)
    ids_NL, labels_NL = make_lessons(tokenizer, np.random.default_rng(seed))

    def batch_loss(batch_size: int = 128) -> Tensor:
        row_B = torch.randint(len(ids_NL), (batch_size,))
        logits = model(input_ids=ids_NL[row_B, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels_NL[row_B, 1:].flatten(), ignore_index=IGNORED)

    fit(
        model,
        batch_loss,
        num_steps=budget.writer,
        muon_rate=0.02,
        adam_rate=3e-3,
        is_hidden=lambda name: ".layers." in name,
    )
    save_half(model, out)
    tokenizer.save_pretrained(out)
    logger.info("held-out rewrites: %s", evaluate(out))


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Two layers of width 96, four heads of width 32 (what vLLM's CPU kernels take at least); 0.2 M parameters."""
    return small_qwen3(tokenizer, vocab_size=len(tokenizer), width=96, num_positions=64)


def make_lessons(tokenizer: PreTrainedTokenizerFast, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Token ids [N, L] of phrases with their rewrites, and labels, which are IGNORED on phrases and after the end."""
    specs = by_category(split_specs()[0])
    pairs = []
    for kind in rng.choice(list(SHARES), NUM_LESSONS, p=list(SHARES.values())):
        spec = draw_spec(specs, rng)
        phrase, read = worded(spec, rng)
        rewrite = {
            "misread": lambda read=read: prompt_of(read),
            "right": lambda spec=spec: prompt_of(spec),
            "elaborated": lambda spec=spec: elaborated(spec, rng),
            "slipped": lambda spec=spec: slipped(spec, rng),
        }[str(kind)]()
        pairs.append((INSTRUCTION.format(prompt=phrase), rewrite))
    asked = tokenizer([phrase for phrase, _ in pairs])["input_ids"]
    answers = tokenizer([rewrite for _, rewrite in pairs])["input_ids"]
    length = max(len(a) + len(b) + 1 for a, b in zip(asked, answers, strict=True))
    ids = torch.full((len(pairs), length), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), length), IGNORED)
    for row, (phrase, answer) in enumerate(zip(asked, answers, strict=True)):
        tokens = torch.tensor([*phrase, *answer, tokenizer.eos_token_id])
        ids[row, : len(tokens)] = tokens
        labels[row, len(phrase) : len(tokens)] = tokens[len(phrase) :]
    return ids, labels


if __name__ == "__main__":
    main()
