"""Linear attention over packed samples: the state and the convolution of a sample begin anew at its first position.

Legend: N positions of all samples, D width of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unirl.models.packing import Packing

RECURRENT_LAYERS = frozenset({"linear_attention"})
"""Types of layers that carry a state from position to position."""

KEPT_WHOLE = "its linear attention carries a state and a convolution from position to position, through all heads"
"""Why ranks share neither the tokens nor the layers of a model that has some."""


def run_by_sample(layer: nn.Module) -> None:
    """From now on the layer takes packed rows: it computes each of their samples as if it were alone.

    layer: of transformers, called with `hidden_states` and further keywords.
    """
    # An attribute of the module: a wrapper around it would change the names of its weights.
    layer.forward = partial(_by_sample, layer.forward)


def _by_sample(
    forward: Callable[..., Tensor],
    *,
    hidden_states: Tensor,
    packing: Packing | None = None,
    **kwargs: Any,  # Any: keywords of the layer
) -> Tensor:
    """Output [1, N, D] of packed hidden states [1, N, D], one call per run of samples of equal length; without a
    packing, that of the layer itself. transformers takes boundaries (`cu_seqlens`) only where a kernel does."""
    if packing is None:
        return forward(hidden_states=hidden_states, **kwargs)
    parts = hidden_states[0].split([samples * length for samples, length in packing.runs])
    outputs = [
        forward(hidden_states=part.unflatten(0, run), **kwargs).flatten(0, 1)
        for run, part in zip(packing.runs, parts, strict=True)
    ]
    return torch.cat(outputs)[None]
