"""The decoder of HunyuanImage3: attention over words and images, and a mixture of experts in every block.

Names of weights are those of the published checkpoint. Source: HunyuanImage 3.0 (arXiv 2509.23951).
Legend: N tokens of all rows, D width, H query heads, G heads of keys and values, E experts, K experts of a token,
M tokens that are no words.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from unirl.models.hunyuan_image3.configuration import DecoderConfig, LayerConfig
from unirl.models.hunyuan_image3.layout import Layout
from unirl.models.packed.layers import Outputs, RMSNorm, Rotary, rotated
from unirl.models.packed.rows import KeyValues
from unirl.types.weights import PublishedParts


class MLP(nn.Module):
    """out = down(up silu(gate)); the published rows of `gate_and_up_proj` are up first, then gate."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_and_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, D]."""
        return self.down_proj(_gated(self.gate_and_up_proj(x)))


def _gated(gate_and_up: Tensor) -> Tensor:
    """[n, 2 I] -> [n, I]."""
    up, gate = gate_and_up.chunk(2, dim=-1)
    return up * silu(gate)


class Gate(nn.Module):
    """Which experts a token goes to."""

    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.wg = nn.Linear(width, num_experts, bias=False)
        self._top_k = top_k

    def forward(self, x: Tensor, routes: Tensor | None) -> tuple[Tensor, Tensor]:
        """(weights [N, K] that sum to 1, experts int64 [N, K]) of tokens [N, D], in float32 whatever their dtype.

        routes: the experts, where they are given; their weights are of the present gate all the same.
        """
        with torch.autocast(x.device.type, enabled=False):
            probabilities = linear(x.float(), self.wg.weight.float()).softmax(dim=-1)
        experts = probabilities.topk(self._top_k, dim=-1).indices if routes is None else routes
        chosen = probabilities.gather(-1, experts)
        return chosen / chosen.sum(-1, keepdim=True).clamp(min=torch.finfo(chosen.dtype).eps), experts


class Experts(nn.Module):
    """The routed experts of a block, each an `MLP` whose published weights are entries of stacks. Drops no token."""

    def __init__(self, num_experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_and_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(num_experts, width, inner))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum [N, D] of the experts int64 [N, K] of tokens [N, D], with weights [N, K]."""
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=self.num_experts).tolist()
        parts = x.index_select(0, order // experts.shape[1]).split(counts)
        stacks = zip(parts, self.gate_and_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        made = torch.cat([linear(_gated(linear(part, gate_and_up)), down) for part, gate_and_up, down in stacks])
        of_token = made.index_select(0, order.argsort()).unflatten(0, experts.shape)
        return (of_token * weights[..., None]).sum(1)


def expert_stacks(decoder: nn.Module) -> dict[str, PublishedParts]:
    """Where the weights of each routed expert lie in the stacks of a decoder, by the names of these."""
    found: dict[str, PublishedParts] = {}
    for path, each in decoder.named_modules():
        if isinstance(each, Experts):
            for kind in ("gate_and_up_proj", "down_proj"):
                names = [f"{path}.{expert}.{kind}.weight" for expert in range(each.num_experts)]
                found[f"{path}.{kind}"] = {name: (expert, slice(None)) for expert, name in enumerate(names)}
    return found


class MixtureOfExperts(nn.Module):
    """The weighted sum of a token's experts, and the expert that all tokens share."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig) -> None:
        super().__init__()
        self.gate = Gate(config.hidden_size, config.num_experts, layer.top_k)
        self.shared_mlp = MLP(config.hidden_size, layer.shared_width)
        self.experts = Experts(config.num_experts, config.hidden_size, layer.expert_width)

    def forward(self, x: Tensor, routes: Tensor | None) -> tuple[Tensor, Tensor]:
        """[N, D] of tokens [N, D], and their experts int64 [N, K]."""
        weights, experts = self.gate(x, routes)
        return self.experts(x, experts, weights.to(x.dtype)) + self.shared_mlp(x), experts


class Attention(nn.Module):
    """Queries and keys are rotated first, then normed."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self._config = config
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.qkv_proj = nn.Linear(config.hidden_size, heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)
        self.query_layernorm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self, x: Tensor, rotary: Rotary, layout: Layout, context: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[N, D] of tokens [N, D], and their keys and values [N, G, *]."""
        # Rows of the weight are [queries of a group, key, value] for each head of keys and values.
        grouped = self.qkv_proj(x).unflatten(-1, (self._config.num_key_value_heads, -1, self._config.head_dim))
        query, key, value = grouped.split([self._config.group_size, 1, 1], dim=2)
        value = value.squeeze(2)
        query = self.query_layernorm(rotated(query.flatten(1, 2).float(), rotary)).to(value.dtype)
        key = self.key_layernorm(rotated(key.squeeze(2).float(), rotary)).to(value.dtype)
        return self.o_proj(layout.attend(query, key, value, context).flatten(1)), key, value


class HunyuanImage3DecoderLayer(nn.Module):
    """A block, by its published name."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MixtureOfExperts(config, layer)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        layout: Layout,
        context: tuple[Tensor, Tensor] | None,
        routes: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [N, D], their keys and values [N, G, *] and their experts [N, K]. routes: see `Gate`."""
        seen, key, value = self.self_attn(self.input_layernorm(x), rotary, layout, context)
        x = x + seen
        mixed, experts = self.mlp(self.post_attention_layernorm(x), routes)
        return x + mixed, key, value, experts


class DecoderModel(nn.Module):
    """Embedding, blocks and the norm before words."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(HunyuanImage3DecoderLayer(config, layer) for layer in config.layers)
        self.ln_f = RMSNorm(config.hidden_size, config.rms_norm_eps)


class HunyuanImage3Decoder(nn.Module):
    """Transformer and output projection: what trains."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        ids: Tensor,
        layout: Layout,
        *,
        features: Tensor | None = None,
        feature_places: Tensor | None = None,
        known: KeyValues | None = None,
        image_places: Tensor | None = None,
        logit_places: Tensor | None = None,
        keeps_keys: bool = False,
        routes: list[Tensor] | None = None,
        keeps_routes: bool = False,
    ) -> Outputs:
        """Hidden states of images, logits, keys and experts, each where it is asked for.

        ids: int64 [N], words; at `feature_places` [M] any id, where `features` [M, D] stand instead.
        known: what the contexts of `layout` refer to. image_places, logit_places: int64 [n].
        routes: of each block the experts int64 [N, K] of every token; None lets the gates choose.
        """
        x = self.model.wte(ids)
        if features is not None and feature_places is not None:
            x = x.index_copy(0, feature_places, features.to(x.dtype))
        rotary = rotary_table(layout.positions, self.config.head_dim, self.config.rope_theta)
        layers: list[tuple[Tensor, Tensor]] = []
        found: list[Tensor] = []
        for place, block in enumerate(self.model.layers):
            context = None if known is None else known.layers[place]
            x, key, value, experts = block(x, rotary, layout, context, None if routes is None else routes[place])
            if keeps_keys:
                layers.append((key, value))
            if keeps_routes:
                found.append(experts)
        logits = None
        if logit_places is not None:
            logits = self.lm_head(self.model.ln_f(x.index_select(0, logit_places))[None])
        return Outputs(
            images=None if image_places is None else x.index_select(0, image_places),
            logits=logits,
            layers=layers if keeps_keys else None,
            routes=found if keeps_routes else None,
        )


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> Rotary:
    """Cosines and sines [N, 1, D / 2] of positions [N, 2]: angle k = position theta^(-2 k / D), of the row for even k
    and of the column for odd k."""
    rates = theta ** -(torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = (positions.float()[:, None, :] * rates.view(1, -1, 2)).flatten(1)[:, None]
    return angles.cos(), angles.sin()
