"""pi0 as a pipeline: chunks of moves by its flow, with log-probs over the moves and numbers that are executed.

Legend: see `unirl.models.action.heads`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from unirl.models.action.heads import FlowPipeline
from unirl.models.action.pi0.bundle import PI0Bundle
from unirl.models.action.pi0.images import padded, resized
from unirl.models.action.pi0.network import Prefix
from unirl.models.evaluation_mode import evaluating
from unirl.sde.kernels import SDEStrategy
from unirl.types.actions import Observations
from unirl.types.errors import ConfigError, ContractError


class PI0ActionPipeline(FlowPipeline[PI0Bundle, Prefix]):
    """Flow-SDE over the chunks of pi0. strategy: see `FlowPipeline`.

    Features are the mean of the prefix's last hidden states and the state: W is both widths.
    Source: pi_RL (arXiv 2510.25889).
    """

    def __init__(self, bundle: PI0Bundle, strategy: SDEStrategy | None = None) -> None:
        super().__init__(bundle, strategy)
        self._network = bundle.network
        robot = bundle.robot
        self._action = torch.tensor([robot.action_offset, robot.action_scale], device=bundle.device)
        self._state = torch.tensor([robot.state_offset, robot.state_scale], device=bundle.device)

    @property
    def chain_shape(self) -> tuple[int, int]:
        """Moves and numbers that the expert draws."""
        return self._bundle.chain_shape

    def encode_prompts(self, texts: Sequence[str]) -> Tensor:
        """[n, max_text_tokens] int64, -1 after the end: the tokens of "<bos>TEXT\\n"."""
        tokenizer, most = self._bundle.tokenizer, self._bundle.max_text_tokens
        rows = []
        for text in texts:
            ids = tokenizer(f"{tokenizer.bos_token}{text.strip()}\n", add_special_tokens=False).input_ids
            if len(ids) > most:
                raise ConfigError(
                    f"the task {text[:60]!r} has {len(ids)} tokens, bundle.max_text_tokens is {most}. Raise it, or "
                    "shorten the task."
                )
            rows.append([*ids, *[-1] * (most - len(ids))])
        return torch.tensor(rows, dtype=torch.long)

    def features(self, seen: Observations) -> Tensor:
        """[n, W] float32."""
        return self._perceive(seen)[0]

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients."""
        return evaluating(self._bundle)

    def _perceive(self, seen: Observations) -> tuple[Tensor, Prefix]:
        if seen.images is None or seen.prompts is None:
            raise ContractError("pi0 sees an image and reads a task; this observation lacks one of them")
        size = self._bundle.config.max_state_dim
        if seen.states is None:
            states = seen.prompts.new_zeros(len(seen), size, dtype=torch.float32)
        else:
            states = padded((seen.states - self._state[0]) / self._state[1], size)
        prefix, _ = self._network(resized(seen.images, self._bundle.image_side), states, seen.prompts)
        return prefix.features, prefix

    def _velocity(self, seen: Prefix, row_R: Tensor | None, x: Tensor, sigma_R: Tensor) -> Tensor:
        found = self._network(prefix=seen, row_R=row_R, x=x, sigma_R=sigma_R)[1]
        assert found is not None  # noqa: S101 - x was given
        return found

    def _moves(self, x: Tensor) -> Tensor:
        length, size = self.chunk_shape
        return (self._action[0] + self._action[1] * x[:, :length, :size]).clamp(-1, 1)
