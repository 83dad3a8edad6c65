"""How much of the video's gradient reaches the sound: the scale of what blocks send back from one stream to the other.

Source: OmniNFT (arXiv 2605.12480), layer-wise gradient surgery, and the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unirl.models.ltx2.rules import Span


class ScaledGradient(torch.autograd.Function):
    """The same tensor, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:  # Any: torch's own
        """A view of x."""
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # Any: as above
        """The scaled gradient."""
        [gradient] = gradients
        return gradient * ctx.scale, None


def scale_audio_gradient(blocks: Sequence[nn.Module], spans: Sequence[Span]) -> None:
    """From now on the attention of the video to the sound, in the blocks of each span, passes its gradient on to the
    audio tokens that it reads times the span's scale.

    No value of a forward changes, and the projections of that attention keep their gradients.
    """
    for first, last, scale in spans:
        for block in blocks[first : last + 1]:
            attention: Any = block.audio_to_video_attn  # Any: a module of diffusers
            attention.register_forward_pre_hook(_Hook(scale), with_kwargs=True)


class _Hook:
    """Scales the gradient of the tokens that an attention takes its keys and values from."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # Any: of the module
        tokens = kwargs["encoder_hidden_states"]
        scaled = ScaledGradient.apply(tokens, self.scale)
        return args, {**kwargs, "encoder_hidden_states": scaled}
