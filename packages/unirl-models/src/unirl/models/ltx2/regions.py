"""Where in the video its sound comes from: how much of the sound's attention each place got while a sample was made.

Legend: R rows of a forward, H heads, A audio tokens, V video tokens, D width of a head.
Source: OmniNFT (arXiv 2605.12480), region-wise loss reweighting, and the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from unirl.models.extras import from_extra
from unirl.sde.loop import Velocity
from unirl.types.errors import ContractError

with from_extra("diffusers"):
    from diffusers.models.transformers.transformer_ltx2 import apply_interleaved_rotary_emb, apply_split_rotary_emb

Rotary = tuple[Tensor, Tensor] | None
"""Cosines and sines of the places of R rows of tokens."""


class RegionMaps:
    """Notes the attention of the sound to the video (`video_to_audio_attn`) in some blocks, at some steps of a call.

    The attention itself is computed as ever; its queries, keys and probabilities are computed once more for the notes.
    Ours are two details: queries and keys have their rotary embedding, which the authors' code leaves out, and of
    guided steps the conditional rows count alone, where theirs has all.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._num_blocks = len(blocks)
        self._notes: dict[int, list[Tensor]] | None = None
        self._steps = range(0)
        self._start = 0
        self._rows = 0
        self._received: list[Tensor] = []
        for block in blocks:
            attention: Any = block.video_to_audio_attn  # Any: a module of diffusers
            attention.register_forward_hook(self._after_attention, with_kwargs=True)

    @contextmanager
    def noting(self, steps: range, start: int) -> Generator[dict[int, list[Tensor]]]:
        """Inside, velocities that are bound note the steps of `steps`: by step [R, V] of each forward, in order.

        start: the step of their first call; each call is the step after.
        """
        self._notes, self._steps, self._start = {}, steps, start
        try:
            yield self._notes
        finally:
            self._notes = None

    def watched(self, velocity: Velocity, num_rows: int) -> Velocity:
        """The velocity of `num_rows` samples, which also notes its attention where `noting` asks for it.

        Its forwards may begin with further, unconditional rows.
        """
        notes, steps = self._notes, count(self._start)
        if notes is None:
            return velocity

        def run(x_R: Tensor, sigma_R: Tensor, step_R: Tensor) -> Tensor:
            step = next(steps)  # counted, so that no step is read from the device
            if step not in self._steps:
                return velocity(x_R, sigma_R, step_R)
            self._rows, self._received = num_rows, []
            try:
                out = velocity(x_R, sigma_R, step_R)
            finally:
                self._rows = 0
            if len(self._received) != self._num_blocks:
                raise ContractError(f"{len(self._received)} of {self._num_blocks} blocks were asked at step {step}")
            notes.setdefault(step, []).append(torch.stack(self._received).mean(dim=0))
            return out

        return run

    def _after_attention(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # Any: of the module
        if not self._rows:
            return
        last = slice(-self._rows, None)
        rotary = [_rows_of(kwargs[name], last) for name in ("query_rotary_emb", "key_rotary_emb")]
        self._received.append(received(module, args[0][last], kwargs["encoder_hidden_states"][last], *rotary))


def received(attention: Any, audio: Tensor, video: Tensor, of_audio: Rotary, of_video: Rotary) -> Tensor:
    """Attention that each video token gets from all audio tokens, [R, V] float32: probabilities, averaged over heads
    and summed over queries, so that a row sums to A.

    attention: an `LTX2Attention` whose queries are audio (Any: of diffusers). audio, video: what it is given,
    [R, A, ...] and [R, V, ...]. A gate of the heads (LTX-2.3) scales what they bring, not whom they attend to.
    """
    query = _heads(attention, attention.norm_q(attention.to_q(audio)), of_audio)
    key = _heads(attention, attention.norm_k(attention.to_k(video)), of_video)
    with torch.autocast(query.device.type, enabled=False):
        scale = query.shape[-1] ** -0.5
        # Row by row: the probabilities of one are 100 MB for 121 frames of 512 x 768.
        rows = [
            torch.softmax(q * scale @ k.transpose(1, 2), dim=-1).mean(dim=0).sum(dim=0)
            for q, k in zip(query, key, strict=True)
        ]
    return torch.stack(rows)


def _heads(attention: Any, tokens: Tensor, rotary: Rotary) -> Tensor:
    """[R, H, T, D] float32, rotated as the attention does it."""
    if rotary is not None:
        rotate: Callable[..., Tensor] = (
            apply_split_rotary_emb if attention.rope_type == "split" else apply_interleaved_rotary_emb
        )
        tokens = rotate(tokens, rotary)
    return tokens.unflatten(2, (attention.heads, -1)).transpose(1, 2).float()


def _rows_of(rotary: Rotary, rows: slice) -> Rotary:
    return None if rotary is None else (rotary[0][rows], rotary[1][rows])
