"""VBench's consistency and style of videos by hand, and frame by frame on tiny random models."""

from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cosine_similarity, interpolate

from unirl.reward.local.images.clip import CLIPRewardScorer
from unirl.reward.local.preprocess import CLIP_MEAN, CLIP_STD
from unirl.reward.local.video.consistency import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    AppearanceStyleScorer,
    BackgroundConsistencyScorer,
    SubjectConsistencyScorer,
    feature_consistency,
)
from unirl.types.errors import ConfigError

from .test_video import request_of, videos


@pytest.fixture(scope="module")
def vit_folder(tmp_path_factory):
    """A random ViTModel without a pooler, as DINO's is."""
    path = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    layers: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.ViTConfig(image_size=16, patch_size=4, **layers)
    model = transformers.ViTModel(config, add_pooling_layer=False)
    for parameter in model.parameters():
        parameter.data.mul_(8) if parameter.ndim > 1 else None
    model.save_pretrained(path)
    return str(path)


def by_frames(features):
    """As VBench adds it up: frame after frame, each next to the one before and to the first."""
    total = 0.0
    for number in range(1, len(features)):
        before = max(0.0, cosine_similarity(features[number - 1], features[number], dim=-1).item())
        first = max(0.0, cosine_similarity(features[0], features[number], dim=-1).item())
        total += (before + first) / 2
    return total / (len(features) - 1)


def byte_input(frame, size, mode, mean, std):
    """Input [1, 3, h, w] of one frame: bytes, resized as bytes, normalised."""
    read = (frame * 255).round().to(torch.uint8)
    resized = interpolate(read[None].double(), size=size, mode=mode).clamp(0, 255).round()
    return ((resized / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]).float()


def test_consistency_by_hand():
    east, north, west = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0]), torch.tensor([-1.0, 0.0])
    assert feature_consistency(torch.stack([east, east])) == 1
    assert feature_consistency(torch.stack([east, north, east])) == 0.25  # (0 + 0) / 2, (0 + 1) / 2
    assert feature_consistency(torch.stack([east, west])) == 0  # never negative
    assert feature_consistency(east[None]) == 1


def test_subjects_are_compared_by_the_class_token_of_whole_frames(vit_folder):
    frames = [torch.rand(5, 3, 20, 30, generator=torch.Generator().manual_seed(1)), torch.rand(3, 3, 20, 30)]
    scorer = SubjectConsistencyScorer(model=vit_folder, frames_per_forward=2)
    found = scorer.score(request_of(frames)).rewards
    model = transformers.ViTModel.from_pretrained(vit_folder, add_pooling_layer=False).eval()
    for video, value in zip(frames, found, strict=True):
        inputs = [byte_input(frame, (16, 24), "bilinear", IMAGENET_MEAN, IMAGENET_STD) for frame in video]
        with torch.no_grad():
            features = [model(each, interpolate_pos_encoding=True).last_hidden_state[0, 0] for each in inputs]
        expected = by_frames(features)
        assert expected < 0.999  # else the comparison says nothing
        assert value.item() == pytest.approx(expected, abs=1e-5)


def test_scenes_are_compared_by_the_middle_square_as_clip_sees_it(clip_folder):
    frames = [torch.rand(4, 3, 20, 40, generator=torch.Generator().manual_seed(2))]
    found = BackgroundConsistencyScorer(model=clip_folder).score(request_of(frames)).rewards
    model = transformers.CLIPModel.from_pretrained(clip_folder).eval()
    inputs = [byte_input(frame, (16, 32), "bicubic", CLIP_MEAN, CLIP_STD)[..., 8:24] for frame in frames[0]]
    with torch.no_grad():
        features = [model.get_image_features(pixel_values=each).pooler_output[0] for each in inputs]
    assert found.item() == pytest.approx(by_frames(features), abs=1e-5) and found.item() < 0.999


def test_still_videos_are_consistent_and_any_number_of_frames_per_forward_gives_the_same(vit_folder, clip_folder):
    still = [videos((1,))[0].expand(6, -1, -1, -1)]
    for scorer in (SubjectConsistencyScorer(model=vit_folder), BackgroundConsistencyScorer(model=clip_folder)):
        torch.testing.assert_close(scorer.score(request_of(still)).rewards, torch.ones(1))
    some = request_of(videos())
    by_one, by_many = (SubjectConsistencyScorer(model=vit_folder, frames_per_forward=n) for n in (1, 32))
    torch.testing.assert_close(by_one.score(some).rewards, by_many.score(some).rewards)


def test_a_style_is_the_clip_logit_of_its_words_by_hundred(clip_folder, make_request):
    frames = videos((3, 2))
    rows = [{"appearance_style": "oil painting"}, {"appearance_style": "pixel art"}]
    found = AppearanceStyleScorer(model=clip_folder).score(request_of(frames, rows)).rewards
    images = make_request(num_samples=3, per_group=3, size=16)
    of_frames = CLIPRewardScorer(model=clip_folder, normalise=False)
    images = images.replace(generated={"image": type(images.generated["image"])(pixels=frames[0])})
    images = images.replace(primitives={"text": type(images.primitives["text"])(texts=["oil painting"] * 3)})
    expected = of_frames.score(images).rewards.mean() / 100
    torch.testing.assert_close(found[0], expected)
    assert found[0] != found[1]


def test_a_prompt_without_a_style_fails_alone(clip_folder):
    request = request_of(videos((3, 2)), [{"appearance_style": "oil painting"}, {"appearance_style": 3}])
    found = AppearanceStyleScorer(model=clip_folder).score_isolated(request, "sample")
    assert found.successes == [True, False] and "appearance_style of its prompt is 3, not the words" in str(
        found.errors[1]
    )


def test_a_model_of_another_kind_is_refused(clip_folder, vit_folder):
    with pytest.raises(ConfigError, match="scorer subject_consistency: model"):
        SubjectConsistencyScorer(model=clip_folder)
    with pytest.raises(ConfigError, match="scorer background_consistency: model"):
        BackgroundConsistencyScorer(model=vit_folder)
