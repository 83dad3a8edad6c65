"""How tokens are spread in transformers that several families have."""

from unirl.models.token_plan import IMAGE, TEXT, TokenPlan, Tokens

FLUX_TOKENS = TokenPlan(
    arguments={
        "": {
            "hidden_states": IMAGE,
            "img_ids": Tokens("image", -2),
            "encoder_hidden_states": TEXT,
            "txt_ids": Tokens("text", -2),
        }
    },
    attention={
        "transformer_blocks.*.attn": ("text", "image"),
        "single_transformer_blocks.*.attn": ("text", "image"),
    },
    whole_again={"proj_out": IMAGE},
)
"""Positions are arguments, and texts come first."""
HUNYUAN_TOKENS = TokenPlan(
    arguments={"transformer_blocks.0": {"hidden_states": IMAGE, "encoder_hidden_states": TEXT}},
    outputs={"rope": {0: Tokens("image", 0), 1: Tokens("image", 0)}},
    attention={
        "transformer_blocks.*.attn": ("image", "text"),
        "single_transformer_blocks.*.attn": ("image", "text"),
    },
    whole_again={"proj_out": IMAGE},
    needs_parts=("text",),
)
"""Rotations are of the image alone, and texts, which are refined before the blocks, come last."""
