"""Small policies that act, as the pipelines that recipes name: a flow over chunks of moves, or bins of their numbers.

Legend: see `unirl.models.action.heads`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from unirl.models.action.bundle import ActionBundle
from unirl.models.action.config import Head
from unirl.models.action.heads import FlowPipeline, TokensPipeline
from unirl.models.evaluation_mode import evaluating
from unirl.sde.kernels import SDEStrategy
from unirl.types.actions import Observations
from unirl.types.errors import ConfigError


class FlowActionPipeline(FlowPipeline[ActionBundle, Tensor]):
    """A small policy with the head `flow`. strategy: see `FlowPipeline`."""

    def __init__(self, bundle: ActionBundle, strategy: SDEStrategy | None = None) -> None:
        _require_head(bundle, self.head, type(self))
        super().__init__(bundle, strategy)
        if bundle.config.noise_range is not None and not self.learns_noise:
            raise ConfigError(
                f"bundle.noise_range = {list(bundle.config.noise_range)} adds a network that {type(self).__name__} "
                "does not use. Remove it, or set pipeline._target_ to "
                "unirl.models.action.noise_pipeline.FlowNoiseActionPipeline."
            )
        self._network = bundle.network

    def features(self, seen: Observations) -> Tensor:
        """[n, W], what it makes of observations."""
        return self._network(seen.images, seen.states)[0]

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients."""
        return evaluating(self._bundle)

    def _perceive(self, seen: Observations) -> tuple[Tensor, Tensor]:
        features = self.features(seen)
        return features, features

    def _velocity(self, seen: Tensor, row_R: Tensor | None, x: Tensor, sigma_R: Tensor) -> Tensor:
        found = self._network(features=seen, row_R=row_R, x=x, sigma_R=sigma_R)[1]
        assert found is not None  # noqa: S101 - x was given
        return found


class BinsActionPipeline(TokensPipeline[ActionBundle]):
    """A small policy with the head `bins`, which cut [-1, 1] evenly; a token stands for the middle of its bin."""

    def __init__(self, bundle: ActionBundle) -> None:
        _require_head(bundle, self.head, type(self))
        super().__init__(bundle)
        self._network = bundle.network

    def features(self, seen: Observations) -> Tensor:
        """[n, W], what it makes of observations."""
        return self._network(seen.images, seen.states)[0]

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients."""
        return evaluating(self._bundle)

    def _logits(self, seen: Observations) -> tuple[Tensor, Tensor]:
        features, logits, _ = self._network(seen.images, seen.states)
        assert logits is not None  # noqa: S101 - a head with bins always has them
        return features, logits

    def _moves(self, tokens: Tensor) -> Tensor:
        return ((tokens + 0.5) / self._bundle.config.num_bins * 2 - 1).float()


def _require_head(bundle: ActionBundle, head: Head, pipeline: type) -> None:
    if bundle.config.head != head:
        raise ConfigError(
            f"the policy has the head {bundle.config.head}, {pipeline.__name__} samples from {head}. Set "
            f"pipeline._target_ to the pipeline of {bundle.config.head}."
        )
