"""The kernel that computes the attention of what trains, by the names of `diffusers.models.attention_dispatch`."""

from __future__ import annotations

import torch

from unirl.models.extras import from_extra
from unirl.types.errors import ConfigError

with from_extra("diffusers"):
    from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
    from diffusers.models.modeling_utils import ModelMixin


def refuse_absent(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError if attention and its gradient, in that precision on that device, are not computed by it."""
    # Batch, tokens, heads, width of a head.
    heads = torch.ones(1, 16, 2, 64, dtype=dtype, device=device, requires_grad=True)
    try:
        with attention_backend(name):
            dispatch_attention_fn(heads, heads, heads, backend=AttentionBackendName(name)).sum().backward()
    except (RuntimeError, ValueError, TypeError, ImportError) as error:
        raise ConfigError(
            f"attention_backend = {name} computes no attention in {dtype} on {device}: {error} Install what it needs, "
            "or set attention_backend: null."
        ) from error


def compute_attention_by(model: ModelMixin, name: str) -> None:
    """Lets all attention of the model be computed by it, and leaves other models alone."""
    with attention_backend("native"):  # which is that of models without an own one, and set by the next line
        model.set_attention_backend(name)
