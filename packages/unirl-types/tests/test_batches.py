"""Batches against Python lists: shards joined equal the whole, and selection means what it means for a list."""

import copy
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.types.batch import Batch, Kind, peak, per_sample, rows_by, same_value, shared
from unirl.types.conditions import (
    Condition,
    ExpertCondition,
    ImageEmbedCondition,
    ImageLatentCondition,
    ImagePatchCondition,
    PromptCondition,
    TextEmbedCondition,
    TextTokenCondition,
)
from unirl.types.errors import ContractError
from unirl.types.media import Audios, Embeddings, ImageLists, Images, Texts, Videos
from unirl.types.reward import RewardRequest, RewardResponse
from unirl.types.rollout import DiffusionPlan, RolloutReq, RolloutResp, RolloutTrack
from unirl.types.segments import LatentSegment, TextSegment

FEW = settings(max_examples=12, deadline=None)


def values(*shape: int) -> torch.Tensor:
    """Distinct numbers, so that a misplaced row shows."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float32).reshape(shape)


def ids(lengths: list[int]) -> list[str]:
    return [f"s{i}" for i in range(len(lengths))]


def texts(lengths):
    return Texts(texts=[f"text {i}" for i in range(len(lengths))])


def images(lengths):
    return Images(pixels=values(len(lengths), 1, 2, 2))


def image_lists(lengths):
    return ImageLists(images=[[values(1, 2, 1 + j) + i for j in range(n)] for i, n in enumerate(lengths)])


def videos(lengths):
    return Videos.pack(frames=[values(n, 1, 1, 2) + 100 * i for i, n in enumerate(lengths)], fps=8.0)


def audios(lengths):
    return Audios.pack(waveform=[values(n) + 100 * i for i, n in enumerate(lengths)], sample_rate=16000)


def embeddings(lengths):
    return Embeddings(embeds=values(len(lengths), 3))


def text_embeds(lengths):
    size = len(lengths)
    mask = torch.tensor([[1, n > 1, n > 2] for n in lengths], dtype=torch.bool).reshape(size, 3)
    return TextEmbedCondition(embeds=values(size, 3, 2), pooled=values(size, 2), attention_mask=mask)


def text_tokens(lengths):
    size = len(lengths)
    return TextTokenCondition(input_ids=values(size, 2).long(), attention_mask=torch.ones(size, 2).long())


def prompt_tokens(lengths):
    return PromptCondition.pack(tokens=[torch.arange(n + 1) + 100 * i for i, n in enumerate(lengths)])


def image_patches(lengths):
    return ImagePatchCondition.pack(
        patches=[values(2 * n, 3) + 100 * i for i, n in enumerate(lengths)],
        grids=[((1, 1, 2),) * n for n in lengths],
    )


def image_latents(lengths):
    return ImageLatentCondition(latents=values(len(lengths), 1, 2, 2))


def image_embeds(lengths):
    return ImageEmbedCondition(embeds=values(len(lengths), 2, 2), spatial_shapes=[(1, 2)])


def experts(lengths):
    return ExpertCondition.pack(experts=[torch.full((n, 3), i, dtype=torch.int16) for i, n in enumerate(lengths)])


def text_segment(lengths):
    tokens = [torch.arange(n) + 100 * i for i, n in enumerate(lengths)]
    return TextSegment.pack(
        tokens=tokens, log_probs=[item.float() for item in tokens], status=torch.arange(len(lengths))
    )


def latent_segment(lengths):
    size = len(lengths)
    return LatentSegment(
        latents=values(size, 3, 2),
        sigmas=torch.tensor([1.0, 0.5, 0.0]),
        indices=[0, 1, 2],
        sde_indices=[0, 1],
        sde_logp=values(size, 2),
        sde_means=values(size, 2, 2),
    )


def request(lengths):
    return RolloutReq(
        sample_ids=ids(lengths),
        group_ids=[f"g{i // 2}" for i in range(len(lengths))],
        primitives={"text": texts(lengths), "video": videos(lengths)},
        request_conditions={"initial_latents": image_latents(lengths)},
        metadata=[{"i": i} if i % 2 else None for i in range(len(lengths))],
        plans={"image": DiffusionPlan(torch.tensor([1.0, 0.0]), (2, 2), "flow_sde")},
        sigmas=torch.tensor([1.0, 0.0]),
        rollout_id=3,
    )


def track(lengths):
    size = len(lengths)
    return RolloutTrack(
        sample_ids=ids(lengths),
        parent_ids=[f"g{i // 2}" for i in range(size)],
        conditions={"text": text_embeds(lengths)},
        segment=text_segment(lengths),
        decoded=texts(lengths),
        rewards=torch.where(values(size) > 1, values(size), torch.nan),
        component_rewards={"a": values(size), "b": -values(size)},
    )


def response(lengths):
    root = track(lengths)
    child = root.fork("text", "image", 2, segment=latent_segment(lengths * 2))
    leaf = child.fork("image", "video", 1)
    return RolloutResp(tracks={"image": child, "video": leaf, "text": root}, reward_compute_s=1.0)


def reward_request(lengths):
    return RewardRequest(
        sample_ids=ids(lengths), primitives={"text": texts(lengths)}, generated={"image": images(lengths)}
    )


def reward_response(lengths):
    size = len(lengths)
    return RewardResponse(
        sample_ids=ids(lengths),
        rewards=values(size),
        component_rewards={"a": values(size)},
        successes=[True] * size,
        errors=[None] * size,
        compute_s=2.0,
    )


MAKERS = [
    *(texts, images, image_lists, videos, audios, embeddings),
    *(text_embeds, text_tokens, prompt_tokens, image_patches, image_latents, image_embeds, experts),
    *(text_segment, latent_segment, request, track, response, reward_request, reward_response),
]
every_container = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
sample_lengths = st.lists(st.integers(0, 4), min_size=1, max_size=7)


def one_by_one(value, row: int):
    """Sample `row` of a per-sample value, worked out without the code under test."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return value[row].tolist()
    if isinstance(value, list):
        return value[row] if value else None
    if isinstance(value, dict):
        return {key: one_by_one(item, row) for key, item in value.items()}
    return sample(value, row)


def sample(batch: Batch, row: int) -> dict:
    """Everything that belongs to one sample, as plain Python values."""
    found = {}
    for name, kind in batch.kinds().items():
        value = getattr(batch, name)
        if kind is Kind.PER_SAMPLE:
            found[name] = one_by_one(value, row)
        elif kind is Kind.PACKED and value is not None:
            bounds = batch.cu_seqlens.tolist()
            found[name] = value.tolist()[bounds[row] : bounds[row + 1]]
    return found


def same(left, right) -> bool:
    return same_value(left, right)


@every_container
@FEW
@given(lengths=sample_lengths, data=st.data())
def test_shards_joined_equal_the_whole(make, lengths, data):
    whole = make(lengths)
    assert whole.batch_size == len(lengths)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
    bounds = [0, *cuts, len(lengths)]
    shards = [whole.slice(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
    assert [shard.batch_size for shard in shards] == [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    assert type(whole).concat(shards).equals(whole)


@pytest.mark.parametrize("make", [m for m in MAKERS if m is not response], ids=lambda make: make.__name__)
@FEW
@given(lengths=sample_lengths, data=st.data())
def test_selection_agrees_with_a_list_of_samples(make, lengths, data):
    whole = make(lengths)
    model = [sample(whole, row) for row in range(len(lengths))]
    unique = make is request
    chosen = data.draw(st.lists(st.integers(-len(lengths), len(lengths) - 1), max_size=6))
    if unique:
        chosen = list(dict.fromkeys(i % len(lengths) for i in chosen))
    picked = whole.select(chosen)
    assert picked.batch_size == len(chosen)
    assert same([sample(picked, row) for row in range(len(chosen))], [model[i] for i in chosen])
    assert whole.select(torch.tensor(chosen, dtype=torch.long)).equals(picked)
    start, stop = data.draw(st.tuples(st.integers(-8, 8), st.integers(-8, 8)))
    part = whole.slice(start, stop)
    assert same([sample(part, row) for row in range(part.batch_size)], model[start:stop])
    assert whole.select(slice(start, stop)).equals(part)
    if not unique:
        twice = whole.repeat_interleave(2)
        assert same([sample(twice, row) for row in range(2 * len(lengths))], [m for m in model for _ in range(2)])


@every_container
@FEW
@given(lengths=sample_lengths, data=st.data())
def test_parts_of_a_key_each_join_in_the_order_of_the_rows(make, lengths, data):
    whole = make(lengths)
    keys = data.draw(st.lists(st.sampled_from("cab"), min_size=len(lengths), max_size=len(lengths)))
    rows = rows_by(keys)
    assert list(rows) == list(dict.fromkeys(keys))
    assert all([keys[row] for row in own] == [key] * len(own) and own == sorted(own) for key, own in rows.items())
    assert type(whole).concat_rows([(own, whole.select(own)) for own in rows.values()]).equals(whole)


@FEW
@given(lengths=sample_lengths, data=st.data())
def test_a_selected_response_holds_the_children_of_its_roots_and_no_others(lengths, data):
    whole = response(lengths)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True))
    part = whole.select(chosen)
    roots = [f"s{i}" for i in chosen]
    assert part.tracks["text"].sample_ids == roots
    assert part.tracks["image"].sample_ids == [f"{root}/i{j}" for root in roots for j in range(2)]
    assert part.tracks["video"].sample_ids == [f"{root}/i{j}/v0" for root in roots for j in range(2)]
    rows = [2 * i + j for i in chosen for j in range(2)]
    assert torch.equal(part.tracks["image"].segment.latents, whole.tracks["image"].segment.latents[rows])
    assert list(part.tracks) == list(whole.tracks)


@every_container
def test_batches_survive_pickling_copying_cloning_and_moving(make):
    whole = make([2, 0, 1])
    for again in (pickle.loads(pickle.dumps(whole)), copy.copy(whole), copy.deepcopy(whole), whole.clone()):
        assert again.equals(whole)
    assert whole.to("cpu").equals(whole)
    moved = whole.to("meta")
    assert {tensor.device.type for tensor in tensors_of(moved)} <= {"meta"}


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    batch.map_tensors(lambda tensor: found.append(tensor) or tensor)
    return found


@every_container
def test_a_copy_shares_no_tensor_memory_with_the_original(make):
    whole = make([2, 1])
    before = whole.clone()
    for tensor in [
        *tensors_of(whole.clone()),
        *tensors_of(whole.select(slice(None)) if make is not request else whole.clone()),
    ]:
        if not any(tensor is own for own in tensors_of(whole)):  # shared fields may be handed on
            tensor.zero_()
    assert whole.equals(before)


@every_container
def test_indices_outside_the_batch_and_masks_are_refused(make):
    whole = make([1, 2])
    for outside in ([2], [-3], torch.tensor([5])):
        with pytest.raises(IndexError, match=r"sample -?\d of a \w+ of 2"):
            whole.select(outside)
    for mask in (torch.tensor([True, False]), [True, False]):
        with pytest.raises(ContractError, match="integer indices"):
            whole.select(mask)
    with pytest.raises(ContractError, match=r"float32 \(1,\)"):
        whole.select(torch.zeros(1))


def test_an_empty_selection_has_no_samples_and_keeps_the_tails_of_shapes():
    empty = track([1, 2]).select([])
    assert len(empty) == 0
    assert empty.segment.cu_seqlens.tolist() == [0]
    assert empty.conditions["text"].embeds.shape == (0, 3, 2)
    assert empty.select([]).equals(empty)
    assert RolloutTrack.concat([empty, track([1, 2])]).equals(track([1, 2]))


def test_packed_rows_of_no_length_keep_their_place():
    segment = TextSegment.pack(tokens=[torch.arange(0), torch.tensor([7]), torch.arange(0)])
    assert segment.lengths.tolist() == [0, 1, 0]
    assert [item.tolist() for item in segment.select([2, 1, 1, 0]).unpack("tokens")] == [[], [7], [7], []]


def test_every_token_is_trained_on_unless_a_mask_says_otherwise():
    tokens = [torch.arange(2), torch.arange(1)]
    assert TextSegment.pack(tokens=tokens).trained.tolist() == [True, True, True]
    mask = [torch.tensor([True, False]), torch.tensor([True])]
    assert TextSegment.pack(tokens=tokens, loss_mask=mask).select([1, 0]).trained.tolist() == [True, True, False]


def test_gradients_flow_through_selection_and_joining():
    weight = values(3, 2).requires_grad_()
    batch = Embeddings(embeds=weight)
    Embeddings.concat([batch.select([2]), batch.select([0])]).embeds.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1, 1], [0, 0], [1, 1]]


# What is refused


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: track([1, 2]).replace(rewards=values(3)), r"'sample_ids': 2.*'rewards': 3"),
        (
            lambda: track([1, 2]).replace(component_rewards={"a": values(2), "b": values(3)}),
            r"component_rewards\[b\]': 3",
        ),
        (lambda: RolloutTrack(rewards=torch.tensor(1.0)), "rewards is a scalar tensor"),
        (
            # the mistake under test
            lambda: RolloutTrack(component_rewards={"a": 1.0}),  # ty: ignore[invalid-argument-type]
            r"component_rewards\[a\] holds a float",
        ),
        (lambda: RolloutTrack(sample_ids=["a"], parent_ids=[]), "0 parent_ids for 1 sample_ids"),
        (lambda: RolloutTrack(sample_ids=["a"], parent_track="t"), "grows from 't' needs parent_ids"),
        (lambda: RolloutReq(sample_ids=["a", "b", "a"]), r"sample_ids repeat \['a'\]"),
        (lambda: Videos(frames=torch.zeros(1, 1, 1, 1)), r"build it with Videos\.pack"),
        (lambda: text_segment([1, 2]).replace(tokens=torch.arange(4)), r"shape \(4,\) but cu_seqlens ends at 3"),
        (lambda: TextSegment(tokens=torch.arange(2), _cu_seqlens=torch.tensor([0, 2], dtype=torch.int32)), "int64"),
        (
            lambda: TextSegment(tokens=torch.arange(2), _cu_seqlens=torch.tensor([0, 3, 2])),
            r"never fall, got \[0, 3, 2\]",
        ),
        (lambda: TextSegment.pack(tokens=[torch.zeros(2)]), r"tokens must be int64 \[N\], got torch.float32 \(2,\)"),
        (
            lambda: TextSegment.pack(tokens=[torch.arange(2)], log_probs=[values(2).double()]),
            r"log_probs must be torch.float32 \[N\], got torch.float64",
        ),
        (
            lambda: TextSegment.pack(tokens=[torch.arange(2)], loss_mask=[torch.ones(2)]),
            r"loss_mask must be torch.bool \[N\], got torch.float32",
        ),
        (lambda: PromptCondition.pack(tokens=[torch.zeros(2)]), r"int64 \[P\], got torch.float32 \(2,\)"),
        (lambda: PromptCondition.pack(tokens=[torch.arange(2), torch.arange(0)]), r"prompts \[1\] are empty"),
        (
            lambda: ImagePatchCondition.pack(patches=[values(3, 2)], grids=[((1, 2, 2),)]),
            r"take \[4\] patches, but the samples have \[3\]",
        ),
        (lambda: ImageLists(images=[[values(1, 1, 2, 2)]]), r"ImageLists must be float \[C, H, W\]"),
        (lambda: TextSegment.pack(tokens=[]), "cannot pack an empty list"),
        (lambda: TextSegment.pack(tokens=[torch.tensor(1)]), "cannot pack scalars"),
        (lambda: TextSegment.pack(status=torch.zeros(1)), "at least one packed field"),
        (
            lambda: TextSegment.pack(tokens=[torch.arange(2)], log_probs=[values(3)]),
            r"log_probs has lengths \[3\]; another packed field has \[2\]",
        ),
        (
            lambda: Videos.pack(frames=[torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 3)]),
            r"past dimension 0: \['\[1, 2, 2\]', '\[1, 2, 3\]'\]",
        ),
        (lambda: Images(pixels=torch.zeros(3, 2, 2)), r"float or uint8 \[B, C, H, W\], got torch.float32 \(3, 2, 2\)"),
        (lambda: Images(pixels=torch.zeros(1, 3, 2, 2, dtype=torch.int32)), "float or uint8 .*, got torch.int32"),
        (lambda: Audios.pack(waveform=[torch.zeros(1, 2, 3)]), r"\[sum L\] or \[sum L, C\]"),
        (lambda: Images.from_list([]), "empty list of images"),
        (lambda: Images.from_list([torch.zeros(3, 2, 2), torch.zeros(3, 2, 4)]), r"\(3, 2, 2\), \(3, 2, 4\).*pad=True"),
        (lambda: Images.from_list([torch.zeros(3, 2, 2), torch.zeros(1, 2, 2)], pad=True), r"channels \[1, 3\]"),
        (lambda: TextEmbedCondition(embeds=values(2, 3, 1), attention_mask=torch.ones(2, 4)), r"\(2, 4\).*\(2, 3\)"),
        (lambda: TextTokenCondition(input_ids=torch.ones(2), attention_mask=torch.ones(2)), r"\[B, L\], got \(2,\)"),
        (lambda: texts([1]).repeat_interleave(0), "repeats must be at least 1, got 0"),
        (lambda: texts([1]).unpack("texts"), "texts is not a packed field"),
        (lambda: texts([1]).cu_seqlens, "holds no packed field"),
        (lambda: Texts.concat([]), "zero Textss"),
        (lambda: Texts.concat([texts([1]), images([1])]), r"cannot join \['Images', 'Texts'\]"),
        (
            lambda: RolloutTrack.concat(
                [RolloutTrack(sample_ids=["a"], rewards=values(1)), RolloutTrack(sample_ids=["b"])]
            ),
            r"RolloutTrack\.rewards: present in 1 shards and absent in 1",
        ),
        (
            lambda: Embeddings.concat([embeddings([1]), Embeddings(embeds=values(1, 3).half())]),
            r"disagree on the dtype: \['torch.float16', 'torch.float32'\]",
        ),
        (
            lambda: RolloutTrack.concat([RolloutTrack(decoded=texts([1])), RolloutTrack(decoded=images([1]))]),
            r"different types: \['Texts', 'Images'\]",
        ),
        (
            lambda: RolloutTrack.concat(
                [RolloutTrack(component_rewards={"a": values(1)}), RolloutTrack(component_rewards={"b": values(1)})]
            ),
            r"different keys: \[\['a'\], \['b'\]\]",
        ),
        (
            lambda: RolloutReq.concat([RolloutReq(sigmas=values(2)), RolloutReq(sigmas=values(3))]),
            r"RolloutReq\.sigmas is shared but shards disagree",
        ),
    ],
)
def test_a_broken_contract_names_both_sides(build, message):
    with pytest.raises(ContractError, match=message):
        build()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sigmas": torch.zeros(3, dtype=torch.float64)}, r"sigmas must be float32 \[T\+1\], got torch.float64 \(3,\)"),
        ({"indices": [0, 1]}, r"latents \(2, 3, 2\) must be \[B, K, \.\.\.\] with K = 2"),
        ({"indices": [0, 1, 1]}, r"indices repeat a position: \[0, 1, 1\]"),
        ({"indices": [0, 1, 3]}, r"stored positions \[0, 1, 3\] must lie in 0\.\.2"),
        ({"sde_indices": [0, 2]}, r"stochastic steps \[0, 2\] must lie in 0\.\.1"),
        ({"sde_logp": values(2, 3)}, r"sde_logp \(2, 3\) must start with \[B, S\] = \[2, 2\]"),
        ({"sde_means": values(2, 1, 2)}, r"sde_means \(2, 1, 2\) must start with \[B, S\] = \[2, 2\]"),
    ],
)
def test_a_latent_segment_checks_its_geometry(changes, message):
    with pytest.raises(ContractError, match=message):
        latent_segment([0, 0]).replace(**changes)


def test_assignment_is_checked_and_undone_where_it_fails():
    one = track([1, 2])
    one.rewards = torch.ones(2)
    with pytest.raises(ContractError, match="'rewards': 3"):
        one.rewards = values(3)
    assert one.rewards.tolist() == [1, 1]
    with pytest.raises(AttributeError, match="no field 'reward'; it has"):
        one.reward = values(2)


def test_a_field_without_a_kind_is_refused():
    @dataclasses.dataclass(kw_only=True, eq=False)
    class Wrong(Batch):
        value: int = 0

    with pytest.raises(TypeError, match=r"Wrong\.value declares no kind"):
        Wrong()


def test_peaks_merge_by_maximum_and_shared_values_stay():
    @dataclasses.dataclass(kw_only=True, eq=False)
    class Timed(Batch):
        rows: list[int] = per_sample(default_factory=list)
        seconds: float = peak(default=0.0)
        note: float = shared(default=float("nan"))

    joined = Timed.concat([Timed(rows=[1], seconds=2.0), Timed(rows=[2, 3], seconds=1.0)])
    assert (joined.rows, joined.seconds, joined.batch_size) == ([1, 2, 3], 2.0, 3)
    assert list(Timed.kinds()) == ["rows", "seconds", "note"]
    assert Timed.kinds() is Timed.kinds()


def test_equality_is_of_bits():
    nan = torch.tensor([float("nan")])
    assert same_value(nan, nan.clone())
    assert not same_value(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_value(torch.ones(1), torch.ones(1).half())
    assert not same_value(torch.ones(2), torch.ones(2, 1))
    assert not texts([1]).equals(images([1]))
    assert not same_value([1], (1,))


def test_counters_of_scored_shards_add_up():
    shards = [reward_response([1]).replace(counters={"failed": 1}), reward_response([1]).replace(counters={"late": 2})]
    assert RewardResponse.concat([*shards, reward_response([1])]).counters == {"failed": 1, "late": 2}
    assert RewardResponse.concat([reward_response([1]), reward_response([1])]).counters is None


# Padding


def test_text_embeddings_pad_to_the_longest_with_masked_zeros():
    short = TextEmbedCondition(embeds=torch.ones(1, 1, 2), attention_mask=torch.ones(1, 1, dtype=torch.bool))
    long = TextEmbedCondition(embeds=torch.ones(2, 3, 2), attention_mask=torch.ones(2, 3, dtype=torch.bool))
    joined = TextEmbedCondition.concat([short, long])
    assert joined.embeds[0].tolist() == [[1, 1], [0, 0], [0, 0]]
    assert joined.attention_mask is not None
    assert joined.attention_mask[0].tolist() == [True, False, False]
    assert joined.attention_mask[1:].all()
    assert Condition.concat([short, long]).equals(joined)
    assert joined.mask is joined.attention_mask
    assert TextEmbedCondition(embeds=torch.ones(2, 3, 2)).mask.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_text_embeddings_without_a_mask_do_not_pad():
    short, long = (TextEmbedCondition(embeds=torch.ones(1, n, 2)) for n in (1, 3))
    with pytest.raises(ContractError, match=r"lengths \[1, 3\] cannot join without an attention_mask"):
        TextEmbedCondition.concat([short, long])
    masked = short.replace(attention_mask=torch.ones(1, 1))
    with pytest.raises(ContractError, match="attention_mask: present in 1 shards and absent in 1"):
        TextEmbedCondition.concat([masked, long])


def test_tokens_pad_to_the_longest():
    parts = [
        TextTokenCondition(input_ids=torch.full((1, n), 7), attention_mask=torch.ones(1, n).long()) for n in (2, 3)
    ]
    joined = TextTokenCondition.concat(parts)
    assert joined.input_ids.tolist() == [[7, 7, 0], [7, 7, 7]]
    assert joined.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_images_of_different_sizes_pad_right_and_bottom_when_asked():
    padded = Images.from_list([torch.ones(1, 1, 2), torch.ones(1, 2, 1)], pad=True)
    assert padded.pixels.tolist() == [[[[1, 1], [0, 0]]], [[[1, 0], [1, 0]]]]


def test_pixels_in_bytes_are_rounded_once_and_come_back_as_the_nearest_floats():
    pixels = torch.linspace(-0.1, 1.1, 48).reshape(4, 3, 2, 2)
    for media in (Images(pixels=pixels), Videos.pack(frames=[pixels[:1], pixels[1:]], fps=8.0)):
        kept = media.in_bytes()
        assert same_value(kept.in_bytes(), kept) and same_value(media.in_floats(), media)
        back = kept.in_floats()
        found = back.pixels if isinstance(back, Images) else back.frames
        assert found.dtype == torch.float32
        assert float((found - pixels.clamp(0, 1)).abs().max()) <= 0.5 / 255 + 1e-6
        assert same_value(back.in_bytes(), kept)
