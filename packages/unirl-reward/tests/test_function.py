"""A user's own function as a scorer."""

import functools
import sys

import numpy as np
import pytest
import torch

from unirl.reward.function import FunctionRewardScorer
from unirl.reward.service import RewardService
from unirl.reward.worlds.shapes_latents import smoothness
from unirl.types.errors import ConfigError, ContractError, RewardError
from unirl.types.media import Texts, Videos
from unirl.types.reward import RewardRequest


def brightness(images, prompts, metadata, power=1.0):
    """Mean pixel to a power."""
    return images.mean((1, 2, 3)) ** power


def test_the_function_gets_pictures_prompts_metadata_and_keywords(make_request):
    seen = []

    def spy(images, prompts, metadata, bonus):
        seen.append((tuple(images.shape), prompts, metadata))
        return [row["row"] + bonus for row in metadata]

    rewards = FunctionRewardScorer(spy, batch_size=4, bonus=0.5).score(make_request()).rewards
    assert rewards.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert seen[1] == ((2, 3, 16, 16), ["prompt 4", "prompt 5"], [{"row": 4}, {"row": 5}])


def test_media_kept_as_bytes_are_scored_as_the_floats_they_stand_for(make_request):
    request = make_request()
    (slot, media) = next(iter(request.generated.items()))
    kept = request.replace(generated={slot: media.in_bytes()})
    expected = FunctionRewardScorer(brightness).score(kept.in_floats()).rewards
    assert torch.equal(FunctionRewardScorer(brightness).score(kept).rewards, expected)
    assert (expected - FunctionRewardScorer(brightness).score(request).rewards).abs().max() < 1 / 255


def test_a_dotted_path_and_the_callable_give_the_same(make_request, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def brightness(images, prompts, metadata):\n    return images.mean((1, 2, 3))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    request = make_request()
    scorer = FunctionRewardScorer("my_rewards.brightness")
    assert scorer.name == "brightness"
    assert torch.equal(scorer.score(request).rewards, FunctionRewardScorer(brightness).score(request).rewards)
    with pytest.raises(ConfigError, match=r"module my_rewards has no 'brightnes'; it has \['brightness'\]"):
        FunctionRewardScorer("my_rewards.brightnes")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("brightness", "must be a dotted path"),
        ("no_such_package.f", "No module named 'no_such_package'"),
        ("math.pi", "float, which cannot be called"),
        (3, "int, which cannot be called"),
    ],
)
def test_a_function_that_is_not_there_says_so(function, text):
    with pytest.raises(ConfigError, match=text):
        FunctionRewardScorer(function)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"powr": 2.0}, r"brightness\(images, prompts, metadata, power=1.0\) cannot be called .* 'powr'"),
        ({"metadata": 1}, "multiple values for argument 'metadata'"),
    ],
)
def test_keywords_that_the_function_does_not_take_are_refused_at_once(keywords, text):
    with pytest.raises(ConfigError, match=text):
        FunctionRewardScorer(brightness, **keywords)
    with pytest.raises(ConfigError, match="missing a required argument: 'bonus'"):
        FunctionRewardScorer(lambda images, prompts, metadata, bonus: [bonus])


@pytest.mark.parametrize(
    ("line", "error", "text"),
    [
        (
            "return images.mean() / zero",
            ContractError,
            "raised NameError: name 'zero' is not defined (my_rewards.py:3)",
        ),
        ("return len(7)", ContractError, "raised TypeError: object of type 'int' has no len() (my_rewards.py:3)"),
        ("return metadata[0]['target']", RewardError, "KeyError: 'target' (my_rewards.py:3)"),
        ("return images.view(7)", RewardError, "is invalid for input of size"),
    ],
)
def test_what_a_function_raises_is_named_with_its_file_and_line(make_request, tmp_path, monkeypatch, line, error, text):
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    (tmp_path / "my_rewards.py").write_text(f"# a reward\ndef wrong(images, prompts, metadata):\n    {line}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    request = make_request()
    with pytest.raises(error) as raised:
        FunctionRewardScorer("my_rewards.wrong").score(request)
    assert text in str(raised.value) and "(my_rewards.py:3)" in str(raised.value)
    del sys.modules["my_rewards"]


@pytest.mark.parametrize("value", [[1, 2.5], (1.0, True), np.array([1.0, 2.0]), torch.tensor([1, 2])])
def test_lists_arrays_and_tensors_are_numbers(make_request, value):
    scored = FunctionRewardScorer(lambda *inputs: value).score(make_request(num_samples=2))
    assert scored.rewards.dtype == torch.float32 and scored.rewards.tolist() == [float(item) for item in value]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "reward function .* returned NoneType 'None'; it must return one number per sample"),
        (1.0, "returned float '1.0'"),
        ("12", "returned str '12'"),
        ([1.0, "high"], r"returned list \"\[1.0, 'high'\]\""),
        ([1.0], r"shape \(1,\) for 2 samples"),
        (torch.ones(2, 1), r"shape \(2, 1\) for 2 samples"),
        ({"a": [1.0, 2.0]}, r"returned components \['a'\] but declares \['f'\].*component_weights"),
    ],
)
def test_anything_else_is_an_error_that_names_the_function_and_what_it_returned(make_request, value, text):
    def f(images, prompts, metadata):
        return value

    with pytest.raises(ContractError, match=text):
        RewardService([FunctionRewardScorer(f)], on_failure="drop_group").score(make_request(num_samples=2))


def test_none_for_one_sample_is_a_failure_of_that_sample(make_request):
    scorer = FunctionRewardScorer(lambda *inputs: [1.0, None], name="f")
    with pytest.raises(RewardError, match="for 1 sample .s1: its value is nan"):
        scorer.score(make_request(num_samples=2))


def test_a_dict_needs_exactly_the_declared_components(make_request):
    scorer = FunctionRewardScorer(lambda *inputs: [1.0, 1.0], name="f", component_weights={"a": 1.0})
    with pytest.raises(ContractError, match=r"returned one tensor but has component_weights for \['a'\]"):
        scorer.score(make_request(num_samples=2))
    half = FunctionRewardScorer(
        lambda *inputs: {"a": [1.0, 2.0], "b": [0.0, float("inf")]}, name="f", component_weights={"a": 1.0, "b": 1.0}
    )
    with pytest.raises(RewardError, match="s1: its component b is inf"):
        half.score(make_request(num_samples=2))


def test_partials_and_callable_objects_are_called_by_their_type_unless_named(make_request):
    scorer = FunctionRewardScorer(functools.partial(brightness, power=2.0))
    assert scorer.name == "partial"
    request = make_request()
    torch.testing.assert_close(scorer.score(request).rewards, request.pixels.mean((1, 2, 3)) ** 2, rtol=0, atol=1e-6)


def test_videos_come_as_a_list_and_texts_as_strings():
    def request(**generated):
        return RewardRequest(sample_ids=["s0", "s1"], primitives={"text": Texts(texts=["p", "q"])}, generated=generated)

    videos = Videos.pack(frames=[torch.rand(2, 3, 4, 4), torch.rand(5, 3, 4, 4)])
    lengths = FunctionRewardScorer(lambda media, *rest: [len(frames) for frames in media], name="length")
    assert lengths.score(request(video=videos)).rewards.tolist() == [2, 5]
    answers = request(text=Texts(texts=["a", "abc"]))
    letters = FunctionRewardScorer(lambda media, prompts, metadata: [len(t) for t in media], name="letters")
    assert letters.score(answers).rewards.tolist() == [1, 3]


def test_two_generated_media_are_refused():
    video = Videos.pack(frames=[torch.rand(1, 3, 2, 2)])
    request = RewardRequest(
        sample_ids=["s0"],
        primitives={"text": Texts(texts=["p"])},
        generated={"text": Texts(texts=["a"]), "video": video},
    )
    with pytest.raises(ContractError, match="takes one generated medium"):
        FunctionRewardScorer(lambda *inputs: [1.0], name="f").score(request)
    with pytest.raises(ContractError, match="no text input"):
        FunctionRewardScorer(lambda *inputs: [1.0], name="f").score(
            RewardRequest(sample_ids=["s0"], generated={"text": Texts(texts=["a"])})
        )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "a/b"}, "without '/'"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"component_weights": {"a": float("nan")}}, "must be finite numbers"),
        ({"component_weights": {"a": 0.0}}, "every component weight is 0"),
    ],
)
def test_impossible_arguments_are_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        FunctionRewardScorer(brightness, **arguments)


def energy(latents, prompts, metadata, power=2):
    """Mean power of each sample's latents."""
    return latents.abs().pow(power).flatten(1).mean(1)


def test_a_function_may_read_latents_where_nothing_is_decoded(make_request):
    latents = torch.randn(6, 2, 4, 4, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    blind = make_request().replace(generated={}, latents=latents)
    scorer = FunctionRewardScorer(energy, latents=True, batch_size=4, power=3)
    assert torch.equal(scorer.score(blind).rewards, latents.float().abs().pow(3).flatten(1).mean(1))
    with pytest.raises(ContractError, match="scorer energy scores latents, and this request has none"):
        scorer.score(make_request())
    with pytest.raises(ContractError, match="scorer energy scores generated"):
        FunctionRewardScorer(energy).score(blind)


def test_smoothness_by_hand():
    latents = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]], [[[3.0, 3.0], [3.0, 3.0]]]])
    assert smoothness(latents, ["a", "b"], [{}, {}]).tolist() == [-1.0, 0.0]
