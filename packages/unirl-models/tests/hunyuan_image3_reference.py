"""HunyuanImage3 recomputed in float64 from the weights of its files: one whole sequence at a time under a mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from unirl.models.hunyuan_image3.configuration import HunyuanImage3Config


@dataclass
class TokenSequence:
    """Embedded tokens with what attention needs to know of them."""

    tokens: list[Tensor] = field(default_factory=list)
    positions: list[tuple[int, int]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Number of the image that a token belongs to; words have another one."""

    def copy(self) -> TokenSequence:
        return TokenSequence(list(self.tokens), list(self.positions), list(self.blocks))

    def word(self, embedded: Tensor, block: int | None = None) -> None:
        place = len(self.tokens)
        self.tokens.append(embedded)
        self.positions.append((place, place))
        self.blocks.append(-place - 1 if block is None else block)

    def image(self, embedded: Tensor, rows: int, columns: int, block: int) -> None:
        start, count = len(self.tokens), rows * columns
        for place, token in enumerate(embedded):
            row, column = divmod(place, columns)
            self.tokens.append(token)
            # The published code cuts halves off.
            y, x = start + (count - rows) / 2 + row, start + (count - columns) / 2 + column
            self.positions.append((int(y), int(x)))
            self.blocks.append(block)

    def mask(self) -> Tensor:
        """Token i sees token j: what is before it, and its own image."""
        block, place = torch.tensor(self.blocks), torch.arange(len(self.blocks))
        return (place[None] <= place[:, None]) | (block[None] == block[:, None])


class Reference:
    """A model from the tensors of its files."""

    def __init__(self, weights: dict[str, Tensor], config: HunyuanImage3Config) -> None:
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self.config = config

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def rms(self, name: str, x: Tensor) -> Tensor:
        size = (x * x).mean(-1, keepdim=True) + self.config.decoder.rms_norm_eps
        return x / size.sqrt() * self.weights[f"{name}.weight"]

    def word(self, number: int) -> Tensor:
        return self.weights["model.wte.weight"][number]

    # Decoder ---------------------------------------------------------------------------------------------------------

    def hidden(self, sequence: TokenSequence, routes: list[Tensor] | None = None) -> Tensor:
        """[N, D] after the last block, not normed. routes: of each block the experts [N, K], None for the best."""
        x, mask = torch.stack(sequence.tokens), sequence.mask()
        for layer in range(len(self.config.decoder.layers)):
            name = f"model.layers.{layer}"
            x = x + self.attention(
                f"{name}.self_attn", self.rms(f"{name}.input_layernorm", x), sequence.positions, mask
            )
            inner = self.rms(f"{name}.post_attention_layernorm", x)
            x = x + self.experts(
                f"{name}.mlp", inner, self.config.decoder.layers[layer].top_k, None if routes is None else routes[layer]
            )
        return x

    def logits(self, sequence: TokenSequence) -> Tensor:
        return self.linear("lm_head", self.rms("model.ln_f", self.hidden(sequence)))

    def attention(self, name: str, x: Tensor, positions: list[tuple[int, int]], mask: Tensor) -> Tensor:
        sizes = self.config.decoder
        groups, size = sizes.num_attention_heads // sizes.num_key_value_heads, sizes.head_dim
        heads = self.linear(f"{name}.qkv_proj", x).split(size, dim=-1)
        outputs = []
        for shared in range(sizes.num_key_value_heads):
            *queries, key, value = heads[shared * (groups + 2) : (shared + 1) * (groups + 2)]
            key = self.rms(f"{name}.key_layernorm", self.turned(key, positions))
            for query in queries:
                query = self.rms(f"{name}.query_layernorm", self.turned(query, positions))
                scores = (query @ key.T / math.sqrt(size)).masked_fill(~mask, -torch.inf)
                outputs.append(scores.softmax(-1) @ value)
        return self.linear(f"{name}.o_proj", torch.cat(outputs, dim=-1))

    def turned(self, x: Tensor, positions: list[tuple[int, int]]) -> Tensor:
        """Pairs (k, k + D / 2) times exp(i angle): the row turns even k, the column odd k."""
        half = x.shape[-1] // 2
        rates = [self.config.decoder.rope_theta ** (-k / half) for k in range(half)]
        angles = torch.tensor([[at[k % 2] * rates[k] for k in range(half)] for at in positions], dtype=torch.float64)
        pairs = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    def experts(self, name: str, x: Tensor, top_k: int, routes: Tensor | None) -> Tensor:
        probabilities = self.linear(f"{name}.gate.wg", x).softmax(-1)
        outputs = []
        for place, (token, probability) in enumerate(zip(x, probabilities, strict=True)):
            chosen = probability.topk(top_k).indices if routes is None else routes[place]
            total = probability[chosen].sum()
            mixed = sum(probability[k] / total * self.mlp(f"{name}.experts.{int(k)}", token) for k in chosen)
            outputs.append(mixed + self.mlp(f"{name}.shared_mlp", token))
        return torch.stack(outputs)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        joined = self.linear(f"{name}.gate_and_up_proj", x)
        inner = joined.shape[-1] // 2
        return self.linear(f"{name}.down_proj", joined[..., :inner] * functional.silu(joined[..., inner:]))

    # Images ----------------------------------------------------------------------------------------------------------

    def time(self, name: str, sigma: float) -> Tensor:
        angles = 1000 * sigma * torch.tensor([math.exp(-math.log(1e4) * k / 128) for k in range(128)]).double()
        waves = torch.cat([angles.cos(), angles.sin()])
        return self.linear(f"{name}.mlp.2", functional.gelu(self.linear(f"{name}.mlp.0", waves)))

    def group_norm(self, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
        shape = x.shape
        grouped = x.reshape(32, -1)
        normed = (grouped - grouped.mean(1, keepdim=True)) / (grouped.var(1, keepdim=True, correction=0) + eps).sqrt()
        each = (slice(None), *(None for _ in shape[1:]))
        return normed.reshape(shape) * self.weights[f"{name}.weight"][each] + self.weights[f"{name}.bias"][each]

    def convolution(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        convolve = functional.conv2d if weight.ndim == 4 else functional.conv3d
        return convolve(x[None], weight, bias, padding=weight.shape[-1] // 2)[0]

    def block(self, name: str, x: Tensor, time: Tensor) -> Tensor:
        """A block of the autoencoder on [C, h, w]."""
        inner = self.convolution(f"{name}.in_layers.2", functional.silu(self.group_norm(f"{name}.in_layers.0", x)))
        scale, shift = self.linear(f"{name}.emb_layers.1", functional.silu(time))[:, None, None].chunk(2)
        inner = self.group_norm(f"{name}.out_layers.0", inner) * (1 + scale) + shift
        skip = f"{name}.skip_connection"
        kept = self.convolution(skip, x) if f"{skip}.weight" in self.weights else x
        return kept + self.convolution(f"{name}.out_layers.3", functional.silu(inner))

    def latent_tokens(self, latent: Tensor, sigma: float) -> Tensor:
        """[h w, D] of a latent [C, h, w]."""
        x = self.convolution("patch_embed.model.0", latent.double())
        return self.block("patch_embed.model.1", x, self.time("time_embed", sigma)).flatten(1).T

    def velocity(
        self, context: TokenSequence, latent: Tensor, sigma: float, routes: list[Tensor] | None = None
    ) -> Tensor:
        """[C, h, w] of a latent after a context, which is left as it is. routes: see `hidden`, of the context too."""
        rows, columns = latent.shape[-2:]
        whole = context.copy()
        whole.word(self.time("timestep_emb", sigma))
        whole.image(self.latent_tokens(latent, sigma), rows, columns, block=10**6)
        made = self.hidden(whole, routes)[-rows * columns :].T.unflatten(1, (rows, columns))
        made = self.block("final_layer.model.0", made, self.time("time_embed_2", sigma))
        made = functional.silu(self.group_norm("final_layer.model.1.0", made))
        return self.convolution("final_layer.model.1.2", made)

    # Autoencoder -----------------------------------------------------------------------------------------------------

    def vae_block(self, name: str, x: Tensor) -> Tensor:
        for number in (1, 2):
            before = x if number == 1 else inner  # noqa: F821 - of the first round
            normed = functional.silu(self.group_norm(f"{name}.norm{number}", before, 1e-6))
            inner = self.convolution(f"{name}.conv{number}", normed)
        return x + inner

    def vae_middle(self, name: str, x: Tensor) -> Tensor:
        x = self.vae_block(f"{name}.block_1", x)
        normed = self.group_norm(f"{name}.attn_1.norm", x, 1e-6)
        q, k, v = (self.convolution(f"{name}.attn_1.{part}", normed).flatten(1).T for part in "qkv")
        seen = (q @ k.T / math.sqrt(q.shape[1])).softmax(-1) @ v
        x = x + self.convolution(f"{name}.attn_1.proj_out", seen.T.reshape(x.shape))
        return self.vae_block(f"{name}.block_2", x)

    def encoded(self, pixels: Tensor) -> Tensor:
        """[C, h, w] of pixels [3, H, W]."""
        vae = self.config.vae
        x = self.convolution("vae.encoder.conv_in", torch.stack([pixels.double()] * vae.temporal_factor, dim=1))
        for level in range(len(vae.channels)):
            name = f"vae.encoder.down.{level}"
            for block in range(vae.blocks):
                x = self.vae_block(f"{name}.block.{block}", x)
            if level < 4:
                frames = 2 if level >= 2 else 1
                inner = _cells(self.convolution(f"{name}.downsample.conv", x), frames)
                shortcut = _cells(x, frames)
                x = inner + shortcut.reshape(inner.shape[0], -1, *inner.shape[1:]).mean(1)
        x = self.vae_middle("vae.encoder.mid", x)
        moments = self.convolution(
            "vae.encoder.conv_out", functional.silu(self.group_norm("vae.encoder.norm_out", x, 1e-6))
        )
        moments = moments + x.reshape(len(moments), -1, *x.shape[1:]).mean(1)
        return moments[: vae.latent_channels, 0] * vae.scale

    def decoded(self, latent: Tensor) -> Tensor:
        """[3, H, W] of a latent [C, h, w]."""
        vae = self.config.vae
        z = (latent.double() / vae.scale)[:, None]
        inner = self.convolution("vae.decoder.conv_in", z)
        x = self.vae_middle("vae.decoder.mid", inner + z.repeat_interleave(len(inner) // len(z), dim=0))
        for level in range(len(vae.channels)):
            name = f"vae.decoder.up.{level}"
            for block in range(vae.blocks + 1):
                x = self.vae_block(f"{name}.block.{block}", x)
            if level < 4:
                frames = 2 if level < 2 else 1
                inner = self.convolution(f"{name}.upsample.conv", x)
                x = _spread(inner, frames) + _spread(x.repeat_interleave(len(inner) // len(x), dim=0), frames)
        last = functional.silu(self.group_norm("vae.decoder.norm_out", x, 1e-6))
        return self.convolution("vae.decoder.conv_out", last)[:, -1]


def _places(frames: int) -> Sequence[tuple[int, int, int]]:
    return [(frame, row, column) for frame in range(frames) for row in range(2) for column in range(2)]


def _cells(x: Tensor, frames: int) -> Tensor:
    """Every second frame, row and column as their own channels, [C, F, H, W] to [4 frames C, ...]."""
    return torch.cat([x[:, frame::frames, row::2, column::2] for frame, row, column in _places(frames)])


def _spread(x: Tensor, frames: int) -> Tensor:
    """The inverse of `_cells`."""
    parts = x.chunk(4 * frames)
    channels, count, height, width = parts[0].shape
    out = x.new_zeros(channels, count * frames, height * 2, width * 2)
    for part, (frame, row, column) in zip(parts, _places(frames), strict=True):
        out[:, frame::frames, row::2, column::2] = part
    return out
