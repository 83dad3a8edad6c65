"""A small vision policy: keypoints of an image, a perceptron, and a head.

Legend: n observations, C H W image, P keypoints, W width, R rows, H moves of a chunk (h in sizes), D numbers of a move.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from unirl.models.action.config import ActionConfig

NUM_FREQUENCIES = 8
"""Frequencies of the noise level, from 1 to e^4 in geometric steps."""


class KeypointTrunk(nn.Module):
    """Two convolutions, a softmax over the places of each channel, and a perceptron of where they look.

    Spatial and small: a policy that pushes needs places, and learns them from few demonstrations.
    """

    def __init__(self, image_shape: tuple[int, int, int], num_keypoints: int, width: int) -> None:
        super().__init__()
        channels, *sides = image_shape
        self.convs = nn.Sequential(nn.Conv2d(channels, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, num_keypoints, 3, 2))
        self.sharpness = nn.Parameter(torch.ones(num_keypoints, 1))
        self.perceptron = _perceptron(2 * num_keypoints, width)
        down, across = (torch.linspace(-1, 1, ((side - 5) // 2 + 1 - 3) // 2 + 1) for side in sides)
        places = torch.stack(torch.meshgrid(down, across, indexing="ij"), dim=-1)
        self.register_buffer("places", places.view(-1, 2), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """[n, W] of uint8 [n, C, H, W]."""
        pixels = images.to(self.sharpness.dtype) / 127.5 - 1
        looks = (self.convs(pixels).flatten(2) * self.sharpness).softmax(dim=-1)
        return self.perceptron((looks @ self.places).flatten(1))


class StateTrunk(nn.Module):
    """A perceptron of the state, less its offset and divided by its scale."""

    offset: Tensor
    scale: Tensor

    def __init__(self, config: ActionConfig) -> None:
        super().__init__()
        size = config.state_size or 0
        self.perceptron = _perceptron(size, config.width)
        self.register_buffer("offset", torch.tensor(config.state_offset or [0.0] * size), persistent=False)
        self.register_buffer("scale", torch.tensor(config.state_scale or [1.0] * size), persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        """[n, W] of float32 [n, S]."""
        # Rounded to the weights' type behind the difference: a state may lie far from 0 and vary little.
        return self.perceptron(((states - self.offset) / self.scale).to(next(self.parameters()).dtype))


class NoiseHead(nn.Module):
    """A standard deviation for each number of a chunk, from what the flow's head makes of it.

    The log-variance lies between those of `noise_range`, by a tanh.
    Source: pi_RL (arXiv 2510.25889), Flow-Noise.
    """

    def __init__(self, hidden: int, size: int, noise_range: tuple[float, float]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(hidden, 64), nn.Tanh(), nn.Linear(64, size))
        self.low, self.high = (math.log(bound) for bound in noise_range)

    def forward(self, hidden_RW: Tensor) -> Tensor:
        """[R, H D] float32."""
        share = (self.layers(hidden_RW).float().tanh() + 1) / 2
        return (self.low + (self.high - self.low) * share).exp()


class FlowHead(nn.Module):
    """The velocity of a noisy chunk at a noise level, given the features, and with `noise_range` the deviation of the
    step that starts there."""

    frequencies: Tensor

    def __init__(
        self, width: int, chunk_shape: tuple[int, int], noise_range: tuple[float, float] | None = None
    ) -> None:
        super().__init__()
        size = chunk_shape[0] * chunk_shape[1]
        hidden = 2 * width
        self.layers = nn.Sequential(
            *(nn.Linear(width + size + 2 * NUM_FREQUENCIES, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU()),
            nn.Linear(hidden, size),
        )
        self.noise = None if noise_range is None else NoiseHead(hidden, size, noise_range)
        self.register_buffer("frequencies", torch.linspace(0, 4, NUM_FREQUENCIES).exp(), persistent=False)

    def forward(self, features_RW: Tensor, x: Tensor, sigma_R: Tensor) -> tuple[Tensor, Tensor | None]:
        """Velocity [R, H, D] of x [R, H, D], and deviations [R, H, D] float32 or None."""
        angles = sigma_R[:, None] * self.frequencies
        inputs = torch.cat([features_RW, x.flatten(1), angles.sin(), angles.cos()], dim=1)
        hidden_RW = self.layers[:-1](inputs.to(features_RW.dtype))
        std = None if self.noise is None else self.noise(hidden_RW).view_as(x)
        return self.layers[-1](hidden_RW).view_as(x), std


class BinsHead(nn.Module):
    """Logits of a bin for each number of a chunk, all at once."""

    def __init__(self, width: int, chunk_shape: tuple[int, int], num_bins: int) -> None:
        super().__init__()
        self.shape = (*chunk_shape, num_bins)
        self.out = nn.Linear(width, chunk_shape[0] * chunk_shape[1] * num_bins)

    def forward(self, features_RW: Tensor) -> Tensor:
        """[R, H, D, bins]."""
        return self.out(features_RW).view(len(features_RW), *self.shape)


class ActionNetwork(nn.Module):
    """Trunks and head. What an observation has several of is added up.

    `forward` is the only entry, so that what wraps the module sees every use of it.
    """

    def __init__(self, config: ActionConfig) -> None:
        super().__init__()
        self.config = config
        shape, width = config.image_shape, config.width
        self.image = None if shape is None else KeypointTrunk(shape, config.num_keypoints, width)
        self.state = None if config.state_size is None else StateTrunk(config)
        chunk = (config.chunk, config.action_size)
        if config.head == "flow":
            self.head: FlowHead | BinsHead = FlowHead(width, chunk, config.noise_range)
        else:
            self.head = BinsHead(width, chunk, config.num_bins)

    def forward(
        self,
        images: Tensor | None = None,
        states: Tensor | None = None,
        *,
        features: Tensor | None = None,
        row_R: Tensor | None = None,
        x: Tensor | None = None,
        sigma_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Features [n, W] of observations, what the head makes of them (bins' logits, a flow's velocity of x, or None
        of a flow without x), and the deviations of a flow's step from x, or None where it learns none.

        features: those of an earlier call, used instead of images and states. row_R: the observation of each row of x;
        None: row after row.
        """
        if features is None:
            parts = [trunk(seen) for trunk, seen in ((self.image, images), (self.state, states)) if trunk is not None]
            features = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        if isinstance(self.head, BinsHead):
            return features, self.head(features), None
        if x is None or sigma_R is None:
            return features, None, None
        return features, *self.head(features if row_R is None else features[row_R], x, sigma_R)


def _perceptron(size: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
