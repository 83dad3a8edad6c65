"""What the ranks that share tokens exchange around an attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from unirl.models.token_plan import IMAGE, SpreadTokens, TokenPlan


class Alone:
    """An exchange of one rank, which notes what it is given."""

    rank, size, num_head_parts, ring = 0, 1, 1, None

    def __init__(self) -> None:
        self.given: list[Tensor] = []

    def lengths(self, length: int) -> list[int]:
        return [length]

    def own(self, whole: Tensor, dim: int) -> Tensor:
        return whole

    def gathered(self, part: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        return part

    def to_heads(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        self.given.append(own)
        return own

    def to_tokens(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        self.given.append(own)
        return own


class Attention(nn.Module):
    """Norms and rotations leave queries and keys in float32, whatever values are in."""

    heads = 2

    def forward(self, hidden: Tensor) -> Tensor:
        per_head = hidden.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return scaled_dot_product_attention(per_head.float(), per_head.float(), per_head)


def test_what_autocast_makes_smaller_is_made_so_before_it_is_sent() -> None:
    model, exchange = nn.Sequential(Attention(), nn.Identity()), Alone()
    plan = TokenPlan(whole_again={"1": IMAGE}, attention={"0": ("image",)}, arguments={"0": {"hidden": IMAGE}})
    hidden = torch.randn(1, 3, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(hidden)
        SpreadTokens({"model": model}, plan, exchange)
        found = model(hidden)
    assert torch.equal(found, expected)
    assert {each.dtype for each in exchange.given} == {torch.bfloat16}
    assert sum(each.numel() for each in exchange.given) == 4 * hidden.numel()
