"""The modules of an AnyFlow FAR pipeline folder, and what training needs to know of them."""

from __future__ import annotations

from typing import Any

import torch

from unirl.models.anyflow.attention import ChunkAttention
from unirl.models.diffusers_pipeline.components import Component, trained
from unirl.models.extras import from_extra
from unirl.models.wan.bundle import WanBundle

with from_extra("diffusers"):
    from diffusers.models.transformers.transformer_anyflow_far import AnyFlowFARTransformer3DModel


class AnyFlowFARBundle(WanBundle):
    """A transformer that makes a video chunk by chunk, with the rest of Wan 2.1. See `WanBundle`.

    Checkpoints of AnyFlow that make a whole video at once are another pipeline, which is not here.
    """

    family = "AnyFlow FAR"
    pipeline_classes = ("AnyFlowFARPipeline",)
    components = {
        "transformer": trained(AnyFlowFARTransformer3DModel),
        **{name: each for name, each in WanBundle.components.items() if not name.startswith("transformer")},
    }
    block_class_names = ("AnyFlowTransformerBlock",)
    spreads_tokens = False
    token_plan = None

    def load(
        self,
        name: str,
        component: Component,
        dtype: torch.dtype,
        device: torch.device,
        *,
        trains: bool = False,
    ) -> Any:  # Any: see `DiffusersBundle.load`
        """With our processor of self attention."""
        model = super().load(name, component, dtype, device, trains=trains)
        if isinstance(model, AnyFlowFARTransformer3DModel):
            for block in model.blocks:
                block.attn1.set_processor(ChunkAttention())
        return model
