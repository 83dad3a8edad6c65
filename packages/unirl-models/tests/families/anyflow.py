"""AnyFlow FAR as a family of the table: videos chunk by chunk."""

from typing import Any

from unirl.models.anyflow.bundle import AnyFlowFARBundle
from unirl.models.anyflow.chunks import cut
from unirl.models.anyflow.pipeline import AnyFlowFARPipeline
from unirl.models.tiny.anyflow import PARTITION, pipeline

from .kit import Family, Published, Request, seeded, stock_call


def call(request: Request) -> dict[str, Any]:
    """The stock pipeline knows the chunks of 81 frames alone, and is told those of others."""
    params = request.params
    return stock_call(
        request,
        num_frames=params.num_frames,
        max_sequence_length=params.max_sequence_length,
        chunk_partition=cut(PARTITION, (params.num_frames - 1) // 4 + 1),
    )


FAMILIES = [
    Family(
        name="anyflow_far",
        bundle=AnyFlowFARBundle,
        pipeline=AnyFlowFARPipeline,
        tiny=seeded(pipeline),
        params={"num_frames": 13, "max_sequence_length": 32},
        # Chunks of 1, 2 and 2 latent frames; of 4 x 6 latents, which patches of 4 do not divide.
        other_size={"height": 32, "width": 48, "num_frames": 17},
        call=call,
        makes_chunks=True,
        tile=None,  # of a tiny decoder of thirteen frames
        published=(
            Published("nvidia/AnyFlow-FAR-Wan2.1-1.3B-Diffusers", 1.42),
            # The class's defaults are the released sizes.
            Published("nvidia/AnyFlow-FAR-Wan2.1-14B-Diffusers", 14.3),
        ),
    ),
]
