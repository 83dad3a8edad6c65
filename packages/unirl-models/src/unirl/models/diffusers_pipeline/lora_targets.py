"""Suffixes of linear layers that LoRA adapts, as diffusers names them in several families."""

JOINT_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""The projections of an attention over media and text together, of both sides."""
JOINT_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
"""The feed-forward layers after it, of both sides."""
SELF_AND_CROSS_ATTENTION = (
    "attn1.to_q",
    "attn1.to_k",
    "attn1.to_v",
    "attn1.to_out.0",
    "attn2.to_q",
    "attn2.to_k",
    "attn2.to_v",
    "attn2.to_out.0",
)
"""The projections of an attention over media, and of one to the text."""
