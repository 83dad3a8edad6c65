"""A tiny AnyFlow FAR. Any: classes of diffusers and transformers, as in `unirl.models.tiny.text`."""

from __future__ import annotations

from typing import Any

from unirl.models.extras import from_extra
from unirl.models.tiny.wan import shared_parts

with from_extra("diffusers"):
    import diffusers

PARTITION = (1, 2, 1)
"""Latent frames of each chunk, of which the first is compressed where the third is made."""


def tiny_transformer(**changes: Any) -> Any:
    """Two layers of two heads; a chunk sees the one before it whole, and earlier ones compressed."""
    fields: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 32,
        "freq_dim": 64,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
        "full_chunk_limit": 2,
        "chunk_partition": PARTITION,
    }
    return diffusers.AnyFlowFARTransformer3DModel(**fields | changes)


def pipeline() -> Any:
    """diffusers' own pipeline of these parts."""
    pipeline_class: Any = diffusers.AnyFlowFARPipeline
    parts = shared_parts() | {"scheduler": diffusers.FlowMapEulerDiscreteScheduler(shift=5.0)}
    return pipeline_class(transformer=tiny_transformer(), **parts)
