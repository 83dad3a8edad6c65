"""Drawing tokens: temperature, truncation, and numbers of a sample's own.

Legend: B samples, V words of the vocabulary, T tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unirl.sde.noise import keyed_uniform
from unirl.types.devices import wide_float
from unirl.types.sampling import ARSamplingParams

_FLOAT32_STEP = 2.0**-24


def uniforms(keys: Sequence[str], seed: int, num_tokens: int) -> Tensor:
    """[B, T] float64 in [0, 1) on the CPU: the number that chooses each token, a function of key and seed alone.

    A float32 uniform has 24 bits and would never choose a word of less than 6e-8, so two of them make one number.
    """
    high, low = keyed_uniform(keys, seed, (num_tokens, 2)).double().unbind(-1)
    return high + low * _FLOAT32_STEP


def placed(uniforms: Tensor, device: torch.device) -> Tensor:
    """Numbers of `uniforms` on a device, in its `wide_float`, below 1 there too."""
    wide = uniforms.to(device, wide_float(device))
    return wide.clamp(max=1 - torch.finfo(wide.dtype).eps / 2)


def draw(logits: Tensor, uniform_B: Tensor, params: ARSamplingParams) -> tuple[Tensor, Tensor]:
    """(tokens, their log-probs), int64 and float32 [B], by inversion of the cumulative distribution.

    logits: [B, V]. uniform_B: [B] in [0, 1), see `placed`. A greedy draw takes the most probable word; its log-prob is
    of temperature 1 and describes no distribution that was sampled from.
    One number per token. Small errors of the logits rarely move it across a boundary, so batches of other shapes
    draw the same tokens.
    """
    if params.is_greedy:
        logp = logits.float().log_softmax(dim=-1)
        tokens = logp.argmax(dim=-1)
    else:
        logp = truncated((logits.float() / params.temperature).log_softmax(dim=-1), params.top_p, params.top_k)
        cumulative = logp.exp().cumsum(dim=-1, dtype=wide_float(logp.device))
        target = uniform_B[:, None] * cumulative[:, -1:]
        # The first word whose cumulative probability is above the target has a probability above zero.
        tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(-1)


def truncated(logp: Tensor, top_p: float, top_k: int) -> Tensor:
    """Log-probs [B, V] of the `top_k` most probable words, then of the fewest of those that reach `top_p` together.

    Both are renormalised; the most probable word always stays. 0 and 1 leave everything as it is.
    """
    if 0 < top_k < logp.shape[-1]:
        kept = logp.topk(top_k, dim=-1).indices
        logp = torch.full_like(logp, -torch.inf).scatter(-1, kept, logp.gather(-1, kept)).log_softmax(dim=-1)
    if top_p < 1:
        ordered, order = logp.sort(dim=-1, descending=True)
        before = ordered.exp().cumsum(dim=-1, dtype=wide_float(logp.device)) - ordered.exp()
        ordered = ordered.masked_fill(before >= top_p, -torch.inf)
        logp = torch.empty_like(logp).scatter(-1, order, ordered).log_softmax(dim=-1)
    return logp
