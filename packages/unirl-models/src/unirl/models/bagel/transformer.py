"""The decoder of BAGEL: Qwen2 with norms of queries and keys, every weight of a block twice (mixture of transformers).

Words and tokens of the vision tower go through one copy, latents through the other, whose names end in `_moe_gen`; they
meet in attention alone. The two streams are kept apart from block to block and interleaved for attention.
Names of weights are those of the published checkpoint. Source: BAGEL (arXiv 2505.14683).
Legend: W words and tokens of the vision tower, L latent tokens, N = W + L; others as in `layout`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from unirl.models.bagel.configuration import LanguageConfig
from unirl.models.bagel.layout import Layout
from unirl.models.packed.layers import Outputs, RMSNorm, Rotary, rotated
from unirl.models.packed.rows import KeyValues

GENERATION = "_moe_gen"
"""Ends the name of a weight's copy for latents."""

EXPERTS = ("", GENERATION)
"""Ends of names, of the text expert and of the generation expert."""


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width]."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class MoTAttention(nn.Module):
    """The projections of both experts around one attention."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self._head_dim = config.head_dim
        width, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
        add_twins(self, "q_proj", lambda: nn.Linear(width, width))
        add_twins(self, "k_proj", lambda: nn.Linear(width, kv_width))
        add_twins(self, "v_proj", lambda: nn.Linear(width, kv_width))
        add_twins(self, "o_proj", lambda: nn.Linear(width, width, bias=False))
        add_twins(self, "q_norm", lambda: RMSNorm(config.head_dim, config.rms_norm_eps))
        add_twins(self, "k_norm", lambda: RMSNorm(config.head_dim, config.rms_norm_eps))

    def projected(self, x: Tensor, expert: str) -> tuple[Tensor, Tensor, Tensor]:
        """Normed queries [n, H, D] and keys, and values [n, G, D], of one stream [n, H D]."""
        q, k, v = (
            self.get_submodule(f"{name}_proj{expert}")(x).unflatten(-1, (-1, self._head_dim))
            for name in ("q", "k", "v")
        )
        # The published code norms and rotates in float32, then attends in the dtype of the values.
        q, k = (self.get_submodule(f"{name}_norm{expert}")(each.float()) for name, each in (("q", q), ("k", k)))
        return q, k, v

    def output(self, x: Tensor, expert: str) -> Tensor:
        """[n, H D] of what one stream attended to, [n, H, D]."""
        return self.get_submodule(f"o_proj{expert}")(x.flatten(1))


class Qwen2MoTDecoderLayer(nn.Module):
    """A block, by its published name."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.self_attn = MoTAttention(config)
        add_twins(self, "mlp", lambda: MLP(config))
        add_twins(self, "input_layernorm", lambda: RMSNorm(config.hidden_size, config.rms_norm_eps))
        add_twins(self, "post_attention_layernorm", lambda: RMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(
        self,
        streams: tuple[Tensor, ...],
        rotary: Rotary,
        layout: Layout,
        context: tuple[Tensor, Tensor] | None,
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """The streams, and keys and values [N, G, D] in the order of the rows.

        streams: words [W, *], and latents [L, *] where there are any; of words alone the generation expert is not
        computed and gets no gradient. context: keys and values [M, G, D] of what is before.
        """
        experts = list(zip(streams, EXPERTS, strict=False))
        projected = [self.self_attn.projected(self._norm("input", x, expert), expert) for x, expert in experts]
        q, k, v = (layout.interleaved(*parts) for parts in zip(*projected, strict=True))
        q, k = (rotated(each, rotary).to(v.dtype) for each in (q, k))
        attended = layout.streams(layout.attend(q, k, v, context))
        outputs = []
        for (x, expert), seen in zip(experts, attended, strict=True):
            x = x + self.self_attn.output(seen, expert)
            outputs.append(x + self.get_submodule(f"mlp{expert}")(self._norm("post_attention", x, expert)))
        return tuple(outputs), k, v

    def _norm(self, name: str, x: Tensor, expert: str) -> Tensor:
        return self.get_submodule(f"{name}_layernorm{expert}")(x)


class Qwen2MoTModel(nn.Module):
    """Embedding, blocks and final norms."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Qwen2MoTDecoderLayer(config) for _ in range(config.num_hidden_layers))
        add_twins(self, "norm", lambda: RMSNorm(config.hidden_size, config.rms_norm_eps))


class Qwen2MoTForCausalLM(nn.Module):
    """The decoder and its output projection: what trains."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Qwen2MoTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        ids: Tensor,
        visual: Tensor | None,
        latents: Tensor | None,
        layout: Layout,
        known: KeyValues | None = None,
        *,
        logit_places: Tensor | None = None,
        keeps_keys: bool = False,
    ) -> Outputs:
        """Keys and values where `keeps_keys` asks, else latent tokens where there are any; logits at `logit_places`.

        ids: int64 words of the rows, the marks around images included. visual: [*, width] tokens of the vision tower.
        latents: [L, width] embedded. known: what the contexts of `layout` refer to.
        logit_places: int64 [n], places of words among the N tokens.
        """
        words = self.model.embed_tokens(ids)
        dtype = words.dtype
        if visual is not None:
            words = torch.cat([words, visual.to(dtype)])
        streams = (words,) if latents is None else (words, latents.to(dtype))
        rotary = rotary_table(layout.positions, self.config.head_dim, self.config.rope_theta)
        layers: list[tuple[Tensor, Tensor]] = []
        for place, block in enumerate(self.model.layers):
            streams, key, value = block(streams, rotary, layout, None if known is None else known.layers[place])
            if keeps_keys:
                layers.append((key, value))
        logits = None
        if logit_places is not None:
            hidden = self.model.get_submodule("norm")(streams[0])
            logits = self.lm_head(hidden.index_select(0, layout.order[logit_places])[None])
        made = None if len(streams) == 1 or keeps_keys else self.model.get_submodule(f"norm{GENERATION}")(streams[1])
        return Outputs(images=made, logits=logits, layers=layers if keeps_keys else None)


def add_twins(module: nn.Module, name: str, make: Callable[[], nn.Module]) -> None:
    """Two submodules of `module` alike: `name` for words, and the one for latents."""
    module.add_module(name, make())
    module.add_module(name + GENERATION, make())


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> Rotary:
    """Cosines and sines [N, 1, D / 2] of positions [N]: angle = position theta^(-2 k / D)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions.float()[:, None, None] / theta**exponents
    return angles.cos(), angles.sin()
