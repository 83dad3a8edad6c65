"""Requests, tracks and responses: lineage, groups, stored transitions, what scorers see."""

from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.types.batch import same_value
from unirl.types.errors import ContractError
from unirl.types.media import Images, SizedImages, Texts, Videos
from unirl.types.noise import NoiseRecipe, noise_keys
from unirl.types.reward import RewardRequest
from unirl.types.rollout import Credit, RolloutReq, RolloutResp, RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment, SegmentStatus, SizedLatents, TextSegment, UnfinishedSteps
from unirl.types.storage import load_rollout, save_rollout


def roots() -> RolloutTrack:
    return RolloutTrack(
        sample_ids=["a0", "b0", "a1"], parent_ids=["a", "b", "a"], rewards=torch.tensor([1.0, 2.0, 3.0])
    )


def test_a_root_track_is_grouped_as_the_request_says():
    req = RolloutReq(sample_ids=["a0", "a1"], group_ids=["a", "a"])
    track = req.make_root_track(conditions={}, segment=None, decoded=Texts(texts=["x", "y"]))
    assert (track.sample_ids, track.group_ids, track.parent_track) == (["a0", "a1"], ["a", "a"], None)
    alone = RolloutReq(sample_ids=["a0"]).make_root_track(conditions={}, segment=None, decoded=None)
    assert alone.parent_ids is None
    assert alone.group_ids == ["a0"]


def test_a_request_without_ids_makes_no_track():
    with pytest.raises(ContractError, match="without sample_ids"):
        RolloutReq().make_root_track(conditions={}, segment=None, decoded=None)


def test_a_track_without_rewards_has_none_to_give():
    assert roots().scored_rewards.tolist() == [1, 2, 3]
    with pytest.raises(ContractError, match="no rewards; score it first"):
        _ = RolloutTrack(sample_ids=["a"]).scored_rewards


def test_a_track_splits_into_its_groups_in_order_of_appearance():
    assert [part.sample_ids for part in roots().split()] == [["a0", "a1"], ["b0"]]


def test_a_fork_names_children_after_their_parents():
    child = roots().fork("text", "image", 2)
    assert child.sample_ids[:3] == ["a0/i0", "a0/i1", "b0/i0"]
    assert child.group_ids[:3] == ["a0", "a0", "b0"]
    assert child.parent_track == "text"
    with pytest.raises(ContractError, match="branch = 0 must be at least 1"):
        roots().fork("text", "image", 0)
    with pytest.raises(ContractError, match="needs a name"):
        roots().fork("text", "", 1)


def test_a_response_splits_with_its_whole_lineage_and_joins_again():
    resp = RolloutResp(tracks={"text": roots(), "image": roots().fork("text", "image", 2)})
    parts = resp.split()
    assert [part.tracks["text"].sample_ids for part in parts] == [["a0", "a1"], ["b0"]]
    assert [part.tracks["image"].batch_size for part in parts] == [4, 2]
    joined = RolloutResp.concat(parts)
    assert joined.equals(resp.select([0, 2, 1]))
    assert joined.batch_size == len(joined) == 3


def test_metadata_only_keeps_ids_and_numbers():
    track = roots().replace(decoded=Texts(texts=["x"] * 3))
    resp = RolloutResp(tracks={"text": track}, reward_compute_s=2.0)
    light = resp.metadata_only()
    assert light.tracks["text"].decoded is None
    assert same_value(light.tracks["text"].rewards, track.rewards)
    assert light.reward_compute_s == 2.0


@pytest.mark.parametrize(
    ("tracks", "message"),
    [
        ({"x": roots().replace(parent_track="y")}, r"track x grows from y, which is not in \['x'\]"),
        (
            {"t": roots(), "x": roots().fork("t", "x", 1).replace(parent_ids=["a0", "zz", "a1"])},
            r"track x has parents \['zz'\] that t lacks",
        ),
        ({"t": RolloutTrack(sample_ids=["a", "a"])}, r"sample_ids of track t repeat \['a'\]"),
        (
            {
                "root": roots(),
                "x": RolloutTrack(sample_ids=["s"], parent_ids=["s"], parent_track="y"),
                "y": RolloutTrack(sample_ids=["s"], parent_ids=["s"], parent_track="x"),
            },
            "tracks grow from each other: x <- y <- x",
        ),
    ],
)
def test_a_broken_lineage_is_named(tracks, message):
    with pytest.raises(ContractError, match=message):
        RolloutResp(tracks=tracks)


def test_a_response_has_one_root_and_repeats_no_sample():
    two = RolloutResp(tracks={"a": roots(), "b": roots()})
    with pytest.raises(ContractError, match=r"expected one root track, found \['a', 'b'\]"):
        two.root_track()
    with pytest.raises(ContractError, match="repeat"):
        RolloutResp(tracks={"a": roots()}).select([0, 0])
    with pytest.raises(ContractError, match="repeat"):
        RolloutResp(tracks={"a": roots()}).repeat_interleave(2)
    with pytest.raises(ContractError, match="repeat"):
        RolloutResp.concat([RolloutResp(tracks={"a": roots()})] * 2)
    assert RolloutResp().batch_size == 0


# Credit ---------------------------------------------------------------------------------------------------------------


def family(rewards: list[float], *, parents: list[str] | None = None, **fields: Any) -> RolloutResp:
    """Three prompts' texts, and images that grew from them in the order of `parents`."""
    names = parents if parents is not None else ["a0", "b0", "a1"] * 2
    image = RolloutTrack(
        sample_ids=[f"i{k}" for k in range(len(names))],
        parent_ids=names,
        parent_track="text",
        rewards=torch.tensor(rewards),
        **fields,
    )
    return RolloutResp(tracks={"text": roots().replace(rewards=None), "image": image})


@pytest.mark.parametrize(
    ("how", "rewards", "sharpness"),
    [
        ("mean", [2.5, 2.0, 0.0], [4.0, 5.0, 6.0]),
        ("max", [4.0, 2.0, 1.0], [7.0, 8.0, 9.0]),
        ("sum", [5.0, 4.0, 0.0], [8.0, 10.0, 12.0]),
        ("best_of", [4.0, 2.0, 1.0], [7.0, 2.0, 3.0]),
    ],
)
def test_parents_are_credited_as_worked_by_hand(how, rewards, sharpness):
    children = family(
        [1.0, 2.0, 1.0, 4.0, 2.0, -1.0], component_rewards={"sharp": torch.tensor([1.0, 2.0, 3.0, 7.0, 8.0, 9.0])}
    )
    text = children.propagate_rewards("image", "text", how).tracks["text"]
    assert text.scored_rewards.dtype == torch.float32
    assert text.scored_rewards.tolist() == rewards and text.component_rewards["sharp"].tolist() == sharpness
    assert text.reward_errors == [None] * 3 and children.tracks["text"].rewards is None


@settings(max_examples=30)
@given(
    st.lists(st.integers(-8, 8), min_size=3, max_size=12),
    st.sampled_from(get_args(Credit)),
    st.randoms(use_true_random=False),
)
def test_credit_depends_neither_on_the_order_of_children_nor_on_how_samples_are_cut(values, how, random):
    parents = ["a0", "b0", "a1", *(random.choice(["a0", "b0", "a1"]) for _ in values[3:])]
    scored = family([float(value) for value in values], parents=parents)
    credited = scored.propagate_rewards("image", "text", how)
    order = list(range(len(values)))
    random.shuffle(order)
    mixed = RolloutResp(tracks={**scored.tracks, "image": scored.tracks["image"].select(order)})
    again = mixed.propagate_rewards("image", "text", how).tracks["text"]
    assert again.scored_rewards.tolist() == credited.tracks["text"].scored_rewards.tolist()
    parts = [scored.select([row]).propagate_rewards("image", "text", how) for row in range(3)]
    assert RolloutResp.concat(parts).tracks["text"].equals(credited.tracks["text"])
    assert len(set(values)) > 1 or how == "sum" or set(again.scored_rewards.tolist()) == {float(values[0])}


def test_a_parent_of_a_child_without_a_score_has_none_either():
    nan = float("nan")
    scored = family(
        [1.0, 2.0, 3.0, nan, 5.0, 6.0], reward_errors=[None] * 3 + ["it broke", None, None],
        component_rewards={"sharp": torch.tensor([1.0, 2.0, 3.0, nan, 5.0, 6.0])},
    )  # fmt: skip
    for how in get_args(Credit):
        text = scored.propagate_rewards("image", "text", how).tracks["text"]
        assert text.reward_errors == ["i3: it broke", None, None] and text.failed_groups == {"a"}
        assert text.scored_rewards.isnan().tolist() == [True, False, False]
        assert text.component_rewards["sharp"].isnan().tolist() == [True, False, False]


def test_impossible_credit_is_refused():
    scored = family([1.0] * 6)
    cases: list[tuple[RolloutResp, Any, str]] = [
        (scored, ("image", "image", "mean"), "track image grows from text, not from image"),
        (scored, ("image", "text", "median"), "how = 'median' must be one of 'mean', 'max', 'sum', 'best_of'"),
        (scored.with_values("image", rewards=None), ("image", "text", "mean"), "has no rewards to credit text with"),
        (scored.with_values("text", rewards=torch.ones(3)), ("image", "text", "mean"), "already has rewards"),
        (family([1.0, 2.0], parents=["a0", "b0"]), ("image", "text", "mean"), r"samples \['a1'\] .* no children"),
    ]
    for resp, arguments, message in cases:
        with pytest.raises(ContractError, match=message):
            resp.propagate_rewards(*arguments)


def test_descendants_have_the_inputs_metadata_and_groups_of_their_root():
    text = roots().replace(primitives={"text": Texts(texts=["x", "y", "z"])}, metadata=[{"n": 0}, {"n": 1}, {"n": 2}])
    image = text.fork("text", "image", 2)
    crop = image.select([5, 0]).fork("image", "crop", 1)
    resp = RolloutResp(tracks={"text": text, "image": image, "crop": crop})
    found = resp.with_inputs("crop")
    assert found.sample_ids == ["a1/i1/c0", "a0/i0/c0"] and found.group_ids == ["a", "a"]
    assert found.primitives["text"].equals(Texts(texts=["z", "x"])) and found.metadata == [{"n": 2}, {"n": 0}]
    assert resp.with_inputs("text") is text


def test_a_shard_in_which_nothing_was_scored_joins_others():
    scored = roots().replace(component_rewards={"sharp": torch.ones(3)}, reward_errors=[None] * 3)
    failed = RolloutTrack(
        sample_ids=["c0"], parent_ids=["c"], rewards=torch.tensor([float("nan")]), reward_errors=["no"]
    )
    joined = RolloutTrack.concat([failed, scored])
    assert joined.component_rewards["sharp"].isnan().tolist() == [True, False, False, False]
    assert joined.reward_errors == ["no", None, None, None] and joined.failed_groups == {"c"}


def test_what_was_counted_in_one_shard_alone_is_zero_in_others():
    counted = roots().replace(counts={"turns": torch.ones(3), "calls": torch.full((3,), 2.0)})
    other = RolloutTrack(sample_ids=["c0"], parent_ids=["c"], rewards=torch.zeros(1), counts={"turns": torch.ones(1)})
    joined = RolloutTrack.concat([other, counted.replace(component_rewards={}, reward_errors=[])])
    assert {name: values.tolist() for name, values in joined.counts.items()} == {
        "turns": [1, 1, 1, 1],
        "calls": [0, 2, 2, 2],
    }


def segment(**changes) -> LatentSegment:
    fields: dict[str, Any] = dict(
        latents=torch.arange(2 * 3 * 4).reshape(2, 3, 4).float(),
        sigmas=torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]),
        indices=[1, 2, 4],
        sde_indices=[1],
    )
    return LatentSegment(**{**fields, **changes})


def test_transitions_are_read_from_their_slots():
    x, following, sigma, sigma_next = segment().transitions(torch.tensor([1, 0]), torch.tensor([1, 1]))
    assert torch.equal(x, segment().latents[[1, 0], 0])
    assert torch.equal(following, segment().latents[[1, 0], 1])
    assert sigma.tolist() == [0.75, 0.75]
    assert sigma_next.tolist() == [0.5, 0.5]
    assert torch.equal(segment().clean_latents, segment().latents[:, 2])
    assert segment().num_steps == 4


def test_positions_that_were_not_stored_are_named():
    with pytest.raises(KeyError, match=r"steps \[2, 3\] were not stored; stored positions are \[1, 2, 4\]"):
        segment().transitions(torch.tensor([0, 0, 0]), torch.tensor([3, 1, 2]))
    with pytest.raises(KeyError, match="position 0 was not stored"):
        segment().latents_at(0)


def test_noise_ids_change_with_the_rollout_and_may_be_shared_by_a_group():
    assert noise_keys(5, ["a0", "a1"], ["a", "a"], same_noise=False) == ["r5:a0", "r5:a1"]
    assert noise_keys(5, ["a0", "a1"], ["a", "a"], same_noise=True) == ["r5:a", "r5:a"]


def test_given_initial_latents_must_fit_the_recipe():
    NoiseRecipe(("a",), 0, (2, 2), torch.zeros(1, 2, 2))
    with pytest.raises(ContractError, match=r"\(2, 2, 2\) must be \(1, 2, 2\)"):
        NoiseRecipe(("a",), 0, (2, 2), torch.zeros(2, 2, 2))


def test_a_reward_request_gives_what_it_has_and_names_what_it_lacks():
    pixels = torch.zeros(1, 3, 2, 2)
    request = RewardRequest(primitives={"text": Texts(texts=["x"])}, generated={"image": Images(pixels=pixels)})
    assert request.prompts == ["x"]
    assert request.pixels is pixels
    video = RewardRequest(generated={"video": Videos.pack(frames=[pixels])})
    with pytest.raises(ContractError, match=r"no generated image; it has \['video'\]"):
        _ = video.pixels
    with pytest.raises(ContractError, match=r"no text input; it has \[\]"):
        _ = video.prompts


def images_of(ids: str, height: int, width: int) -> RolloutTrack:
    """Noise and one stochastic step, of images whose pixels are 8 latents wide."""
    latents = torch.randn(len(ids), 2, 4, height // 8, width // 8, generator=torch.Generator().manual_seed(height))
    return RolloutTrack(
        sample_ids=list(ids),
        decoded=Images(pixels=torch.rand(len(ids), 3, height, width)),
        segment=LatentSegment(
            latents=latents,
            sigmas=torch.tensor([1.0, 0.0]),
            indices=[0, 1],
            sde_indices=[0],
            sde_logp=torch.randn(len(ids), 1),
            sde_means=latents[:, :1],
            params=DiffusionSamplingParams(num_inference_steps=1, height=height, width=width),
        ),
    )


def test_images_of_several_sizes_are_one_track_that_comes_apart_again(tmp_path):
    asked = DiffusionSamplingParams(num_inference_steps=1, height=64, width=64)
    wide, square = images_of("abc", 16, 32), images_of("de", 24, 24)
    joined = RolloutTrack.concat([wide.sized(asked), square.sized(asked)])
    mixed = joined.select([3, 0, 4, 2, 1])
    assert isinstance(mixed.segment, SizedLatents) and isinstance(mixed.decoded, SizedImages)
    assert mixed.segment.sizes == [(24, 24), (16, 32), (24, 24), (16, 32), (16, 32)]
    parts = mixed.by_size()
    assert [rows for rows, _ in parts] == [[0, 2], [1, 3, 4]]
    assert parts[0][1].equals(square) and parts[1][1].equals(wide.select([0, 2, 1]))
    assert [rows for rows, _ in wide.by_size()] == [[0, 1, 2]]
    save_rollout(tmp_path / "a", RolloutResp(tracks={"image": mixed}))
    assert load_rollout(tmp_path / "a")[0].tracks["image"].equals(mixed)
    with pytest.raises(ContractError, match="have the sizes .*take them apart by size"):
        mixed.segment.of_one_size()
    with pytest.raises(ContractError, match="has no size"):
        roots().sized(asked)
    with pytest.raises(ContractError, match="without params has no size in pixels"):
        segment().sized()


def part_of_texts(names: list[str], versions: list[list[int]] | None = None, **more: Any) -> RolloutResp:
    """Texts of two tokens that version 3 began."""
    packed = {} if versions is None else {"versions": [torch.tensor(own) for own in versions]}
    segment = TextSegment.pack(tokens=[torch.arange(2)] * len(names), **packed)
    track = RolloutTrack(sample_ids=names, segment=segment, policy_versions=torch.full((len(names),), 3), **more)
    return RolloutResp(tracks={"text": track})


def part_of_latents(names: list[str], reached: int = 2, **more: Any) -> RolloutTrack:
    num = len(names)
    segment = LatentSegment(latents=torch.ones(num, 3, 1, 1), sigmas=torch.tensor([1.0, 0.5, 0]), indices=[0, 1, 2])
    if reached < 2:
        state = torch.ones(num, 1, 1, 1)
        segment.unfinished = UnfinishedSteps(reached=torch.full((num,), reached), state=state)
        segment.status = torch.full((num,), SegmentStatus.ABORTED)
        more["is_unfinished"] = torch.ones(num, dtype=torch.bool)
    decoded = Images(pixels=torch.ones(num, 3, 2, 2)) if reached == 2 else None
    versions_B = torch.full((num,), 3)
    return RolloutTrack(sample_ids=names, segment=segment, decoded=decoded, policy_versions=versions_B, **more)


def test_parts_of_which_some_are_unfinished_join_without_media_and_say_how_far_each_is():
    joined = RolloutTrack.concat([part_of_latents(["a", "b"]), part_of_latents(["c"], 1), part_of_latents(["d"], 0)])
    segment = joined.segment
    assert isinstance(segment, LatentSegment) and segment.unfinished is not None and segment.status is not None
    assert segment.reached.tolist() == [2, 2, 1, 0] and joined.decoded is None
    assert segment.status.tolist() == [SegmentStatus.COMPLETED] * 2 + [SegmentStatus.ABORTED] * 2
    assert joined.is_unfinished is not None and joined.is_unfinished.tolist() == [False, False, True, True]
    assert joined.policy_versions is not None
    versions = segment.versions_by_step(joined.policy_versions)
    assert versions.tolist() == [[3, 3], [3, 3], [3, -1], [-1, -1]]
    with pytest.raises(ContractError, match=r"versions \(4, 3\) must be \[B, T\] = \[4, 2\]"):
        segment.replace(versions=torch.zeros(4, 3))


def test_parts_of_which_some_denoising_was_continued_join_with_the_versions_of_all_steps():
    continued = part_of_latents(["a"], last_versions=torch.tensor([4]))
    assert isinstance(continued.segment, LatentSegment)
    continued.segment.versions = torch.tensor([[3, 4]])
    joined = RolloutTrack.concat([part_of_latents(["b", "c"]), continued])
    assert isinstance(joined.segment, LatentSegment) and joined.segment.versions is not None
    assert joined.segment.versions.tolist() == [[3, 3], [3, 3], [3, 4]]
    assert joined.last_versions is not None and joined.last_versions.tolist() == [3, 3, 4]
    assert joined.decoded is not None


def test_parts_of_which_some_were_continued_join_with_the_versions_of_all_tokens():
    continued = part_of_texts(["a"], [[3, 4]], last_versions=torch.tensor([4]))
    joined = RolloutResp.concat([part_of_texts(["b", "c"]), continued]).root_track()
    assert isinstance(joined.segment, TextSegment) and joined.segment.versions is not None
    assert joined.segment.versions.tolist() == [3, 3, 3, 3, 3, 4]
    assert joined.last_versions is not None and joined.last_versions.tolist() == [3, 3, 4]
    cut = part_of_texts(["d"], is_unfinished=torch.tensor([True]))
    assert RolloutResp.concat([part_of_texts(["b", "c"]), cut]).num_unfinished == 1
    assert part_of_texts(["b"]).num_unfinished == 0
