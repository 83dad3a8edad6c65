"""The small tokenizers have as many tokens in a template as the real ones."""

import pytest

from unirl.models.hunyuan_video import text
from unirl.models.tiny.text import chat_tokenizer, template_tokenizer

PREFIX = text.TEMPLATE.partition("{}")[0]


def test_a_prefix_has_the_tokens_that_the_real_tokenizer_makes():
    tokenizer = template_tokenizer(PREFIX, text.TEMPLATE_TOKENS)
    assert len(tokenizer(PREFIX).input_ids) == text.TEMPLATE_TOKENS
    assert len(tokenizer(f"{PREFIX}a cat").input_ids) == text.TEMPLATE_TOKENS + len("a cat")


@pytest.mark.parametrize("num_tokens", [5, 34])
def test_a_conversation_begins_with_as_many(num_tokens):
    prefix = "<|im_start|>system\nPaint what is asked.<|im_end|>\n<|im_start|>user\n"
    assert len(chat_tokenizer("Paint what is asked.", num_tokens)(prefix).input_ids) == num_tokens
