"""Make the base of the tools world: `python -m unirl.worlds.tools.pretrain --out DIR [--seed 0]`.

Supervised on mixed traces: short sums are answered rightly; of the others most are answered without carrying, and a few
with the tool, some of these with a wrong digit. So the base knows how to call and seldom does. docs/worlds/tools.md has
time and figures.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from unirl.pretraining.command_line import make_checkpoint
from unirl.pretraining.fit import fit
from unirl.pretraining.saving import save_half
from unirl.pretraining.text import byte_tokenizer, small_qwen3
from unirl.worlds.tools.world import Problem, draw, is_held_out

logger = logging.getLogger(__name__)

IGNORED = -100
CALL_SHARES = {"short": 0.04, "long": 0.08, "three": 0.10}
"""Share of the traces with calls."""
SLIP = 0.2
"""Share of the calls, and of the answers after them, with a wrong digit."""
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m['content'] }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen3's, without system turns and thoughts."""
SPECIAL = ("<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
WORDS = ("user\n", "assistant\n", '{"name": "add", "arguments": {"expression": "', '"}}')
"""Pieces of the format that are one token each, as they would nearly be in a tokenizer of a real model."""


@dataclass(frozen=True)
class Budget:
    """Optimiser steps."""

    traces: int = 900


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, the special tokens, and the words of the format."""
    tokenizer = byte_tokenizer(SPECIAL)
    tokenizer.add_tokens([AddedToken(word, special=False) for word in WORDS])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Two layers of width 128, four heads of width 32; 0.37 M parameters."""
    return small_qwen3(tokenizer, vocab_size=272, width=128, num_positions=256)


def call_text(expression: str) -> str:
    """What a model writes to call the tool."""
    return f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'expression': expression}})}\n</tool_call>"


def slip(text: str, rng: np.random.Generator) -> str:
    """The text with one digit replaced by another one."""
    places = [place for place, char in enumerate(text) if char.isdigit()]
    place = places[int(rng.integers(len(places)))]
    return text[:place] + str((int(text[place]) + int(rng.integers(1, 10))) % 10) + text[place + 1 :]


def trace(own: Problem, rng: np.random.Generator) -> list[dict[str, str]]:
    """A conversation about a problem."""
    said = [{"role": "user", "content": own.prompt}]
    if rng.random() >= CALL_SHARES[own.category]:
        answer = own.answer if own.category == "short" else own.columnwise
        return [*said, {"role": "assistant", "content": answer}]
    total = ""
    for number, (expression, _) in enumerate(own.steps):
        if number:
            expression = f"{total}+{own.numbers[number + 1]}"
        if rng.random() < SLIP:
            expression = slip(expression, rng)
        total = str(sum(map(int, expression.split("+"))))
        said += [{"role": "assistant", "content": call_text(expression)}, {"role": "tool", "content": total}]
    answer = slip(total, rng) if rng.random() < SLIP else total
    return [*said, {"role": "assistant", "content": answer}]


def tokens_of(said: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Tokens of a conversation, and labels: those of what the model says, its end included."""
    ids: list[int] = []
    labels: list[int] = []
    for message in said:
        is_own = message["role"] == "assistant"
        head = [] if is_own else tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        if not is_own:
            # Behind a turn of the model stands the template's line break.
            head = tokenizer(("\n" if ids else "") + str(head), add_special_tokens=False)["input_ids"]
            ids += head
            labels += [IGNORED] * len(head)
        else:
            own = [*tokenizer(message["content"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            ids += own
            labels += own
    return ids, labels


def pretrain(out: Path, *, seed: int, budget: Budget) -> None:
    """Fit the traces and write the checkpoint to `out`. Seeds the global generator of torch."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)

    def batch_loss(batch_size: int = 96) -> Tensor:
        rows = []
        while len(rows) < batch_size:
            own = draw(rng)
            if not is_held_out(own):
                rows.append(tokens_of(trace(own, rng), tokenizer))
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows])
        logits = model(input_ids=ids[:, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)

    fit(
        model,
        batch_loss,
        num_steps=budget.traces,
        muon_rate=0.02,
        adam_rate=3e-3,
        is_hidden=lambda name: ".layers." in name,
    )
    save_half(model, out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    make_checkpoint(pretrain, Budget, __doc__, has_snapshots=False)
