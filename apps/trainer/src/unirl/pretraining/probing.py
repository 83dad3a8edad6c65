"""Teach a text encoder what prompts say: word-level tokens, and linear probes that must read facts and words off it.

Real text encoders arrive pretrained, so those of the small worlds are too; the probes are then thrown away.
Shape letters: B prompts, T tokens, V words, F facts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

SPECIALS = ("<pad>", "<s>", "<unk>", "</s>")
"""The end marker must not be number 2: transformers reads that as an old CLIP and then pools at the largest number."""


def word_tokenizer(
    vocabulary: Mapping[str, int], *, joined: Sequence[str], has_start: bool, max_length: int
) -> PreTrainedTokenizerFast:
    """A word-level tokenizer; CLIP wraps a prompt in <s> </s>, T5 only ends it with </s>.

    joined: phrases that are one word. The article is dropped: text tokens cost the transformer time.
    """
    tokenizer = Tokenizer(WordLevel(dict(vocabulary), unk_token="<unk>"))
    tokenizer.normalizer = Replace(Regex(r"\ba "), "")
    tokenizer.pre_tokenizer = Split(Regex("|".join((*joined, r"\w+"))), behavior="removed", invert=True)
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>" if has_start else "$A </s>",
        special_tokens=[("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def token_ids(tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> Tensor:
    """[B, T] padded to the tokenizer's length."""
    encoded = tokenizer(
        list(prompts), padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
    )
    return encoded.input_ids


def train_by_probes(
    modules: Iterable[nn.Module],
    batch: Callable[[], tuple[Sequence[Tensor], Sequence[Tensor]]],
    *,
    num_steps: int,
    learning_rate: float,
) -> float:
    """Train encoders and probes in place; returns the mean share of right answers in the last step.

    batch: draws samples; the losses of every probe, which are summed, and the shares of right answers.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=num_steps, pct_start=0.1)
    share = 0.0
    for step in range(num_steps):
        losses, hits = batch()
        loss = torch.stack(list(losses)).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        share = torch.stack(list(hits)).mean().item()
        if step % 100 == 0 or step == num_steps - 1:
            rights = " ".join(f"{hit:.2f}" for hit in hits)
            logger.info("encoder step %d loss %.3f right %.4f (%s)", step, loss.item(), share, rights)
    return share


def fact_losses(logits: Tensor, facts_BF: Tensor, sizes: Sequence[int], hits: list[Tensor]) -> list[Tensor]:
    """Cross entropy of every fact; logits [B, sum of sizes]. Appends the share of right answers of each to `hits`."""
    losses = []
    for column, part in enumerate(logits.split(list(sizes), dim=-1)):
        losses.append(nn.functional.cross_entropy(part, facts_BF[:, column]))
        hits.append((part.argmax(-1) == facts_BF[:, column]).float().mean())
    return losses


def word_loss(logits_BTV: Tensor, ids_BT: Tensor, *, has_next: bool) -> Tensor:
    """Cross entropy of each token's own word, the one before and, with `has_next`, the one after; [B, T, 3 V]."""
    own, before, after = logits_BTV.chunk(3, dim=-1)
    pairs = [(own, ids_BT), (before[:, 1:], ids_BT[:, :-1])]
    if has_next:
        pairs.append((after[:, :-1], ids_BT[:, 1:]))
    return torch.stack([nn.functional.cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in pairs]).mean()
