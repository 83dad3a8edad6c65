"""Where packed tokens stand and what they see: a hand-worked case, a mask, and the ragged kernel of a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from unirl.models.bagel.layout import Kind, Layout, Segment
from unirl.models.packed.rows import KeyValues, Prefix, joined_ranges
from unirl.models.packed.vision import grid_places

CPU = torch.device("cpu")
ROWS = [
    [Segment(Kind.WORDS, 2), Segment(Kind.VISION, 4), Segment(Kind.WORDS, 3)],
    [Segment(Kind.LATENTS, 5)],
    [Segment(Kind.WORDS, 1)],
]
"""Two words, an image of two patches, three words; an image of three latents; a word."""


def test_streams_are_interleaved_in_the_order_of_the_rows() -> None:
    layout = Layout.of(ROWS, CPU)
    words = ["a", "b", "<", ">", "c", "d", "e", "<", ">", "f"]
    streams = [*words, "v0", "v1", "l0", "l1", "l2"]
    placed = "".join(
        streams[place] if len(streams[place]) == 1 else streams[place][0] for place in layout.order.tolist()
    )
    assert placed == "ab<vv>cde" + "<lll>" + "f"
    # The image of the first row has position 2, as a whole.
    assert layout.positions.tolist() == [0, 1, 2, 2, 2, 2, 3, 4, 5] + [0] * 5 + [0]
    tokens = torch.arange(15.0)[:, None]
    understanding, generation = layout.streams(tokens)
    assert generation.flatten().tolist() == [10, 11, 12]
    assert torch.equal(layout.interleaved(understanding, generation), tokens)


def test_contexts_follow_their_rows() -> None:
    """The second row of a first layout is followed twice, once after its first token alone."""
    first = Layout.of([[Segment(Kind.WORDS, 2)], [Segment(Kind.WORDS, 1), Segment(Kind.VISION, 3)]], CPU)
    keys = torch.arange(6.0).view(6, 1, 1)
    known = first.extended(None, [(keys, keys)])
    assert known.prefixes == (Prefix(0, 2, 2), Prefix(1, 4, 2))
    chosen = [known.prefixes[1], Prefix(1, 1, 1)]
    second = Layout.of([[Segment(Kind.WORDS, 1)]] * 2, CPU, contexts=chosen, known=known)
    assert second.positions.tolist() == [2, 1]
    new = torch.tensor([10.0, 11.0]).view(2, 1, 1)
    longer = second.extended(known, [(new, new)])
    assert longer.layers[0][0].flatten().tolist() == [2, 3, 4, 5, 10, 2, 11]
    assert longer.prefixes == (Prefix(0, 5, 3), Prefix(1, 2, 2))


def _case(device: str, dtype: torch.dtype) -> tuple[Layout, KeyValues, list[Tensor], Tensor]:
    """Rows after contexts of 3, none and 2 tokens, their queries, keys and values, and who sees whom."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    known = KeyValues([(noise(5, 2, 16), noise(5, 2, 16))], (Prefix(0, 3, 3), Prefix(1, 2, 2)))
    contexts = [Prefix(0, 3, 3), Prefix(), Prefix(1, 2, 2)]
    layout = Layout.of(ROWS, torch.device(device), contexts=contexts, known=known)
    mask = torch.zeros(15, 20, dtype=torch.bool)
    mask[:9, :3] = mask[14, 3:5] = True
    for token in range(9):
        mask[token, 5 : 5 + token + 1] = True
    mask[2:6, 5 + 2 : 5 + 6] = True
    mask[9:14, 5 + 9 : 5 + 14] = mask[14, 5 + 14] = True
    return layout, known, [noise(15, 4, 16), noise(15, 2, 16), noise(15, 2, 16)], mask.to(device)


def _masked(known: KeyValues, tensors: list[Tensor], mask: Tensor) -> Tensor:
    query, *rest = tensors
    key, value = (torch.cat(pair).float().transpose(0, 1) for pair in zip(known.layers[0], rest, strict=True))
    heads = query.float().transpose(0, 1)
    out = scaled_dot_product_attention(heads[None], key[None], value[None], attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def test_a_token_sees_its_context_and_what_is_before_it_and_its_image() -> None:
    layout, known, tensors, mask = _case("cpu", torch.float32)
    torch.testing.assert_close(layout.attend(*tensors, known.layers[0]), _masked(known, tensors, mask))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_ragged_kernel_of_a_gpu_agrees() -> None:
    """bfloat16: 8 bits of a sum of at most 12 values about 1."""
    layout, known, tensors, mask = _case("cuda", torch.bfloat16)
    found = layout.attend(*tensors, known.layers[0])
    torch.testing.assert_close(found.float(), _masked(known, tensors, mask), rtol=2e-2, atol=2e-2)


def test_places_of_grids_in_a_table() -> None:
    # A table of 10 x 10: rows are 10 apart.
    places = grid_places([(1, 3), (2, 2), (1, 3)], 10)
    assert places.tolist() == [0, 1, 2, 0, 1, 10, 11, 0, 1, 2]


@given(st.lists(st.builds(range, st.integers(-5, 40), st.integers(-5, 40))))
def test_joined_ranges_follow_one_another(ranges: list[range]) -> None:
    joined = joined_ranges(ranges)
    assert joined.dtype == torch.int64
    assert joined.tolist() == [number for each in ranges for number in each]
