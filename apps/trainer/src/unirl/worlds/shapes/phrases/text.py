"""The tokenizer of the writer: one token per word of people's phrases and of the painter's prompts."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from unirl.pretraining.text import END, PAD
from unirl.reward.worlds.shapes_grammar import COLORS, NUMBERS, RELATIONS, SHAPES
from unirl.worlds.shapes.phrases.world import (
    COLOR_WORDS,
    JOINING_WORDS,
    NUMBER_WORDS,
    RELATION_WORDS,
    SHAPE_WORDS,
)

INSTRUCTION = "{prompt} ="
"""What the writer reads: the phrase, and the sign that its rewrite comes now."""
UNKNOWN = "<unk>"


def words() -> list[str]:
    """Every word of the writer, in a fixed order."""
    shapes = [word for each in SHAPE_WORDS.values() for word in each]
    phrases = [
        *(word for each in COLOR_WORDS.values() for word in each),
        *shapes,
        *(f"{word}s" for word in shapes),
        *(word for each in NUMBER_WORDS.values() for word in each),
        *(word for each in RELATION_WORDS.values() for word in each),
        *JOINING_WORDS,
        *COLORS,
        *SHAPES,
        *(f"{shape}s" for shape in SHAPES),
        *NUMBERS,
        *RELATIONS,
    ]
    return sorted({word for phrase in phrases for word in phrase.split()} | {"a", "an", "in", ",", "="})


def phrase_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer with Qwen's end and padding; other words are <unk>."""
    vocabulary = {word: index for index, word in enumerate((PAD, END, UNKNOWN, *words()))}
    core = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = Split(Regex(r"[\w-]+|[^\s\w]"), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD, unk_token=UNKNOWN)
