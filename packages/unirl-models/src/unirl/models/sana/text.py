"""Text of Sana: the last hidden state of Gemma 2 over a prompt that follows a fixed request to enhance it.

Of the tokens, the first and the last max_sequence_length - 1 are kept, so that the request itself falls away. A
negative prompt is read without the request. Equal to SanaPipeline.encode_prompt of diffusers. Shape letters: see
`unirl.models`.
"""

from __future__ import annotations

from collections.abc import Sequence

from unirl.models.diffusers_pipeline.text import TextEncoders
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ContractError

# The published instruction, word for word: the model was trained with it.
INSTRUCTION = "\n".join(
    (
        "Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual descriptions suitable for "
        "image generation. Evaluate the level of detail in the user prompt:",
        "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, and spatial "
        "relationships to create vivid and concrete scenes.",
        "- If the prompt is already detailed, refine and enhance the existing details slightly without "
        "overcomplicating.",
        "Here are examples of how to transform or refine prompts:",
        "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round shape, sleeping "
        "peacefully on a warm sunny windowsill, surrounded by pots of blooming red flowers.",
        "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street "
        "lamps, a diverse crowd of people in colorful clothing, and a double-decker bus passing by towering glass "
        "skyscrapers.",
        "Please generate only the enhanced description for the prompt below and avoid including any additional "
        "commentary or evaluations:",
        "User Prompt: ",
    )
)


def instructed(text: str) -> str:
    """A prompt as the model reads it: plain, in lower case, after the request."""
    return INSTRUCTION + plain(text)


def plain(text: str) -> str:
    """A text as the model reads it without the request."""
    return text.lower().strip()


class SanaTextEncoders(TextEncoders):
    """Ragged texts with a mask. The texts of one call all have the request before them, or none has."""

    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        tokenizer = self.tokenizers["tokenizer"]
        kinds = {text.startswith(INSTRUCTION) for text in texts}
        if len(kinds) > 1:
            raise ContractError("prompts and negative prompts were given to Sana's text encoder together")
        # As published: the request's own begin-of-text token is in its count, and one more token is given up.
        num_before = len(tokenizer.encode(INSTRUCTION)) - 2 if kinds == {True} else 0
        tokenizer.padding_side = "right"
        tokens = self.tokens(texts, num_before + max_sequence_length)
        hidden = self.encoders["text_encoder"](tokens.input_ids, attention_mask=tokens.attention_mask)[0]
        kept = [0, *range(hidden.shape[1] - max_sequence_length + 1, hidden.shape[1])]
        return TextEmbedCondition(embeds=hidden[:, kept], attention_mask=tokens.attention_mask[:, kept])
