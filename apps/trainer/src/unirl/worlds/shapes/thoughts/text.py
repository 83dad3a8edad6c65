"""The tokenizer of the small BAGEL: one token per word of prompts and plans, and one per byte of anything else."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from unirl.pretraining.text import END, PAD

MARKS = (PAD, "<|im_start|>", END, "<|vision_start|>", "<|vision_end|>")


def plan_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose merges are those of the words in `texts`, with the marks of turns and images."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    # More merges than all words together need, so that each becomes one token.
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=list(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=PAD, additional_special_tokens=[*MARKS[1:2], *MARKS[3:]]
    )
