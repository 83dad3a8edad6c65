"""The value of a state: what reward to expect from a latent at a noise level given the text, or from a text so far.

Legend: R rows, P width of the pooled text, C channels, H hidden width, E features of the noise level, M tokens, D width
of a language model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from unirl.types.bounds import NonNegativeInt, PositiveInt, Seed, bounded
from unirl.types.conditions import Condition, TextEmbedCondition
from unirl.types.errors import ContractError

NUM_FREQUENCIES = 16
LARGEST_FREQUENCY = 256.0
"""Tells noise levels apart that differ by 1 / 256, closer than the steps of any sampling schedule but its tail."""


@bounded("algorithm.critic")
class LatentCritic(nn.Module):
    """V(x, sigma, text): a perceptron on the latent averaged over a fixed grid, the noise level and the pooled text.

    latent_channels: C of an image [C, H, W] or video [C, F, H, W], D of a packed latent [L, D]. A grid of fixed size
        makes the parameters independent of resolution and length: `grid` x `grid` cells of an image, the mean over
        frames of a video, grid^2 stretches of a packed sequence.
    condition_dim: width of the pooled text embedding; 0 leaves the text out.
    width: of the hidden layers. seed: of the starting weights, which do not depend on the global generator.
    The last layer starts at zero, so V = 0 everywhere. Computes in the dtype of its parameters.
    """

    def __init__(
        self,
        latent_channels: PositiveInt,
        condition_dim: NonNegativeInt = 0,
        *,
        grid: PositiveInt = 4,
        width: PositiveInt = 256,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self.latent_channels = latent_channels
        self.condition_dim = condition_dim
        self.grid = grid
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.latent = nn.Linear(latent_channels * grid * grid, width)
            self.sigma = nn.Linear(2 * NUM_FREQUENCIES, width, bias=False)
            self.text = nn.Linear(condition_dim, width, bias=False) if condition_dim else None
            self.hidden = nn.Linear(width, width)
            self.value = nn.Linear(width, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, x_R: Tensor, sigma_R: Tensor, text_R: Tensor | None) -> Tensor:
        """Values [R] of latents x_R [R, ...] at sigma_R [R] with pooled text [R, P].

        Raises ContractError if channels or text have another size than the critic was made for.
        """
        dtype = self.value.weight.dtype
        hidden = self.latent(self._pooled(x_R.to(dtype))) + self.sigma(noise_level_features(sigma_R.to(dtype)))
        if self.text is not None:
            if text_R is None or text_R.shape[1:] != (self.condition_dim,):
                found = "none" if text_R is None else f"one of width {tuple(text_R.shape[1:])}"
                raise ContractError(
                    f"algorithm.critic.condition_dim = {self.condition_dim}, but the conditions hold {found} as pooled "
                    "text. Set it to that width, or to 0 for a critic that does not read the text."
                )
            # Pooled embeddings of different encoders differ in scale.
            hidden = hidden + self.text(functional.layer_norm(text_R.to(dtype), (self.condition_dim,)))
        return self.value(functional.silu(self.hidden(functional.silu(hidden)))).squeeze(-1)

    def _pooled(self, x_R: Tensor) -> Tensor:
        """[R, C grid^2] means over the cells of the grid."""
        features = x_R.transpose(1, 2) if x_R.ndim == 3 else x_R
        if x_R.ndim not in (3, 4, 5) or features.shape[1] != self.latent_channels:
            raise ContractError(
                f"algorithm.critic.latent_channels = {self.latent_channels} does not fit latents "
                f"{tuple(x_R.shape[1:])} (channels come first, in a packed sequence last). Set it to their channels."
            )
        if x_R.ndim == 3:
            return functional.adaptive_avg_pool1d(features, self.grid**2).flatten(1)
        if x_R.ndim == 5:
            features = features.mean(dim=2)
        return functional.adaptive_avg_pool2d(features, self.grid).flatten(1)


@bounded("algorithm.critic")
class TokenCritic(nn.Module):
    """V(text so far): a perceptron on the language model's last hidden state, before the next token is chosen. Of a
    policy that acts it is V(observation), on what the policy makes of one.

    hidden_size: D of the model. width: of the hidden layer. seed: of the starting weights, which do not depend on the
    global generator. The last layer starts at zero, so V = 0 everywhere. Computes in the dtype of its parameters.
    """

    def __init__(self, hidden_size: PositiveInt, *, width: PositiveInt = 256, seed: Seed = 0) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.hidden = nn.Linear(hidden_size, width)
            self.value = nn.Linear(width, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, hidden_MD: Tensor) -> Tensor:
        """Values [M] of hidden states [M, D]. Raises ContractError for another width."""
        if hidden_MD.shape[-1] != self.hidden_size:
            raise ContractError(
                f"algorithm.critic.hidden_size = {self.hidden_size}, the model's hidden states have "
                f"{hidden_MD.shape[-1]}. Set it to that."
            )
        # Hidden states of different models differ in scale.
        features = functional.layer_norm(hidden_MD.to(self.value.weight.dtype), (self.hidden_size,))
        return self.value(functional.silu(self.hidden(features))).squeeze(-1)


def noise_level_features(sigma_R: Tensor) -> Tensor:
    """Sines and cosines [R, E] of the noise level at frequencies from 1 to `LARGEST_FREQUENCY`, in geometric steps."""
    exponents = torch.linspace(0, 1, NUM_FREQUENCIES, dtype=sigma_R.dtype, device=sigma_R.device)
    angles = sigma_R[:, None] * (exponents * math.log(LARGEST_FREQUENCY)).exp()
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def pooled_text(conditions: Mapping[str, Condition]) -> Tensor | None:
    """[B, P] of the condition "text": its pooled embedding, or the mean over the tokens that count; None without it."""
    text = conditions.get("text")
    if not isinstance(text, TextEmbedCondition):
        return None
    if text.pooled is not None:
        return text.pooled
    if text.attention_mask is None:
        return text.embeds.mean(dim=1)
    mask = text.attention_mask.to(text.embeds.dtype)[..., None]
    return (text.embeds * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
