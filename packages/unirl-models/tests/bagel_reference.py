"""BAGEL recomputed from the weights of a file: one whole sequence at a time under a mask, without cache and packing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from unirl.models.bagel.configuration import BagelConfig


@dataclass
class TokenSequence:
    """Embedded tokens with what attention needs to know of them."""

    tokens: list[Tensor] = field(default_factory=list)
    draws: list[bool] = field(default_factory=list)
    """True if the generation expert reads a token."""
    positions: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Number of the image that a token belongs to; words have another one."""

    @property
    def following(self) -> int:
        """Position after the last token."""
        return self.positions[-1] + 1 if self.positions else 0

    def mask(self) -> Tensor:
        """Token i sees token j: what is before it, and its own image."""
        block = torch.tensor(self.blocks)
        count = torch.arange(len(block))
        return (count[None] <= count[:, None]) | (block[None] == block[:, None])


class Reference:
    """A model from the tensors of `ema.safetensors`."""

    def __init__(self, weights: dict[str, Tensor], config: BagelConfig, marks: tuple[int, int]) -> None:
        self.weights = weights
        self.config = config
        self.begin, self.end = marks

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        variance = (x * x).mean(-1, keepdim=True)
        return x / (variance + self.config.language.rms_norm_eps).sqrt() * self.weights[f"{name}.weight"]

    # Sequences -------------------------------------------------------------------------------------------------------

    def embed(self, ids: Sequence[int]) -> Tensor:
        return self.weights["language_model.model.embed_tokens.weight"][torch.tensor(list(ids), dtype=torch.long)]

    def words(self, sequence: TokenSequence, ids: Sequence[int]) -> None:
        for embedded in self.embed(ids):
            sequence.positions.append(sequence.following)
            sequence.blocks.append(-len(sequence.blocks) - 1)
            sequence.tokens.append(embedded)
            sequence.draws.append(False)

    def image(self, sequence: TokenSequence, tokens: Tensor, *, draws: bool) -> None:
        place, block = sequence.following, len(sequence.blocks)
        begin, end = self.embed([self.begin, self.end])
        for embedded, is_drawn in [(begin, False), *((token, draws) for token in tokens), (end, False)]:
            sequence.positions.append(place)
            sequence.blocks.append(block)
            sequence.tokens.append(embedded)
            sequence.draws.append(is_drawn)

    def latent_tokens(self, latents: Tensor, sigma: float, rows: int, columns: int) -> Tensor:
        """[L, D] of latent tokens [L, numbers]."""
        angles = sigma * torch.tensor([math.exp(-math.log(1e4) * k / 128) for k in range(128)])
        waves = torch.cat([angles.cos(), angles.sin()])
        time = self.linear("time_embedder.mlp.2", functional.silu(self.linear("time_embedder.mlp.0", waves)))
        table = self.weights["latent_pos_embed.pos_embed"].unflatten(0, (self.config.max_latent_size, -1))
        return self.linear("vae2llm", latents) + time + table[:rows, :columns].flatten(0, 1)

    # Forward ---------------------------------------------------------------------------------------------------------

    def hidden(self, sequence: TokenSequence) -> Tensor:
        """[N, D] after the last norm."""
        x, draws = torch.stack(sequence.tokens), torch.tensor(sequence.draws)[:, None]
        mask = sequence.mask()
        for layer in range(self.config.language.num_hidden_layers):
            x = self.block(f"language_model.model.layers.{layer}", x, draws, sequence.positions, mask)
        return self.either("language_model.model.norm", x, draws, self.norm)

    def either(self, name: str, x: Tensor, draws: Tensor, apply: Callable[[str, Tensor], Tensor]) -> Tensor:
        return torch.where(draws, apply(f"{name}_moe_gen", x), apply(name, x))

    def block(self, name: str, x: Tensor, draws: Tensor, positions: list[int], mask: Tensor) -> Tensor:
        sizes = self.config.language
        inner = self.either(f"{name}.input_layernorm", x, draws, self.norm)
        heads = {}
        for part, count in (
            ("q", sizes.num_attention_heads),
            ("k", sizes.num_key_value_heads),
            ("v", sizes.num_key_value_heads),
        ):
            projected = self.either(f"{name}.self_attn.{part}_proj", inner, draws, self.linear)
            heads[part] = projected.unflatten(-1, (count, sizes.head_dim))
        for part in ("q", "k"):
            normed = self.either(f"{name}.self_attn.{part}_norm", heads[part], draws[..., None], self.norm)
            heads[part] = self.turned(normed, positions)
        outputs = []
        for head in range(sizes.num_attention_heads):
            shared = head // (sizes.num_attention_heads // sizes.num_key_value_heads)
            scores = heads["q"][:, head] @ heads["k"][:, shared].T / math.sqrt(sizes.head_dim)
            outputs.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ heads["v"][:, shared])
        x = x + self.either(f"{name}.self_attn.o_proj", torch.cat(outputs, dim=-1), draws, self.linear)
        inner = self.either(f"{name}.post_attention_layernorm", x, draws, self.norm)
        return x + self.either(f"{name}.mlp", inner, draws, self.mlp)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate = functional.silu(self.linear(f"{name}.gate_proj", x))
        return self.linear(f"{name}.down_proj", gate * self.linear(f"{name}.up_proj", x))

    def turned(self, x: Tensor, positions: list[int]) -> Tensor:
        """Pairs (k, k + D / 2) of [N, heads, D] as complex numbers times exp(i position theta^(-2 k / D))."""
        half = self.config.language.head_dim // 2
        rates = torch.tensor([self.config.language.rope_theta ** (-k / half) for k in range(half)])
        turns = torch.polar(torch.ones(len(positions), half), torch.tensor(positions)[:, None] * rates)[:, None]
        pairs = torch.complex(x[..., :half], x[..., half:]) * turns
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    def velocity(self, context: TokenSequence, latents: Tensor, sigma: float, rows: int, columns: int) -> Tensor:
        """[L, numbers] of latent tokens after a context, which is left as it is."""
        whole = TokenSequence(*(list(getattr(context, name)) for name in ("tokens", "draws", "positions", "blocks")))
        self.image(whole, self.latent_tokens(latents, sigma, rows, columns), draws=True)
        return self.linear("llm2vae", self.hidden(whole)[-rows * columns - 1 : -1])
