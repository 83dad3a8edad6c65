"""Log-probs and entropies of chosen tokens, without ever holding the logits of the whole batch.

The projection onto the vocabulary runs over chunks of tokens, and each chunk's logits are computed again in the
backward. Peak memory is a few chunks of logits, whatever the batch and the vocabulary.
Legend: N tokens scored, D width of the hidden states, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unirl.types.bounds import PositiveInt, bounded
from unirl.types.protocols.models import LayerExchange

CHUNK_LOGITS = 2**25
"""Logits held at once by default: 128 MiB in float32, 220 tokens of a vocabulary of 151,936."""


def guided_logits(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance of logits [..., V], in float32."""
    unconditional = unconditional.float()
    return unconditional + scale * (conditional.float() - unconditional)


def softmax_scores(logits: Tensor, tokens_N: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of each token, entropy, sum of squared probabilities), [N] float32 each, of softmax(logits /
    temperature); nats. The last has no gradient.

    logits: [N, V]. The softmax is taken in float32 whatever their dtype.
    """
    logp = functional.log_softmax(logits.float() / temperature, dim=-1)
    # A word of no probability has logp = -inf where the logits say so, and adds nothing: p log p -> 0.
    probability = logp.exp()
    entropy = -(probability * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(dim=-1)
    collision = torch.linalg.vector_norm(probability.detach(), dim=-1).square()
    return logp.gather(-1, tokens_N[:, None]).squeeze(-1), entropy, collision


def chunked_scores(
    project: Callable[[Tensor], Tensor],
    hidden_ND: Tensor,
    tokens_N: Tensor,
    temperature: float,
    *,
    tokens_per_chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`softmax_scores` of project(hidden_ND), `tokens_per_chunk` tokens at a time.

    hidden_ND: [N, D], or more dimensions where `project` takes them.
    project: [n, D] -> logits [n, V], any function of its input and of parameters. Gradients flow to both.
    """

    def score(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return softmax_scores(project(hidden), tokens, temperature)

    chunks = zip(hidden_ND.split(tokens_per_chunk), tokens_N.split(tokens_per_chunk), strict=True)
    if torch.is_grad_enabled():
        # One chunk is recomputed too: its logits would otherwise stay alive until the backward of the whole model.
        scores = [checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks]
    else:
        scores = [score(*chunk) for chunk in chunks]
    logp_N, entropy_N, collision_N = (torch.cat(parts) for parts in zip(*scores, strict=True))
    logp_N, entropy_N = _Together.apply(logp_N, entropy_N)
    return logp_N, entropy_N, collision_N


class _Together(torch.autograd.Function):
    """Passes tensors on, and a gradient back to each: zeros to one that no loss uses.

    A checkpoint frees what it computes again as the backward pass asks for it. Nothing asks for a score that is left
    out, and the logits of all chunks would stay until the graph ends.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:  # Any: as torch has it
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # Any: as torch has it
        return grads


@bounded("bundle")
class ScoringHead(nn.Linear):
    """A language model's output projection that can score given tokens instead of returning logits.

    It takes the place of `lm_head` and shares its parameters, so names and ties in the state stay as they were.
    Scoring here, inside the model's own forward, keeps every hook of that forward in force: FSDP gathers the
    projection's shards before it and drops them after the backward.
    """

    def __init__(self, projection: nn.Linear, *, chunk_logits: PositiveInt = CHUNK_LOGITS) -> None:
        with torch.device("meta"):
            super().__init__(projection.in_features, projection.out_features, bias=projection.bias is not None)
        self.weight = projection.weight
        self.bias = projection.bias
        self._tokens_per_chunk = max(1, chunk_logits // projection.out_features)
        self._asked: tuple[Tensor, Tensor, float, LayerExchange | None, float] | None = None

    @contextmanager
    def scoring(
        self,
        places_N: Tensor,
        tokens_N: Tensor,
        temperature: float,
        of_layers: LayerExchange | None = None,
        *,
        guidance_scale: float = 1.0,
    ) -> Generator[None]:
        """Inside, a forward returns (log-probs, entropies, sums of squared probabilities: [N] each, hidden states
        [N, D]) in place of logits.

        tokens_N: int64 [N]. places_N: int64 [N], which hidden state predicts each, counted row by row; with
        guidance_scale above 1 [2, N], those of prompts and those of empty ones. of_layers: of the ranks that have the
        same hidden states, where each scores other tokens. The hidden states of guided tokens are those of the prompts.
        """
        self._asked = (places_N, tokens_N, temperature, of_layers, guidance_scale)
        try:
            yield
        finally:
            self._asked = None

    def forward(self, hidden: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:  # ty: ignore[incompatible-method-override]
        """Logits [..., V] of hidden states [..., D], or scores inside `scoring`."""
        if self._asked is None:
            return super().forward(hidden)
        places_N, tokens_N, temperature, of_layers, scale = self._asked
        if of_layers is not None:
            hidden = of_layers.dealt(hidden)
        hidden_PD, project = hidden.flatten(end_dim=-2), super().forward
        if scale > 1:
            hidden_N2D = hidden_PD[places_N.T]
            scores = chunked_scores(
                lambda pair: guided_logits(*project(pair).unbind(1), scale),
                hidden_N2D,
                tokens_N,
                temperature,
                tokens_per_chunk=max(1, self._tokens_per_chunk // 2),
            )
            return *scores, hidden_PD.index_select(0, places_N[0])  # no view: FSDP hooks what a forward returns
        hidden_ND = hidden_PD.index_select(0, places_N)
        scores = chunked_scores(project, hidden_ND, tokens_N, temperature, tokens_per_chunk=self._tokens_per_chunk)
        return *scores, hidden_ND
