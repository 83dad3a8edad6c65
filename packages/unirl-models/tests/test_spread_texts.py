"""Texts whose positions ranks share. What they compute together is tested with processes, tests/families."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from unirl.models.ar import packed_inputs
from unirl.models.causal_lm.bundle import CausalLMBundle
from unirl.models.packing import Packing
from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.models.qwen3.pipeline import Qwen3Pipeline
from unirl.models.qwen_vl.bundle import _own_part
from unirl.models.spread_scores import SpreadScores
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

from .tiny_text import qwen3, save_text_model


@dataclass
class OneOfRanks:
    """A rank that is told what the others would send."""

    size: int
    rank: int = 0
    of_all: list[Tensor] = field(default_factory=list)
    ring: None = None

    @property
    def num_head_parts(self) -> int:
        return self.size

    def lengths(self, length: int) -> list[int]:
        return [len(part) for part in torch.arange(length).tensor_split(self.size)]

    def own(self, whole: Tensor, dim: int) -> Tensor:
        return whole.tensor_split(self.size, dim)[self.rank]

    def gathered(self, part: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        assert [len(each) for each in self.of_all] == list(lengths)
        return torch.cat(self.of_all, dim)

    def to_heads(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        raise NotImplementedError

    def to_tokens(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_token_is_scored_by_the_rank_of_its_position_and_keeps_its_place(size: int) -> None:
    places = torch.tensor([7, 8, 9, 0, 3, 4])  # of the 11 positions of a row whose samples were sorted by length
    packing = Packing.of([3, 4, 4], torch.device("cpu"))
    row = 10 * torch.arange(11)
    ranks = [OneOfRanks(size, rank) for rank in range(size)]
    spread = [SpreadScores.of(places, packing, rank) for rank in ranks]
    scores = [rank.own(row, 0)[each.places] for rank, each in zip(ranks, spread, strict=True)]
    assert torch.cat([each.own for each in spread]).sort().values.tolist() == list(range(6))
    for rank, each in zip(ranks, spread, strict=True):
        rank.of_all = scores
        assert each.whole(scores[rank.rank], 0).tolist() == [70, 80, 90, 0, 30, 40]


def test_a_rank_reads_its_part_of_a_row_and_never_nothing() -> None:
    rows, positions = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])], [torch.arange(3), torch.arange(2)]
    parts = [packed_inputs(rows, positions, [1, 0], OneOfRanks(2, rank)) for rank in range(2)]
    assert [part.arguments["input_ids"].tolist() for part in parts] == [[[8, 9, 5]], [[6, 7]]]
    assert [part.arguments["position_ids"].tolist() for part in parts] == [[[0, 1, 0]], [[1, 2]]]
    assert parts[0].starts == [2, 0] and parts[0].arguments["packing"].lengths == (2, 3)
    short = packed_inputs(rows, positions, [1, 0], OneOfRanks(7, 6))
    assert short.arguments["input_ids"].shape == (1, 1) and short.arguments["packing"].lengths == (2, 3, 2)
    assert short.lengths == [3, 2]


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, r"topology.sp = 3 does not divide the 4 attention heads of model. Set it to one of \[1, 2, 4\]"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            4,
            r"4 neither divides the 6 heads of keys and values of model nor is a multiple of them. Set it to one of "
            r"\[1, 2, 3, 6, 12\]",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            2,
            r"the tokens of model cannot be spread over ranks: its rotations \(dynamic\) depend on the longest",
        ),
    ],
)
def test_models_that_cannot_be_shared_are_refused(changes, size, message, tmp_path) -> None:
    bundle = Qwen3Bundle(str(save_text_model(qwen3(**changes), tmp_path / "model")))
    with pytest.raises(ConfigError, match=message):
        bundle.spread_tokens(OneOfRanks(size))
    assert bundle.token_exchange is None


def test_a_decoder_gets_what_is_of_its_rank_of_rows_that_it_shares() -> None:
    packing = Packing.of([4, 3], torch.device("cpu"), OneOfRanks(2, rank=1))
    is_image = torch.tensor([[False, True, True, False, True, True, False]])
    given = {
        "packing": packing,
        "inputs_embeds": torch.arange(7.0)[None, :, None],
        "position_ids": torch.arange(7).expand(3, 1, 7),
        "visual_pos_masks": is_image,
        "deepstack_visual_embeds": [torch.arange(4.0)[:, None], 10 + torch.arange(4.0)[:, None]],
    }
    _, cut = _own_part(torch.nn.Identity(), (), given)
    assert cut["inputs_embeds"].flatten().tolist() == [4, 5, 6]  # the first rank has one more
    assert cut["position_ids"].tolist() == [[[4, 5, 6]]] * 3
    assert cut["visual_pos_masks"].tolist() == [[True, True, False]]
    assert [each.flatten().tolist() for each in cut["deepstack_visual_embeds"]] == [[2, 3], [12, 13]]
    assert _own_part(torch.nn.Identity(), (), given | {"packing": Packing.of([7], torch.device("cpu"))}) is None


def test_bundles_that_cannot_share_say_why(tmp_path) -> None:
    bundle = CausalLMBundle(str(save_text_model(qwen3(), tmp_path / "other")))
    bundle.is_packable = False
    with pytest.raises(ConfigError, match="tokens of other .* its layers are not packed attention alone"):
        bundle.spread_tokens(OneOfRanks(2))


def test_padded_rows_are_not_shared(qwen3_folder) -> None:
    bundle = Qwen3Bundle(str(qwen3_folder))
    pipeline = Qwen3Pipeline(bundle, packed=False)
    bundle.spread_tokens(OneOfRanks(2))
    params = ARSamplingParams(temperature=1.0, max_new_tokens=4)
    conditions = pipeline.encode({"text": Texts(texts=["hi"])}, params)
    segment = TextSegment.pack(tokens=[torch.tensor([1, 2])], params=params)
    with pytest.raises(ContractError, match=r"topology.sp = 2 spreads packed rows. Set pipeline.packed: null"):
        pipeline.replay(conditions, segment, params)
